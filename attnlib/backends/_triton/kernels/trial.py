"""Two tiny kernels that test whether direct launches pass arguments and descriptors correctly."""

import triton
import triton.language as tl


@triton.jit
def add_numbers(x_ptr, absent_ptr, out_ptr, read_tensors, size, BLOCK_N: tl.constexpr):
    """Write ``x + read_tensors[0]``; each program adds one block of numbers.

    The host passes None for ``absent_ptr``. If anything else arrives, the kernel starts at element 1 and
    the test fails.
    """
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < size
    if absent_ptr is not None:
        at += 1
    x = tl.load(x_ptr + at, inside) + tl.load(read_tensors[0] + at, inside)
    tl.store(out_ptr + at, x, inside)


@triton.jit
def add_tile(x_ptr, out_ptr, x_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load ``x`` twice, by pointer and by TMA descriptor, and write the sum; each program adds one tile."""
    first = tl.program_id(0) * BLOCK_M
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at = rows[:, None] * BLOCK_N + columns[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at) + x_desc.load([first, 0]))
