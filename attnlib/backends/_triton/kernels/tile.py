"""The vocabulary of the attention kernels: which keys, which scores, which weights, one tile at a time.

Scores are kept in units of ``log2``: a weight is ``exp2(score * unit - top * unit)``.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Parameters whose divisibility decides nothing, and must not compile a kernel again.
COUNTS = (
    "slopes_b", "dslopes_b", "dslopes_h", "dlse_b", "dlse_h", "dlse_s", "batch", "heads", "kv_heads",
    "group", "s", "t", "heads_per_wave", "left", "right", "prefix", "threshold",
)  # fmt: skip


@triton.jit
def load_where(at, columns, some, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows of ``WIDTH`` columns from pointers ``at``, zeros beyond; where masked, zeros but for ``some`` rows."""
    PADDED: tl.constexpr = columns.shape[0] > WIDTH
    if MASKED and PADDED:
        return tl.load(at, mask=some[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=some[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_rows(ptr, row, rows, columns, stride, end, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``row + rows`` of a matrix ``[end, WIDTH]``, zeros beyond it; ``stride`` is in elements."""
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    return load_where(at, columns, row + rows < end, WIDTH, MASKED)


@triton.jit
def load_block(desc, sequence, row, head, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows from ``row`` on, of one head, by a descriptor of ``[b, t, h, d]``: addresses that take no registers."""
    return desc.load([tl.cast(sequence, tl.int32), row.to(tl.int32), head.to(tl.int32), column]).reshape(ROWS, WIDTH)


@triton.jit
def offset(cu_ptr, n, total):
    """Where packed sequence ``n`` begins, at least 0 and at most ``total``, whatever the tensor says."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), total)


@triton.jit
def locate(
    cu_q_ptr,
    cu_k_ptr,
    batch,
    heads,
    s,
    t,
    heads_per_wave,
    BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """What this program works on: sequence, head, first query; first row and rows of q, first row and rows of k.

    Heads come in waves whose keys and values fit the L2 cache; in a wave the longest rows start first. Packed
    sequence ``n`` owns blocks from ``cu[n] // BLOCK + n`` on, which leaves room for its last, partial one; sequence
    ``batch`` is what follows the last offset, and has no keys.
    """
    pairs, blocks = batch * heads, tl.cdiv(s, BLOCK)
    if VARLEN:
        pairs, blocks = heads, s // BLOCK + batch + 1
    pid = tl.program_id(0)
    first_pair = pid // (heads_per_wave * blocks) * heads_per_wave
    rest = pid - first_pair * blocks
    width = tl.minimum(heads_per_wave, pairs - first_pair)
    block, pair = rest // width, first_pair + rest % width
    if REVERSED:
        block = blocks - 1 - block
    if VARLEN:
        n, above = pid * 0, batch + 1  # no plain 0, which stays one where there is no sequence
        while above - n > 1:
            middle = (n + above) // 2
            fits = offset(cu_q_ptr, middle, s) // BLOCK + middle <= block
            n, above = tl.where(fits, middle, n), tl.where(fits, above, middle)
        row, key, keys = offset(cu_q_ptr, n, s), t, 0
        m0 = (block - row // BLOCK - n) * BLOCK
        rows = s - row
        if n < batch:
            rows = tl.maximum(offset(cu_q_ptr, n + 1, s) - row, 0)
            key = offset(cu_k_ptr, n, t)
            keys = tl.maximum(offset(cu_k_ptr, n + 1, t) - key, 0)
        m0 = tl.where(m0 < 0, rows, m0)  # offsets that decrease: nobody's block
        return n.to(tl.int64), pair.to(tl.int64), m0, row.to(tl.int64), rows, key.to(tl.int64), keys
    else:
        zero = pair.to(tl.int64) * 0
        return (pair // heads).to(tl.int64), (pair % heads).to(tl.int64), block * BLOCK, zero, s, zero, t


@triton.jit
def key_range(i0, i1, start, end, left, right, prefix, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr):
    """The keys ``[low, high)`` that some query in ``[i0, i1)`` may see, and ``[all_low, all_high)`` that each does."""
    low, all_low, high, all_high = start, start, end, end
    if LEFT:
        low = tl.maximum(start, i0 - left)
        all_low = tl.maximum(start, i1 - 1 - left)
    if RIGHT:
        high = i1 + right
        all_high = i0 + right + 1
        if PREFIX:
            high = tl.maximum(high, prefix)
            all_high = tl.maximum(all_high, prefix)
        high = tl.minimum(high, end)
        all_high = tl.maximum(tl.minimum(all_high, end), 0)
    return low, high, all_low, all_high


@triton.jit
def visible(i, j, start, end, left, right, prefix, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr):
    """Whether query ``i`` sees key ``j``, for index tensors that broadcast."""
    seen = (i == i) & (j >= start) & (j < end)
    if LEFT:
        seen = seen & (j >= i - left)
    if RIGHT:
        before = j <= i + right
        if PREFIX:
            before = before | (j < prefix)
        seen = seen & before
    return seen


@triton.jit
def tanh(x):
    """``tanh(x)`` to fp32 rounding; a Taylor polynomial near 0, where ``1 - exp`` would cancel."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    fading = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - fading) / (1 + fading)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def kept(seed, threshold, i, quad0, head, sequence, QUADS: tl.constexpr, BLOCK: tl.constexpr):
    """Which weights dropout keeps, ``[BLOCK, 4 * QUADS]``: Philox-4x32-10 of ``(j // 4, i, head, sequence)``."""
    quad = (quad0 + tl.arange(0, QUADS))[None, :] + tl.zeros([BLOCK, 1], tl.int32)
    row = i[:, None] + tl.zeros([1, QUADS], tl.int32)
    a, b, c, d = tl.philox(seed, quad, row, head.to(tl.int32), sequence.to(tl.int32))
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK, 4 * QUADS)
    return bits.to(tl.uint32, bitcast=True) >= threshold


@triton.jit
def modify(scores, scale, softcap, slope, i, j, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr):
    """Products q·k as scores in log2 units, capped and less ``slope`` (in log2 units too) times the distance."""
    scores *= scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores *= LOG2E
    if SLOPES:
        scores -= slope * tl.abs(i - j).to(tl.float32)
    return scores


@triton.jit
def finite_part(x):
    """``x`` with 0 for what is not finite, so that no product with 0 can be NaN; and whether there was any."""
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, x, 0.0), tl.min(finite.to(tl.int32)) == 0


@triton.jit
def sees_broken(seen, x):
    """Whether a row sees a value of ``x`` that is not finite, ``[rows, columns of x]``."""
    broken = tl.where(tl.abs(x) < float("inf"), 0.0, 1.0).to(tl.float16)
    return tl.dot(seen.to(tl.float16), broken) > 0


@triton.jit
def query_range(
    j0, j1, first, last, left, right, prefix, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr
):
    """The queries ``[low, high)`` that may see some key in ``[j0, j1)``, and ``[all_low, all_high)`` that see each."""
    low, all_low, high, all_high = first, first, last, last
    if RIGHT:
        low = tl.maximum(first, j0 - right)
        all_low = tl.maximum(first, j1 - 1 - right)
        if PREFIX:
            low = tl.where(j0 < prefix, first, low)
            all_low = tl.where(j1 <= prefix, first, all_low)
    if LEFT:
        high = tl.minimum(last, j1 + left)
        all_high = tl.minimum(last, j0 + left + 1)
    return low, tl.where(j0 < j1, high, first), all_low, all_high


@triton.jit
def split(low, high, all_low, all_high, BLOCK: tl.constexpr):
    """How a range falls into blocks: the first, how many before those that need no mask, of those, of all others."""
    first = low // BLOCK
    stop = tl.maximum(tl.cdiv(high, BLOCK), first)
    begin = tl.maximum(tl.cdiv(all_low, BLOCK), first)
    clear = tl.maximum(tl.minimum(all_high // BLOCK, stop) - begin, 0)
    return first, begin - first, clear, stop - first - clear


@triton.jit
def block_at(n, first, before, clear, MASKED: tl.constexpr):
    """The ``n``-th block that needs a mask, or the ``n``-th that needs none, of a range as ``split`` tells."""
    if MASKED:
        return first + n + tl.where(n < before, 0, clear)
    else:
        return first + n + before


@triton.jit
def recall(products, lse2, scale, softcap, slope, i, j, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr):
    """The weights that the forward gave, and the derivative of the scores by the scaled products (1 without a cap).

    ``lse2`` is the LSE in log2 units, +inf where a query saw nothing.
    """
    derivative = 1.0
    if SOFTCAP:
        capped = tanh(products * scale / softcap)
        derivative = 1 - capped * capped
    if SOFTCAP or SLOPES:
        scores = modify(products, scale, softcap, slope, i, j, SOFTCAP, SLOPES)
    else:
        scores = products * (scale * LOG2E)
    return tl.exp2(scores - lse2), derivative


@triton.jit
def load_some(ptr, row, rows, columns, stride, some, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows ``row + rows`` of a matrix of ``WIDTH`` columns; where masked, zeros but for ``some`` of them."""
    # The row is added before the product: addresses are made anew in each tile, and hold no registers between tiles.
    at = ptr + ((row + rows).to(tl.int64)[:, None] * stride + columns[None, :])
    return load_where(at, columns, some, WIDTH, MASKED)


@triton.jit
def store_rows(ptr, x, row, rows, columns, stride, end, WIDTH: tl.constexpr):
    """Write ``x`` into rows ``row + rows`` of a matrix ``[end, WIDTH]``; ``stride`` is in elements."""
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row + rows < end)[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def not_finite(x):
    """1 where ``x`` is NaN or infinite, else 0."""
    return tl.where(tl.abs(x) < float("inf"), 0, 1)


@triton.jit
def stain(seen, x_ptr, x_row, x_stride, x_end, ptr, row, stride, end, WIDTH: tl.constexpr):
    """Overwrite with NaN what sees a value of a matrix that is not finite: ``seen`` is [rows at row, rows at x_row]."""
    rows, x_rows = tl.arange(0, seen.shape[0]), tl.arange(0, seen.shape[1])
    for c in range(0, WIDTH, 16):  # few columns at a time: these registers would be spilled elsewhere
        columns = c + tl.arange(0, 16)
        x = tl.load(
            x_ptr + (x_row + x_rows).to(tl.int64)[:, None] * x_stride + columns[None, :],
            mask=(x_row + x_rows < x_end)[:, None] & (columns < WIDTH)[None, :],
            other=0.0,
        )
        into = ptr + (row + rows).to(tl.int64)[:, None] * stride + columns[None, :]
        stored = (row + rows < end)[:, None] & (columns < WIDTH)[None, :]
        tl.store(into, float("nan"), mask=sees_broken(seen, x) & stored)
