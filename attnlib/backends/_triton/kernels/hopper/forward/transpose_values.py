"""A kernel that transposes fp8 values before the Hopper forward, since 8-bit wgmma reads values by channel.

Otherwise every program of the forward would transpose each block that it reads. This would take registers
of a warpgroup, and shared memory that matrix products need. Kernel time only, d = 256, causal, 8k:

    transposed inside the forward      812 TFLOP/s
    transposed before the forward    1,039 TFLOP/s
"""

import triton
import triton.language as tl

from ...band import bounds
from ...tile import COUNTS, locate

AT_ONCE: tl.constexpr = tl.constexpr(128)  # channels per iteration


@triton.jit
def block_of(row, sequence, BLOCK_N: tl.constexpr):
    """Return the index of the first block of transposed keys for a packed sequence that begins at ``row``.

    Every sequence begins with a new block.
    """
    return row // BLOCK_N + sequence


@triton.jit
def load_words(rows, key, start, end, word, stride, WORDS: tl.constexpr):
    """Load value channels of the given keys as int32 words, each of four e4m3 numbers.

    Keys outside ``[start, end)`` are never visible and may hold arbitrary data, so they become zeros.
    """
    seen = (key >= start) & (key < end)
    return tl.load(
        rows + key.to(tl.int64)[:, None] * stride + word, mask=seen[:, None] & (word < WORDS), other=0
    )


@triton.jit(do_not_specialize=COUNTS)
def transpose_values(
    v_ptr, transposed_ptr, key_starts_ptr, key_ends_ptr, cu_seqlens_k_ptr, stride_vb, stride_vt, stride_vg,
    batch, kv_heads, t, E: tl.constexpr, E_MAIN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Transpose values ``[b, t, g, e]``, or packed ``[t, g, e]``, to ``[b, e, g, padded]``.

    One program transposes one block of keys. A thread of the forward holds the probabilities of four keys out
    of every 16, so the values of these four keys are stored side by side:

        2c, 2c + 1, 2c + 8, 2c + 9
    """
    WIDTH: tl.constexpr = min(AT_ONCE, E_MAIN) // 4
    cu_ptr, pid = cu_seqlens_k_ptr, tl.program_id(0)
    padded = (tl.cdiv(t, BLOCK_N) if cu_ptr is None else block_of(t, batch, BLOCK_N) + 1) * BLOCK_N
    work = locate(pid, cu_ptr, cu_ptr, batch, kv_heads, t, t, batch * kv_heads, BLOCK_N, False)
    start, end = bounds(key_starts_ptr, key_ends_ptr, work.sequence, work.rows)
    fours, stride = tl.arange(0, BLOCK_N // 4), stride_vt // 4
    key = work.start + fours // 4 * 16 + fours % 4 * 2
    first = (work.plane * stride_vb + work.row * stride_vt + work.head * stride_vg) // 4
    rows = v_ptr.to(tl.pointer_type(tl.int32)) + first
    to = work.start
    if cu_ptr is not None:
        to += (block_of(work.row, work.sequence, BLOCK_N) * BLOCK_N).to(tl.int32)
    # A program past the last key has no block to write.
    inside = (fours < tl.where((to < padded) & (work.start < work.rows), BLOCK_N // 4, 0))[:, None]
    transposed = transposed_ptr.to(tl.pointer_type(tl.int32)) + to // 4 + fours[:, None]
    for first_word in tl.static_range(0, E_MAIN // 4, WIDTH):
        word = first_word + tl.arange(0, WIDTH)[None, :]
        a = load_words(rows, key, start, end, word, stride, (E + 3) // 4)
        b = load_words(rows, key + 1, start, end, word, stride, (E + 3) // 4)
        c = load_words(rows, key + 8, start, end, word, stride, (E + 3) // 4)
        d = load_words(rows, key + 9, start, end, word, stride, (E + 3) // 4)
        for n in tl.static_range(4):
            x = (
                (a >> 8 * n & 255)
                | ((b >> 8 * n & 255) << 8)
                | ((c >> 8 * n & 255) << 16)
                | (d >> 8 * n << 24)
            )
            channel = 4 * word + n
            line = (work.plane * E + channel) * kv_heads + work.head
            tl.store(transposed + line * (padded // 4), x, mask=inside & (channel < E))
