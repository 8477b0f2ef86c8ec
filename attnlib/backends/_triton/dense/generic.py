"""From the shapes of a call without a cache to the launches of the plain kernels."""

from typing import NamedTuple

from ..launching.launch import Launch
from . import mask_tiles, tables
from .shapes import BackwardShapes, DenseShapes


def forward(x: DenseShapes) -> tuple[tuple[Launch, ...], int]:
    """The launches of a forward, which makes out and lse, and how many numbers of ``lists`` the first one
    makes.
    """
    from ..kernels.forward import forward

    tiles = tables.forward(x.case, keys=x.length)
    if x.states is None:
        return (x.launch(forward, tiles, x.arguments),), 0
    found = mask_tiles.lists(x, tiles, by_keys=False)
    return (found.launch, x.launch(forward, tiles, x.arguments | found.arguments)), found.numbers


class Backward(NamedTuple):
    """The launches of a backward.

    ``prepare`` makes lse2 and delta, ``keys`` dk and dv, and ``queries`` dq and, of each head, so many
    ``shares`` of the slopes' gradient; None without slopes. Of so many ``sums`` in fp32, zeros to begin with,
    ``keys`` may make what ``queries`` makes dq of. Where a function hides tiles, so many numbers of ``lists``
    are made before either.
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
        """All of them, in order."""
        ordered = (self.prepare, self.before_keys, self.keys, self.before_queries, self.queries)
        return [x for x in ordered if x is not None]


def backward(x: BackwardShapes) -> Backward:
    """The launches of two passes, one that owns keys and one that owns queries."""
    from ..kernels.backward import backward_keys, backward_queries

    of_keys, of_queries = (f(x.case, keys=x.length) for f in (tables.backward_keys, tables.backward_queries))
    blocks = x.blocks(x.s, of_queries.block_m)
    arguments = x.arguments | {"stride_sb": 1 if x.packed else x.h * blocks, "stride_sh": blocks}
    shares = blocks if x.has_slopes else None
    if x.states is None:
        keys = x.launch(backward_keys, of_keys, arguments, of_keys=True)
        return Backward(x.prepare(), keys, x.launch(backward_queries, of_queries, arguments), "plain", shares)
    for_keys = mask_tiles.lists(x, of_keys, by_keys=True)
    for_queries = mask_tiles.lists(x, of_queries, by_keys=False)
    return Backward(
        x.prepare(), x.launch(backward_keys, of_keys, arguments | for_keys.arguments, of_keys=True),
        x.launch(backward_queries, of_queries, arguments | for_queries.arguments), "plain", shares, 0,
        for_keys.launch, for_queries.launch, max(for_keys.numbers, for_queries.numbers),
    )  # fmt: skip
