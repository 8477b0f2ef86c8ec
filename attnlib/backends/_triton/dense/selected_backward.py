"""Plan the launches of a backward whose mask selects keys by lists.

dk and dv are sums over the lists with a block of keys: a program takes many such lists. If many heads share a
list, ``selected_entries.py`` adds the shares of each entry instead.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from . import selected
from . import selected_tables as tables
from .shapes import BackwardShapes

SUMMED = 16  # keys whose partial sums one program adds


class SelectedBackward(NamedTuple):
    """The launches of a backward with lists of selected keys, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta.
        list_blocks: the launch that writes the visible blocks of each list.
        list_unions: the launch that replaces them by those of neighbouring queries, for ``queries``; or None.
        queries: the launch that writes dq, and the gradients of ALiBi slopes for each query.
        keys: the launch that writes partial sums of dk and dv, of up to ``ITEM`` lists with the same block.
        add: the launch that adds them.
        entries: the number of entries of all lists.
        parts: the size of the buffer of partial sums in fp32 values.
        lists: the size of the lists in int32 values.
        shares: the number of gradients per slope that ``queries`` writes; None if no slope needs one.
        share_rows: the number of queries that such a gradient covers.
        sums: 0, since dq needs no buffer of sums.
    """

    prepare: Launch
    list_blocks: Launch
    list_unions: Launch | None
    queries: Launch
    keys: Launch
    add: Launch
    entries: int
    parts: int
    lists: int
    shares: int | None
    share_rows: int = 1
    sums: int = 0
    variant: str = "plain"

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors; allocate the partial sums, and invert the lists by a sort."""
        ids, blocks = new_ids(self.list_blocks, self.entries, tensors["q"])
        for launch in (self.prepare, self.list_blocks, self.list_unions, self.queries):
            if launch is not None:
                launch.on(tensors | {"block_ids": ids})
        edges, order = inverted(ids, blocks)
        choosers = (order // max(1, self.list_blocks.arguments["slots"])).int()
        parts = tensors["q"].new_empty(self.parts, dtype=torch.float32)
        tensors = tensors | {"parts": parts, "edges": edges, "choosers": choosers}
        self.keys.on(tensors)
        self.add.on(tensors)


def new_ids(list_blocks: Launch, entries: int, q: Tensor) -> tuple[Tensor, int]:
    """Return a buffer for the block of each entry, which begin without one, and the number of blocks."""
    blocks = list_blocks.arguments["blocks"]
    # Numbers of 16 bits take half of the passes of a radix sort. Queries that do not exist keep `blocks`.
    dtype = torch.int16 if blocks < 2**15 else torch.int32
    return q.new_full((entries,), blocks, dtype=dtype), blocks


def inverted(ids: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Sort entries by their blocks on the device: return the first entry of each block, and the order."""
    ids, order = ids.sort(stable=True)
    numbers = torch.arange(blocks + 1, dtype=ids.dtype, device=ids.device)
    return torch.searchsorted(ids, numbers, out_int32=True), order


def backward(x: BackwardShapes, indices: tuple[int, ...], block_size: int) -> SelectedBackward:
    """Return the launches of a backward; ``indices`` is the shape of the lists.

    Partial sums take at most about ``PARTS`` bytes, but at least those of each block once.
    """
    from ..kernels.selected.backward import selected_backward_keys, selected_backward_queries
    from ..kernels.selected.sums import selected_backward_sums

    found = selected.lists(x, indices, block_size)
    of_call, slots = found.arguments, indices[-1]
    sizes = {"rows": of_call["rows"], "block_size": block_size}
    together = tables.neighbours(x.case, tables.queries_pass, slots=slots, **sizes)
    union = None if together == 1 else selected.unions(x, indices, block_size, together)
    tiles, shares = tables.queries_pass(x.case, queries=together, **sizes), x.blocks(x.s, 1)
    more = of_call | {
        "QUERIES": together, "stride_sb": 1 if x.packed else x.h * shares, "stride_sh": shares,
    }  # fmt: skip
    queries = selected.launch_by_queries(x, selected_backward_queries, tiles, more)

    entries = selected.tiles_of_queries(x) * of_call["planes"] * slots
    width = (x.case.head_dim + x.case.value_dim) * of_call["shared"] * block_size  # of the sums of an item
    item = max(tables.ITEM, 1 << (entries // max(1, tables.PARTS // (4 * width))).bit_length())
    blocks = of_call["blocks"] * of_call["shared"]
    more = of_call | {"PLANES": of_call["planes"], "ROWS": of_call["rows"], "ITEM": item, "entries": entries}
    tiles = tables.keys_pass(x.case, rows=more["ROWS"] * item, keys=block_size)
    programs = (entries // item * of_call["shared"] + blocks) * -(-block_size // tiles.block_n)
    keys = x.launch(selected_backward_keys, programs, tiles, more)
    summed = LaunchConfig(0, min(SUMMED, 1 << (block_size - 1).bit_length()), 1, 4)
    add = x.launch(selected_backward_sums, blocks * -(-block_size // summed.block_n), summed, more)
    return SelectedBackward(
        x.prepare(), found.launch, union and union.launch, queries, keys, add, entries,
        (entries // item + of_call["blocks"]) * width,
        max(found.numbers, union.numbers if union else 0), shares if x.learns_slopes else None,
    )  # fmt: skip
