"""Kernels of one program that evaluate device functions on a tile, and what compiles them."""

import torch
import triton
import triton.language as tl
from program_cases import MASKS, SCORES, program_of

from attnlib.backends._triton.functions.programs import (
    derivative_of,
    function_of,
    gradients_of,
    learned,
    tables,
)
from attnlib.backends._triton.functions.ranges import Bounds
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.tracing.trace import QUERY_OFFSET


@triton.jit
def places(h, i0, j0, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr):
    """The indices of a tile from ``i0`` and ``j0`` on, ``[M, N]`` or turned, and where its elements lie.

    The heads of a group take turns along its rows.
    """
    m, n = tl.arange(0, M), tl.arange(0, N)
    if TURNED:
        m, n = m[None, :], n[:, None]
    else:
        m, n = m[:, None], n[None, :]
    if GROUP > 1:
        h += m % GROUP
    return h, i0 + m, j0 + n, m * N + n


@triton.jit(do_not_specialize=["b", "h", "i0", "j0", "first"])
def of_mask(
    seen_ptr, t, b, h, i0, j0, first,
    MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes which pairs are seen, int8 ``[M, N]``."""
    h, i, j, at = places(h, i0, j0, M, N, TURNED, GROUP)
    seen = MASK(b, h, i, j, first, t) & (at >= 0)
    tl.store(seen_ptr + at, seen.to(tl.int8))


@triton.jit(do_not_specialize=["b", "h", "i0", "j0", "first"])
def of_score(
    changed_ptr, by_score_ptr, score_ptr, d_ptr, seen_ptr, t, grads, b, h, i0, j0, first,
    SCORE: tl.constexpr, DERIVATIVE: tl.constexpr, GRADIENTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Writes what becomes of scores, and their derivatives, ``[M, N]``, and adds to the gradients of what is
    read.
    """
    h, i, j, at = places(h, i0, j0, M, N, TURNED, GROUP)
    score, d, seen = tl.load(score_ptr + at), tl.load(d_ptr + at), tl.load(seen_ptr + at)
    tl.store(changed_ptr + at, SCORE(score, b, h, i, j, first, t))
    tl.store(by_score_ptr + at, DERIVATIVE(score, d, b, h, i, j, first, t))
    if GRADIENTS is not None:
        GRADIENTS(score, d, seen, b, h, i, j, first, t, grads)


def compiled(arch: int = 90) -> None:
    """Compile every case for a chip that need not be here; replaces Triton's driver in this process."""
    from compiled.chipless import _absent
    from triton.runtime.driver import driver

    driver.set_active(_absent(arch))
    seen, tile = torch.zeros(16, 32, dtype=torch.int8), torch.zeros(16, 32)
    for name, case in MASKS.items():
        arguments = case.arguments()
        t, mask = (
            tables(x for x in arguments if x is not QUERY_OFFSET),
            function_of(program_of("mask", case, arguments), Bounds()),
        )
        of_mask[(1,)](seen, t, 1, 2, -3, -6, 4, mask, 16, 32, False, 1)
        assert count(of_mask) <= len(MASKS), f"{name} was compiled twice"
    for case in SCORES.values():
        arguments = case.arguments()
        tensors, program = (
            [x for x in arguments if x is not QUERY_OFFSET],
            program_of("score", case, arguments),
        )
        grads = tables(x.float() if n in learned(program) else None for n, x in enumerate(tensors))
        functions = (
            function_of(program, Bounds()),
            derivative_of(program, Bounds()),
            gradients_of(program, Bounds()),
        )
        of_score[(1,)](
            tile,
            tile,
            tile,
            tile,
            seen.bool(),
            tables(tensors),
            grads,
            1,
            2,
            -3,
            -6,
            4,
            *functions,
            16,
            32,
            True,
            1,
        )
    assert (count(of_mask), count(of_score)) == (len(MASKS), len(SCORES))
    for length in (32, 64, 32 * 7, 33, 39):
        documents = torch.zeros(2, length, dtype=torch.int64)
        plan_cache.cache_clear()  # what is made anew needs no compilation
        mask = function_of(program_of("mask", MASKS["documents"], [documents]), Bounds())
        of_mask[(1,)](seen, tables([documents]), 1, 2, -3, -6, 4, mask, 16, 32, False, 1)
    # One was for 11 indices, and those below are like it; another is for multiples of 16.
    assert count(of_mask) == len(MASKS) + 1


def count(kernel: object) -> int:
    """How often a kernel was compiled."""
    return sum(len(known) for known, *_ in kernel.device_caches.values())
