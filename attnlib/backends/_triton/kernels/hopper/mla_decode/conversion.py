"""The producer warps of ``rows_64.py`` for an int8 or fp8 cache: they convert latents to 16 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..primitives import async_load, barrier_sync, reinterpret
from ..splits import TOKENS, entry_of
from .shared import HALF, TAIL, first_entry, row_of, tiles_of
from .states import next_loaded

WORDS: gl.constexpr = gl.constexpr(32)  # words of four bytes in a quarter of the channels
# Each thread converts 16 bytes to 32, so four threads write a line of 128 bytes. Eight threads write two
# lines, which swizzling puts into different banks of shared memory.
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
IN_WORDS: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.constexpr_function
def _scaled(stored, dtype):
    of_int8 = """mov.b32 middle, 0x64806480; xor.b32 word, $2, 0x80808080;
        prmt.b32 first, word, 0x64646464, 0x4140; prmt.b32 last, word, 0x64646464, 0x4342;
        sub.f16x2 first, first, middle; sub.f16x2 last, last, middle;"""
    of_e4m3 = "mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 first, a; cvt.rn.f16x2.e4m3x2 last, b;"
    to, numbers = "bf16" if dtype == gl.bfloat16 else "f16", zip("abcd", "wxyz", strict=True)
    products = " ".join(f"cvt.f32.f16 {x}, {half}; mul.f32 {x}, {x}, $3;" for half, x in numbers)
    return f"""{{ .reg .b16 a, b, c, d; .reg .b32 word, middle, first, last; .reg .f32 w, x, y, z;
        {of_int8 if stored == gl.int8 else of_e4m3} mov.b32 {{a, b}}, first; mov.b32 {{c, d}}, last;
        {products} cvt.rn.{to}x2.f32 $0, x, w; cvt.rn.{to}x2.f32 $1, z, y; }}"""


@gluon.jit
def rows_from(row, call):
    """Return the cache rows of a tile that begins at ``row``, clamped to the rows that exist.

    The last tile of a contiguous cache may reach beyond the end of the cache.
    """
    return gl.minimum(row + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), call.pages * call.page_rows - 1)


@gluon.jit
def load_bytes(k_ptr, rows, QUARTER: gl.constexpr):
    """Load a quarter of a tile's int8 or fp8 channels as 32-bit words.

    If this function loaded single bytes, Triton would use one register for each byte.
    """
    c = QUARTER * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    words = k_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.load(words + (rows.to(gl.int64)[:, None] * (4 * WORDS) + c[None, :]))


@gluon.jit
def store_scaled(words, scale, half, QUARTER: gl.constexpr, STORED: gl.constexpr):
    """Convert int8 or fp8 channels to 16 bits, scale them, and write them to a quarter of a tile.

    ``half`` is one half of the tile in shared memory. ``QUARTER``, 0 or 1, selects a quarter in this half.
    """
    first, last = gl.inline_asm_elementwise(
        _scaled(STORED, half.dtype), "=&r,=&r,r,f", [words, scale[:, None]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    words = reinterpret(half, gl.int32, [TOKENS, HALF // 2], IN_WORDS)
    words.slice(QUARTER * 2 * WORDS, 2 * WORDS, 1).store(gl.join(first, last).reshape([TOKENS, 2 * WORDS]))


@gluon.jit
def mark_full(full):
    """Signal to the consumers that half of a tile has been written to shared memory."""
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def convert(
    k_ptr, k_scale_ptr, tail_desc, split, states, call, shared, PAGE: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Run the producer warps: convert each half of a tile as soon as its slot becomes free.

    While one half of a tile is converted, the next half is being loaded.
    """
    STORED: gl.constexpr = k_ptr.dtype.element_ty
    tile, tiles = tiles_of(split, states)
    tiles = gl.cdiv(tiles, 2) * 2  # make the number even; the last tile may be loaded twice
    entry = first_entry(tile, split, call, PAGE)
    row = row_of(entry, tile * TOKENS, split, call, PAGE)
    rows = rows_from(row, call)
    a, b, scale = load_bytes(k_ptr, rows, 0), load_bytes(k_ptr, rows, 1), gl.load(k_scale_ptr + rows)
    for t in range(tiles):
        slot, tile = t % 2, next_loaded(tile, states)
        n = tile * TOKENS
        entry = entry_of(n, split, call, PAGE)
        if t >= 2:
            barrier_sync(LEFT + slot, THREADS)
        left, right, full = shared.left.index(slot), shared.right.index(slot), shared.right_full.index(slot)
        store_scaled(a, scale, left, 0, STORED)
        a = load_bytes(k_ptr, rows, 2)
        store_scaled(b, scale, left, 1, STORED)
        b = load_bytes(k_ptr, rows, 3)
        mark_full(shared.left_full.index(slot))
        if t >= 2:
            barrier_sync(RIGHT + slot, THREADS)
        mbarrier.expect(full, TOKENS * TAIL * 2)
        async_load(tail_desc, [row, 0], full, shared.tail.index(slot))
        row = row_of(entry, n, split, call, PAGE)
        rows = rows_from(row, call)
        store_scaled(a, scale, right, 0, STORED)
        a = load_bytes(k_ptr, rows, 0)
        store_scaled(b, scale, right, 1, STORED)
        b, scale = load_bytes(k_ptr, rows, 1), gl.load(k_scale_ptr + rows)
        mark_full(full)
    if tiles > 0:  # an incomplete barrier would hang the next program
        for slot in gl.static_range(2):
            barrier_sync(LEFT + slot, THREADS)
            barrier_sync(RIGHT + slot, THREADS)
