"""Turns: programs add to each tile of dq in a fixed order if torch's deterministic algorithms are on.

A program adds to a tile after one other program of the same head, its predecessor. That is the program of the
next keys or of the previous keys (``AFTER``). If the predecessor does not add to the tile, the program does
not wait: no program beyond the predecessor adds to it either, because the range of queries that see a key
only moves forward from key to key (``query_range``). An int32 per tile names the program that added last. One
warp waits for turns and another ends them. Either takes 1 to 2 microseconds, and a step takes 2 to 3.

No program waits forever. When programs start, they draw their work from a counter, and a predecessor always
draws first. So the predecessor is already running, and the first program of a head waits for no other. Within
a program, adding to the tile of a step depends on:

- the program's turn, which depends only on other programs;
- the program's additions to the tiles of earlier steps;
- the work of the producer and the other warpgroups up to this step, which needs no addition to a later tile.

Hence the first outstanding addition, in order of draws and then of steps, can always be made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..primitives import FIRST, barrier_arrive, barrier_sync, end_turn, wait_for_turn
from .shared import CONSUMERS, DONE, KEYS, first_step, next_step, start_of, tiles_of


@gluon.jit
def meet(WAITS: gl.constexpr, sizes):
    """Arrive or wait at the named barrier that follows an addition to a tile of dq.

    The warpgroups that add to dq arrive and do not wait. The two warps that handle turns wait (``WAITS``).
    """
    NUMBER: gl.constexpr = DONE if sizes.DQ_WARPGROUP else FIRST + 4  # a number unused by the consumers
    THREADS: gl.constexpr = (CONSUMERS // 2 if sizes.DQ_WARPGROUP else CONSUMERS) + 64
    if WAITS:
        barrier_sync(NUMBER, THREADS)
    else:
        barrier_arrive(NUMBER, THREADS)


@gluon.jit
def number_of(start, sizes):
    """Return the number of the program whose keys begin at ``start``: 1 for the first keys of a sequence."""
    return start // (sizes.TILES * KEYS) + 1


@gluon.jit
def wait_for_turns(work, band, job, call, shared, sizes):
    """Wait for this program's turn at each tile of dq, and signal the turn to the warpgroups that add.

    It is a program's turn to add to a tile when its predecessor has added to the tile, and the program itself
    has added to its own previous tile.
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
    """Tell other programs, tile by tile, that this program has added to dq."""
    if sizes.AFTER:
        step = first_step(job, call, sizes)
        for _ in range(job.steps):
            meet(True, sizes)
            end_turn(call.turns_ptr + step.dq, number_of(work.start, sizes))
            step = next_step(step, job, call, sizes)


@gluon.jit
def wait_to_add(n, shared, sizes):
    """Wait until step ``n`` of this program may add to its tile of dq.

    Step -1, the one before the first, adds only zeros, so it never waits.
    """
    if sizes.AFTER:
        mbarrier.wait(shared.turn.index(0), n & 1, pred=n >= 0)


@gluon.jit
def mark_added(n, sizes):
    """Signal that this warpgroup has added its part to the dq tile of step ``n``."""
    if sizes.AFTER:
        if n >= 0:
            meet(False, sizes)
