"""Plan the launches of the generic kernels, for calls without a cache."""

from typing import NamedTuple

from ..launching.launch import Launch
from . import mask_tiles, tables
from .shapes import BackwardShapes, DenseShapes


def forward(x: DenseShapes) -> tuple[tuple[Launch, ...], int]:
    """Return the launches of a forward pass, and the size of the buffer ``lists`` in int32 values.

    With a mask function, the first launch lists the tiles to visit in ``lists``; otherwise its size is 0.
    """
    from ..kernels.forward import forward

    tiles = tables.forward(x.case, keys=x.length)
    if x.states is None:
        return (x.launch_by_blocks(forward, tiles),), 0
    found = mask_tiles.lists(x, tiles, by_keys=False)
    return (found.launch, x.launch_by_blocks(forward, tiles, found.arguments)), found.numbers


class Backward(NamedTuple):
    """The launches of a backward, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta, which the next launches read.
        keys: the launch that writes dk and dv; it may also add up dq in a buffer of sums.
        queries: the launch that writes dq, and partial gradients of ALiBi slopes.
        variant: the name of the kernels, which ``explain`` prints.
        shares: the number of partial gradients per slope that ``queries`` writes; None without slopes.
        sums: the size of the buffer of sums in fp32 values, initially zero; 0 if there is none.
        before_keys, before_queries: launches that list the tiles a mask function does not hide, or None.
        lists: the size of such a list in int32 values.
    """

    prepare: Launch
    keys: Launch
    queries: Launch
    variant: str
    shares: int | None = None
    sums: int = 0
    before_keys: Launch | None = None
    before_queries: Launch | None = None
    lists: int = 0

    @property
    def launches(self) -> list[Launch]:
        """All launches, in order."""
        ordered = (self.prepare, self.before_keys, self.keys, self.before_queries, self.queries)
        return [x for x in ordered if x is not None]


def backward(x: BackwardShapes) -> Backward:
    """Return the launches of a backward in two passes: one over blocks of keys, one over queries."""
    from ..kernels.backward import backward_keys, backward_queries

    of_keys, of_queries = (f(x.case, keys=x.length) for f in (tables.backward_keys, tables.backward_queries))
    blocks = x.blocks(x.s, of_queries.block_m)
    more = {"stride_sb": 1 if x.packed else x.h * blocks, "stride_sh": blocks}
    shares = blocks if x.has_slopes else None
    if x.states is None:
        keys = x.launch_by_blocks(backward_keys, of_keys, more, of_keys=True)
        return Backward(
            x.prepare(), keys, x.launch_by_blocks(backward_queries, of_queries, more), "plain", shares
        )
    for_keys = mask_tiles.lists(x, of_keys, by_keys=True)
    for_queries = mask_tiles.lists(x, of_queries, by_keys=False)
    return Backward(
        x.prepare(), x.launch_by_blocks(backward_keys, of_keys, more | for_keys.arguments, of_keys=True),
        x.launch_by_blocks(backward_queries, of_queries, more | for_queries.arguments), "plain", shares, 0,
        for_keys.launch, for_queries.launch, max(for_keys.numbers, for_queries.numbers),
    )  # fmt: skip
