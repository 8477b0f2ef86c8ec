"""Turns: the fixed order in which programs add to a tile of dq, where torch wants its algorithms
deterministic.

A program adds to a tile after one other: that of the next keys of the same head, or of the keys before
(``AFTER``). Where that one does not add to the tile, none beyond it does, since the queries that see a key
only move forward from key to key (``query_range``): then it waits for nobody. An int32 for each tile says who
has added last. One warp waits for turns and another ends them: either takes 1 to 2 microseconds, and a step 2
to 3.

Nobody waits forever. Programs draw their work from a counter as they begin, in such an order that whoever is
waited for drew before: it is running, and the first of a head waits for no program. Within a program, adding
to the tile of a step takes three things: the turn, for which only other programs are waited; having added to
the tiles of the steps before; and what the producer and the other warpgroups do up to this step without
adding to any later tile. So of all additions not made yet, in order of drawing and then of steps, the first
can always be made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..primitives import FIRST, barrier_arrive, barrier_sync, end_turn, wait_for_turn
from .shared import CONSUMERS, DONE, KEYS, first_step, next_step, start_of, tiles_of


@gluon.jit
def meet(WAITS: gl.constexpr, sizes):
    """Come to the barrier of a tile of dq that has been added to: who added goes on, and two warps wait."""
    NUMBER: gl.constexpr = DONE if sizes.DQ_WARPGROUP else FIRST + 4  # free where dq is made
    THREADS: gl.constexpr = (CONSUMERS // 2 if sizes.DQ_WARPGROUP else CONSUMERS) + 64
    if WAITS:
        barrier_sync(NUMBER, THREADS)
    else:
        barrier_arrive(NUMBER, THREADS)


@gluon.jit
def number_of(start, sizes):
    """The number of the program of the keys from ``start`` on, at least 1 of a sequence's own."""
    return start // (sizes.TILES * KEYS) + 1


@gluon.jit
def wait_for_turns(work, band, job, call, shared, sizes):
    """Let a tile of dq be added to once the program that comes before has, and this one to the tile
    before.
    """
    if sizes.AFTER:
        other = work.start + sizes.AFTER * (sizes.TILES * KEYS)
        _, _, first, tiles = tiles_of(other, work, band, sizes)
        step = first_step(job, call, sizes)
        for n in range(job.steps):
            tile = start_of(step, job, sizes) // sizes.BLOCK_M
            added = gl.where((tile >= first) & (tile < first + tiles), number_of(other, sizes), 0)
            if n > 0:
                meet(True, sizes)
            wait_for_turn(call.turns_ptr + step.dq, added)
            mbarrier.arrive(shared.turn.index(0), count=1)
            step = next_step(step, job, call, sizes)
        if job.steps > 0:
            meet(True, sizes)


@gluon.jit
def end_turns(work, job, call, sizes):
    """Say to which tiles of dq this program has added."""
    if sizes.AFTER:
        step = first_step(job, call, sizes)
        for _ in range(job.steps):
            meet(True, sizes)
            end_turn(call.turns_ptr + step.dq, number_of(work.start, sizes))
            step = next_step(step, job, call, sizes)


@gluon.jit
def wait_to_add(n, shared, sizes):
    """Wait until the tile of dq of step ``n`` may be added to; the zeros of step -1 may be at any time."""
    if sizes.AFTER:
        mbarrier.wait(shared.turn.index(0), n & 1, pred=n >= 0)


@gluon.jit
def mark_added(n, sizes):
    """Say that this warpgroup has added to the tile of step ``n``."""
    if sizes.AFTER:
        if n >= 0:
            meet(False, sizes)
