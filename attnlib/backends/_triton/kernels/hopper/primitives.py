"""Building blocks that Gluon lacks: rings in shared memory, barriers, and inline assembly.

Much of the assembly only fixes the order of instructions. A named barrier (``bar.sync``, ``bar.arrive``)
costs one instruction per warp. An mbarrier would also need a barrier of the whole warpgroup, and one elected
thread to arrive. Named barriers have numbers: those below ``FIRST`` belong to Triton, where partition ``i``
of a warp-specialized kernel uses 2 + i, unless it is a single warp. Flags (:func:`make_flag`) use
number 15 and the numbers below it.

Gluon is experimental. This module picks the names that differ between Triton versions; ``gluon_names.py``
reports the names that the installed version lacks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

FIRST: gl.constexpr = gl.constexpr(6)


def first_of(module, *names):
    """Return the first attribute in ``names`` that ``module`` has; callers list the newest name first.

    Raises:
        AttributeError: the module has none of the names.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} has none of {', '.join(names)}")


# Triton 3.8 renamed the three async copies (their old names raise in 3.9); Triton 3.9 renamed _reinterpret.
copy_by_pointers = first_of(async_copy, "async_load", "async_copy_global_to_shared")
async_load = first_of(tma, "async_load", "async_copy_global_to_shared")
async_store = first_of(tma, "async_store", "async_copy_shared_to_global")
reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@gluon.constexpr_function
def _one_operand(instruction, threads):
    return f"{instruction} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(number, THREADS: gl.constexpr):
    """Wait at named barrier ``number`` until ``THREADS`` threads have arrived, the callers included."""
    gl.inline_asm_elementwise(
        _one_operand("bar.sync", THREADS), "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Arrive at named barrier ``number`` without waiting for the other threads."""
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
    """Declare a flag that warpgroup ``NUMBER`` can raise and test; call this once per kernel.

    The flag is a PTX register, which a branch can test. A branch cannot test an element of a tensor, since
    that is not a scalar.
    """
    gl.inline_asm_elementwise(_make_flag(NUMBER), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def raise_flag_above(sums, LIMIT: gl.constexpr, NUMBER: gl.constexpr):
    """Raise the warpgroup's flag if any of its ``sums`` exceeds ``LIMIT`` or is NaN; otherwise lower it.

    ``sums`` is ``[rows, 8]``. The warps of the warpgroup meet at a named barrier. The barrier also keeps the
    exponentials in the sums before the wait for a matrix product, which they should overlap. Without the
    barrier, ptxas moves 12 to 66 of the 66 exponentials behind that wait.
    """
    gl.inline_asm_elementwise(
        _raise_flag(NUMBER, LIMIT), "=r,=r,=r,=r,f,f,f,f", [sums], dtype=gl.int32, is_pure=False, pack=4
    )


@gluon.jit
def is_raised(NUMBER: gl.constexpr):
    """True if the flag of warpgroup ``NUMBER`` is raised."""
    return (
        gl.inline_asm_elementwise(_read_flag(NUMBER), "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1) != 0
    )


@gluon.constexpr_function
def _scale_unless_one(count):
    moves = [f"mov.b32 ${n}, ${count + n};" for n in range(count)]
    products = [f"mul.f32 ${n}, ${n}, ${2 * count + n};" for n in range(count)]
    # A thread holds two rows of a wgmma accumulator, in alternating pairs of registers.
    differs = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    asked = "vote.sync.any.pred q, p, 0xffffffff;"
    body = " ".join([differs, asked, *moves, "@!q bra DONE;", *products])
    return f"{{ .reg .pred p, q; {body} DONE: }}"


@gluon.constexpr_function
def _in_and_out(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def scale_rows(acc, factor, COUNT: gl.constexpr):
    """Return ``acc * factor[:, None]``; a warp skips the multiplication if all of its factors are 1.

    ``COUNT`` is the number of elements of ``acc`` per thread.
    """
    return gl.inline_asm_elementwise(
        _scale_unless_one(COUNT), _in_and_out(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def prefetch(ptr):
    """Prefetch the data at ``ptr`` into the L2 cache."""
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
    """Return a copy of the fp32 tensor ``x``, made by a move whose effect the compiler does not know.

    The compiler then cannot move the computation of ``x`` out of its branch.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def anew(number):
    """Return a copy of an int32, made by a move whose effect the compiler does not know.

    The compiler then computes values that depend on the copy only after this move. Otherwise LLVM and ptxas
    compute them before the loop, and spill shared-memory descriptors that stay live throughout the loop.
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
    """Return ``acc * factor[:, None]`` as :func:`scale_rows` does, but in the registers of ``acc``.

    A warp then waits for a matrix product in flight only if the warp has to multiply.
    """
    return gl.inline_asm_elementwise(
        _scale_in_place_unless_one(COUNT), _in_place(COUNT), [acc, factor[:, None]],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def opaque_halves(x):
    """Return a copy of the 16-bit tensor ``x``, made by a move whose effect the compiler does not know.

    The compiler then cannot compute fp32 values from ``x`` earlier. They would take twice the registers.
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
    """Convert fp32 to the 16-bit dtype of ``like`` at this point, and pack two numbers to a register."""
    NAME: gl.constexpr = "f16" if like.dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(_pack(NAME), "=r,r,r", [x], dtype=like.dtype, is_pure=False, pack=2)


@gluon.jit
def floats_of(x):
    """Convert 16-bit numbers to fp32 at this point.

    The compiler cannot convert them earlier, when fp32 numbers would take twice the registers.
    """
    NAME: gl.constexpr = "f16" if x.dtype == gl.float16 else "bf16"
    return gl.inline_asm_elementwise(_unpack(NAME), "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def opaque_words(x):
    """Copy int32 words to registers that no matrix product in flight reads.

    Before code writes a register that such a product reads, ptxas inserts a wait for the product.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def e4m3_in_fours(x):
    """Convert fp32 ``[rows, n, 2, 2]`` to e4m3, and pack four numbers to an int32 word ``[rows, n]``.

    One block of assembly converts all four, because ptxas does not merge two halves of a word.
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
    """Unpack int32 words ``[rows, n]`` into e4m3 numbers ``[rows, 4 n]``, four from each word.

    All four numbers of a word stay in one thread.
    """
    twice = gl.join(words, words)
    x = gl.join(twice, twice).reshape([words.shape[0], words.shape[1] * 4])
    x = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.convert_layout(x, LAYOUT)], dtype=gl.int8, is_pure=True, pack=4
    )
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def add_fours(ptrs, x):
    """Add fp32 numbers to global memory, four per instruction.

    Each thread must hold its numbers in contiguous groups of four. Triton's own atomic adds are no
    alternative: they crash ptxas if a matrix product is in flight.
    """
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [ptrs.to(gl.int64), x], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def wait_for_turn(ptr, turn):
    """Spin until the int32 at ``ptr`` equals ``turn``.

    The load has acquire semantics: afterwards, everything that the writer wrote before is visible.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; "
        "AGAIN: ld.acquire.gpu.global.b32 v, [$1]; setp.ne.s32 p, v, $2; @p bra AGAIN; } mov.b32 $0, 0;",
        "=r,l,r", [ptr.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(ptr, turn):
    """Write ``turn`` to the int32 at ``ptr``, which other programs wait for.

    A fence orders this write after all writes of this thread, and of the threads it has waited for.
    """
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r", [ptr.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ring(tile_type: gl.constexpr, SLOTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate shared memory for a ring of ``SLOTS`` tiles, in the layout that wgmma reads."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], tile_type)
    return gl.allocate_shared_memory(tile_type, [SLOTS, HEIGHT, WIDTH], LAYOUT)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Allocate ``COUNT`` mbarriers, each of which expects ``ARRIVALS`` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(made.index(n), ARRIVALS)
    return made
