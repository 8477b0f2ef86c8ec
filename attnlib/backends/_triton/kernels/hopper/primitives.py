"""What Hopper's kernels are made of beside Gluon: room, barriers, and pieces of loops that ptxas must leave in order.

A named barrier (``bar.sync``, ``bar.arrive``) is one instruction of a warp. An mbarrier would take a barrier of the
whole warpgroup first, and an elected thread. Numbers below FIRST are Triton's own: partition ``i`` uses 2 + i.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

FIRST: gl.constexpr = gl.constexpr(6)


@gluon.constexpr_function
def _one_operand(instruction, threads):
    return f"{instruction} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(number, THREADS: gl.constexpr):
    """Wait until ``THREADS`` threads, these among them, have come to the barrier of this number."""
    gl.inline_asm_elementwise(
        _one_operand("bar.sync", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Come to the barrier of this number, and go on."""
    gl.inline_asm_elementwise(
        _one_operand("bar.arrive", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _arrive_after(threads):
    moves = " ".join(f"mov.b32 ${n}, ${4 + n};" for n in range(4))
    signs = "or.b32 t, $4, $5; or.b32 t, t, $6; or.b32 t, t, $7; shr.u32 t, t, 31; add.s32 t, t, $8;"
    return f"{{ .reg .b32 t; {signs} bar.arrive t, {threads}; {moves} }}"


@gluon.jit
def arrive_after(sums, number, THREADS: gl.constexpr):
    """Come to the barrier of this number once ``sums`` ``[rows, 8]``, which are not negative, are there; the sums.

    The number has their sign bits added, which are 0; ptxas cannot know, and so may not move what they are sums of
    below. It else computes 12 to 66 of 66 exponentials behind the wait for the product that they should overlap.
    """
    numbers = gl.full([sums.shape[0], sums.shape[1]], 0, gl.int32, sums.type.layout) + number
    return gl.inline_asm_elementwise(
        _arrive_after(THREADS), "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [sums, numbers],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def _scale_unless_one(count):
    moves = [f"mov.b32 ${n}, ${count + n};" for n in range(count)]
    products = [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    # A thread holds two rows of a product, which take turns every two registers.
    differs = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    asked = "vote.sync.any.pred q, p, 0xffffffff;"
    body = " ".join([differs, asked, *moves, "@!q bra DONE;", *products])
    return f"{{ .reg .pred p, q; {body} DONE: }}"


@gluon.constexpr_function
def _in_and_out(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def scale_rows(acc, factor, COUNT: gl.constexpr):
    """``acc * factor[:, None]``, which a warp skips if its factors are all 1; a thread has ``COUNT`` numbers of acc."""
    return gl.inline_asm_elementwise(
        _scale_unless_one(COUNT), _in_and_out(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def opaque(x):
    """The same fp32 numbers; what makes them stays behind its branch."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def anew(number):
    """The same int32, from which ptxas and LLVM must compute anew where it stands, and not ahead of the loop.

    Descriptors of shared memory that are kept through a loop are spilled.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _scale_in_place_unless_one(count):
    products = [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    differs = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    body = " ".join([differs, "vote.sync.any.pred q, p, 0xffffffff; @!q bra DONE;", *products])
    return f"{{ .reg .pred p, q; {body} DONE: }}"


@gluon.constexpr_function
def _in_place(count):
    return ",".join(["=f"] * count + [str(n) for n in range(count)] + ["f"] * count)


@gluon.jit
def scale_rows_in_place(acc, factor, COUNT: gl.constexpr):
    """:func:`scale_rows` under a product in flight: ptxas waits for it where it multiplies, and not where it skips."""
    return gl.inline_asm_elementwise(
        _scale_in_place_unless_one(COUNT), _in_place(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def opaque_halves(x):
    """The same 16-bit numbers; what is made of them is not made before, where it would take twice the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def add_fours(ptrs, x):
    """Add fp32 numbers to those of global memory, four at a time: each thread's come in fours that lie side by side.

    Atomic adds of Triton crash ptxas here, while a product is under way.
    """
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [ptrs.to(gl.int64), x], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def ring(tile_type: gl.constexpr, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Room for ``SLOTS`` tiles, as matrix products read them."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], tile_type)
    return gl.allocate_shared_memory(tile_type, [SLOTS, HEIGHT, WIDTH], LAYOUT)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """As many barriers, each for so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), ARRIVALS)
    return made
