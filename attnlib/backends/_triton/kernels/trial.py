"""Two tiny kernels that show whether a launch hands on what it should."""

import triton
import triton.language as tl


@triton.jit
def add_numbers(x_ptr, absent_ptr, out_ptr, read_tensors, size, BLOCK_N: tl.constexpr):
    """Write ``x`` plus ``read[0]``, one block of numbers a program."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < size
    if absent_ptr is not None:
        at += 1
    x = tl.load(x_ptr + at, inside) + tl.load(read_tensors[0] + at, inside)
    tl.store(out_ptr + at, x, inside)


@triton.jit
def add_tile(x_ptr, out_ptr, x_desc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write ``x`` plus the same rows as a descriptor loads them, one tile a program."""
    first = tl.program_id(0) * BLOCK_M
    rows, columns = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    at = rows[:, None] * BLOCK_N + columns[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at) + x_desc.load([first, 0]))
