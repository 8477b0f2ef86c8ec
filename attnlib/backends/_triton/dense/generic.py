"""Plan the launches of the generic kernels, for calls without a cache."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from . import mask_tiles, selected, selected_backward, selected_entries, selected_tables, tables
from .selected_backward import SelectedBackward
from .selected_entries import EntriesBackward
from .shapes import BackwardShapes, DenseShapes


def forward(x: DenseShapes) -> tuple[tuple[Launch, ...], int]:
    """Return the launches of a forward pass, and the size of the buffer ``lists`` in int32 values.

    With a mask function, the first launch lists the tiles to visit in ``lists``, and with selected keys their
    blocks; otherwise its size is 0.
    """
    if x.selected is not None:
        return selected.forward(x, *x.selected)
    from ..kernels.forward import forward

    tiles = tables.forward(x.case, keys=x.length)
    if x.states is None:
        return (x.launch_by_blocks(forward, tiles),), 0
    found = mask_tiles.lists(x, tiles, by_keys=False)
    return (found.launch, x.launch_by_blocks(forward, tiles, found.arguments)), found.numbers


class Pass(NamedTuple):
    """A pass of a backward: its launch, the launch before it that lists tiles, and the size of the list.

    Both launches may be None, and the list may have no numbers.
    """

    before: Launch | None
    launch: Launch | None
    numbers: int


class Backward(NamedTuple):
    """The launches of a backward, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta, which the next launches read.
        keys: the launch that writes dk, and dv unless ``values`` does; it may also add up dq in a buffer of
            sums.
        queries: the launch that writes dq, and partial gradients of ALiBi slopes.
        variant: the name of the kernels, which ``explain`` prints.
        shares: the number of partial gradients per slope that ``queries`` writes; None if no slope needs one.
        sums: the size of the buffer of sums in fp32 values, initially zero; 0 if there is none.
        values: the launch that writes dv, or None if ``keys`` does.
        before_values, before_keys, before_queries: launches that list the tiles a mask function does not
            hide, or None.
        lists: the size of such a list in int32 values.
    """

    prepare: Launch
    keys: Launch
    queries: Launch
    variant: str
    shares: int | None = None
    sums: int = 0
    values: Launch | None = None
    before_values: Launch | None = None
    before_keys: Launch | None = None
    before_queries: Launch | None = None
    lists: int = 0

    @property
    def launches(self) -> list[Launch]:
        """All launches, in order."""
        of_keys = self.before_values, self.values, self.before_keys, self.keys
        ordered = (self.prepare, *of_keys, self.before_queries, self.queries)
        return [x for x in ordered if x is not None]

    @property
    def share_rows(self) -> int:
        """The number of queries that a partial gradient of a slope covers."""
        return self.queries.arguments["BLOCK_M"]

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors."""
        for launch in self.launches:
            launch.on(tensors)


def backward(x: BackwardShapes) -> Backward | EntriesBackward | SelectedBackward:
    """Return the launches of a backward in passes: one or two over blocks of keys, one over queries.

    With selected keys, there are other passes.
    """
    if x.selected is not None:
        (*_, planes, _), block_size = x.selected
        by_entry = selected_tables.adds_by_entry(rows=x.h // max(planes, x.g), block_size=block_size)
        return (selected_entries if by_entry else selected_backward).backward(x, *x.selected)
    from ..kernels.backward import backward_keys, backward_queries

    of_values = tables.backward_values(x.case, keys=x.length)
    of_keys, of_queries = (f(x.case, keys=x.length) for f in (tables.backward_keys, tables.backward_queries))
    blocks = x.blocks(x.s, of_queries.block_m)
    more = {"stride_sb": 1 if x.packed else x.h * blocks, "stride_sh": blocks}

    def launched(kernel: Callable, tiles: LaunchConfig, *, of_keys: bool, **parts: bool) -> Pass:
        """Return a pass; with a mask function, a launch before it lists its tiles."""
        found = None if x.states is None else mask_tiles.lists(x, tiles, by_keys=of_keys)
        given = more | parts | ({} if found is None else found.arguments)
        launch = x.launch_by_blocks(kernel, tiles, given, of_keys=of_keys)
        return Pass(None, launch, 0) if found is None else Pass(found.launch, launch, found.numbers)

    values = Pass(None, None, 0)
    if of_values is not None:
        values = launched(backward_keys, of_values, of_keys=True, DK=False)
    keys = launched(backward_keys, of_keys, of_keys=True, DV=of_values is None)
    queries = launched(backward_queries, of_queries, of_keys=False)
    return Backward(
        x.prepare(), keys.launch, queries.launch, "plain", blocks if x.learns_slopes else None,
        values=values.launch, before_values=values.before, before_keys=keys.before,
        before_queries=queries.before, lists=max(values.numbers, keys.numbers, queries.numbers),
    )  # fmt: skip
