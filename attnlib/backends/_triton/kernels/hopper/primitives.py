"""What Hopper's kernels are made of beside Gluon: room, barriers, and pieces of loops that ptxas must leave
in order.

A named barrier (``bar.sync``, ``bar.arrive``) is one instruction of a warp. An mbarrier would take a barrier
of the whole warpgroup first, and an elected thread. Numbers below FIRST are Triton's own: partition ``i``
uses 2 + i, but for one of a single warp, which uses none. Flags use 15 and those below it.

Gluon is experimental. Each name that differs between versions of Triton is chosen here, by what is there;
which names a version lacks says ``gluon_names.py``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

FIRST: gl.constexpr = gl.constexpr(6)


def first_of(module, *names):
    """Return what a module has by the first of these names that it has; the newest comes first.

    Raises:
        AttributeError: it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} has none of {', '.join(names)}")


# Triton 3.8 renamed the first two, whose old names raise in 3.9, and 3.9 the third.
async_load = first_of(tma, "async_load", "async_copy_global_to_shared")
async_store = first_of(tma, "async_store", "async_copy_shared_to_global")
reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


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
def _make_flag(number):
    return f".reg .b32 flag{number}; mov.u32 $0, 0;"


@gluon.constexpr_function
def _raise_flag(number, limit):
    tests = [f"setp.le.f32 p, $4, {limit};", *[f"setp.le.and.f32 p, ${n}, {limit}, p;" for n in (5, 6, 7)]]
    asked = (
        f"not.pred p, p; barrier.cta.red.or.pred p, {15 - number}, 128, p; selp.b32 flag{number}, 1, 0, p;"
    )
    zeros = " ".join(f"mov.b32 ${n}, 0;" for n in range(4))
    return f"{{ .reg .pred p; {' '.join(tests)} {asked} {zeros} }}"


@gluon.constexpr_function
def _read_flag(number):
    return f"mov.b32 $0, flag{number};"


@gluon.jit
def make_flag(NUMBER: gl.constexpr):
    """Make the flag of the warpgroup of this number, once: a register, since a tensor's element is no
    scalar.
    """
    gl.inline_asm_elementwise(_make_flag(NUMBER), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def raise_flag_above(sums, LIMIT: gl.constexpr, NUMBER: gl.constexpr):
    """Raise the flag of this warpgroup if any of its ``sums`` ``[rows, 8]`` is above a limit, or NaN; else
    lower it.

    Its warps come to a barrier of their own. ptxas so moves nothing that is in the sums below the wait for
    the product that it should overlap, as it else does with 12 to 66 of 66 exponentials.
    """
    gl.inline_asm_elementwise(
        _raise_flag(NUMBER, LIMIT), "=r,=r,=r,=r,f,f,f,f", [sums], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def is_raised(NUMBER: gl.constexpr):
    """Whether the flag of this warpgroup is raised."""
    return (
        gl.inline_asm_elementwise(_read_flag(NUMBER), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
    )


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
    """``acc * factor[:, None]``, which a warp skips if its factors are all 1; a thread has ``COUNT`` numbers
    of acc.
    """
    return gl.inline_asm_elementwise(
        _scale_unless_one(COUNT), _in_and_out(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def prefetch(ptr):
    """Bring what lies here into the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque(x):
    """The same fp32 numbers; what makes them stays behind its branch."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def anew(number):
    """The same int32, from which ptxas and LLVM must compute anew where it stands, and not ahead of the loop.

    Descriptors of shared memory that are kept through a loop are spilled.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


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
    """:func:`scale_rows` under a product in flight: ptxas waits for it where it multiplies, and not where it
    skips.
    """
    return gl.inline_asm_elementwise(
        _scale_in_place_unless_one(COUNT), _in_place(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def opaque_halves(x):
    """The same 16-bit numbers; what is made of them is not made before, where it would take twice the
    registers.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.constexpr_function
def _pack(name):
    return f"cvt.rn.{name}x2.f32 $0, $2, $1;"


@gluon.constexpr_function
def _unpack(name):
    if name == "f16":
        return "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"


@gluon.jit
def halves_of(x, like):
    """fp32 numbers in 16 bits, of the type of ``like``: two in a register from here on, and not in one
    each.
    """
    NAME: gl.constexpr = "f16" if like.dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(_pack(NAME), "=r,r,r", [x], dtype=like.dtype, is_pure=False, pack=2)


@gluon.jit
def floats_of(x):
    """Numbers of 16 bits in fp32: made here, and not before, where they would take twice the registers."""
    NAME: gl.constexpr = "f16" if x.dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(_unpack(NAME), "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def opaque_words(x):
    """The same words in registers that no product under way reads: ptxas waits for each where those are
    written.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def e4m3_in_fours(x):
    """Numbers ``[rows, n, 2, 2]`` in e4m3, four in a word ``[rows, n]``; at once, or ptxas merges no
    halves.
    """
    even, odd = x.split()
    a, c = even.split()
    b, d = odd.split()
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
        "mov.b32 $0, {l, h}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fours_of(words, LAYOUT: gl.constexpr):
    """The numbers in e4m3 ``[rows, 4 n]`` of which words ``[rows, n]`` hold four each; a thread has all
    four.
    """
    twice = gl.join(words, words)
    x = gl.join(twice, twice).reshape([words.shape[0], words.shape[1] * 4])
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.convert_layout(x, LAYOUT)], dtype=gl.int8, is_pure=True, pack=4
    )
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def add_fours(ptrs, x):
    """Add fp32 numbers to those of global memory, four at a time: each thread's come in fours that lie side
    by side.

    Atomic adds of Triton crash ptxas here, while a product is under way.
    """
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [ptrs.to(gl.int64), x], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def wait_for_turn(ptr, turn):
    """Wait until an int32 of global memory is ``turn``. What whoever wrote it did before is then there."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; "
        "AGAIN: ld.acquire.gpu.global.b32 v, [$1]; setp.ne.s32 p, v, $2; @p bra AGAIN; } mov.b32 $0, 0;",
        "=r,l,r", [ptr.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(ptr, turn):
    """Write an int32 that others wait for, after all that this thread and those that it waited for have
    written.
    """
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [ptr.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
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
