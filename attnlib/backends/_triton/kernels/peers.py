"""Exchange of queries and results between GPUs of one host: ranks write into each other's memory.

A line holds the channels of one token and head. ``addresses`` is a tensor with the address of each rank's
copy of a buffer. ``EARLY``: launched with PDL (programmatic dependent launch), so wait for the preceding
kernel before reading, and let the next one start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .scores import LN2, LOG2E
from .split_kv import join
from .tile import COUNTS

ADDRESSES = (*COUNTS, "lines", "rank", "lse_at", "all_heads")


@triton.jit
def place_of(addresses_ptr, rank, dtype: tl.constexpr, offset):
    """Return a pointer into the buffer of a rank; the address is a multiple of 16 bytes."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=ADDRESSES)
def send_queries(
    q_ptr, addresses_ptr, lines, rank,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write this rank's queries into the buffers of all ranks, ``[lines, RANKS, WIDTH]``.

    A line holds the queries of one KV head and token.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    to, rest = tl.program_id(0) % RANKS, tl.program_id(0) // RANKS
    line, c = (rest // TILES).to(tl.int64), rest % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(q_ptr + line * WIDTH + c, mask=c < WIDTH)
    place = place_of(addresses_ptr, to, q_ptr.dtype.element_ty, 0)
    tl.store(place + (line * RANKS + rank) * WIDTH + c, x, mask=c < WIDTH)


@triton.jit(do_not_specialize=ADDRESSES)
def send_results(
    out_ptr, lse_ptr, addresses_ptr, lse_at, lines, rank, heads, all_heads, group, s,
    RANKS: tl.constexpr, OWN: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr, BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write this rank's outputs into the buffers of all ranks, ``[RANKS, lines, E]``, with their LSEs.

    The LSEs begin at byte ``lse_at`` of a buffer. ``OWN``: each rank has ``heads`` of the ``all_heads`` query
    heads, and receives only the results of these. Otherwise, all ranks have the same heads and receive all
    results. The ``group`` query heads of a KV head are adjacent.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    to, rest = tl.program_id(0) % RANKS, tl.program_id(0) // RANKS
    line, c = (rest * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, E_MAIN)
    token, head, valid = line // heads, line % heads, line < lines
    if OWN:
        head = (head // group * RANKS + to) * group + head % group
    there = valid[:, None] & (c < E)[None, :]
    x = tl.load(out_ptr + (token * all_heads + head)[:, None] * E + c[None, :], mask=there)
    lse = tl.load(lse_ptr + (token // s * all_heads + head) * s + token % s, mask=valid)
    line += rank.to(tl.int64) * lines
    place = place_of(addresses_ptr, to, out_ptr.dtype.element_ty, 0)
    tl.store(place + line[:, None] * E + c[None, :], x, mask=there)
    tl.store(place_of(addresses_ptr, to, tl.float32, lse_at) + line, lse, mask=valid)


@triton.jit(do_not_specialize=ADDRESSES)
def join_results(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, lines, heads, s,
    RANKS: tl.constexpr, E: tl.constexpr, E_MAIN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the results received from all ranks, ``[RANKS, lines, E]``, in the order of ranks."""
    line, c = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64), tl.arange(0, E_MAIN)
    token, head, valid = line // heads, line % heads, line < lines
    there = valid[:, None] & (c < E)[None, :]
    l_i, m_i = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, E_MAIN], tl.float32)
    for r in tl.static_range(RANKS):
        at = line + r * lines
        x = tl.load(part_ptr + at[:, None] * E + c[None, :], mask=there, other=0.0).to(tl.float32)
        lse = tl.load(part_lse_ptr + at, mask=valid, other=float("-inf"))
        acc, l_i, m_i = join(acc, l_i, m_i, x, lse * LOG2E)
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(
        out_ptr + line[:, None] * E + c[None, :],
        (acc / l_i[:, None]).to(out_ptr.dtype.element_ty),
        mask=there,
    )
    tl.store(lse_ptr + (token // s * heads + head) * s + token % s, (m_i + tl.log2(l_i)) * LN2, mask=valid)
