"""Plan the launches of a backward whose mask selects keys by lists."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from . import selected, tables
from .shapes import BackwardShapes

SUMMED = 16  # keys whose partial sums one program adds


class KeyPass(NamedTuple):
    """The launches that write partial sums of dk and dv for some entries of lists, and add them up."""

    entries: slice
    keys: Launch
    sums: Launch


class SelectedBackward(NamedTuple):
    """The launches of a backward with lists of selected keys, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta.
        list_blocks: the launch that writes the visible blocks of each list.
        list_unions: the launch that replaces them by those of neighbouring queries, for ``queries``; or None.
        queries: the launch that writes dq, and the gradients of ALiBi slopes for each query.
        passes: the launches that write dk and dv; a pass after the first adds to them.
        by_list: True if each entry of a list has partial sums; otherwise up to ``ITEM`` lists with the same
            block have them together.
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
    passes: tuple[KeyPass, ...]
    by_list: bool
    parts: int
    lists: int
    shares: int | None
    share_rows: int = 1
    sums: int = 0
    variant: str = "plain"

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors; allocate the partial sums, and invert the lists by a sort."""
        q, dk, dv, blocks = tensors["q"], tensors["dk"], tensors["dv"], self.list_blocks.arguments["blocks"]
        # Numbers of 16 bits take half of the passes of a radix sort. Queries that do not exist keep `blocks`.
        dtype = torch.int16 if blocks < 2**15 else torch.int32
        ids = q.new_full((self.passes[-1].entries.stop,), blocks, dtype=dtype)
        for launch in (self.prepare, self.list_blocks, self.list_unions, self.queries):
            if launch is not None:
                launch.on(tensors | {"block_ids": ids})
        tensors = tensors | {"parts": q.new_empty(self.parts, dtype=torch.float32)}
        if is_added := len(self.passes) > 1:
            wide = {x: torch.empty_like(tensors[x], dtype=torch.float32) for x in ("dk", "dv")}
            tensors |= wide
        for entries, keys, sums in self.passes:
            tensors |= self._inverted(ids[entries], blocks)
            keys.on(tensors)
            sums.on(tensors)
        if is_added:
            dk.copy_(wide["dk"])
            dv.copy_(wide["dv"])

    def _inverted(self, ids: Tensor, blocks: int) -> dict[str, Tensor | None]:
        """Sort entries by their blocks, and find the first entry of each block, without a synchronization.

        ``order`` has the numbers of entries, and ``choosers`` those of the lists that they are in.
        """
        ids, order = ids.sort(stable=True)
        numbers = torch.arange(blocks + 1, dtype=ids.dtype, device=ids.device)
        edges = torch.searchsorted(ids, numbers, out_int32=True)
        if self.by_list:
            return {"edges": edges, "order": order, "choosers": None}
        slots = max(1, self.list_blocks.arguments["slots"])
        return {"edges": edges, "order": None, "choosers": (order // slots).int()}


def backward(x: BackwardShapes, indices: tuple[int, ...], block_size: int) -> SelectedBackward:
    """Return the launches of a backward; ``indices`` is the shape of the lists.

    Partial sums take at most about ``PARTS`` bytes, but at least those of one list, or of each block once.
    """
    from ..kernels.selected.backward import selected_backward_queries

    found = selected.lists(x, indices, block_size)
    of_call, shares = found.arguments, x.blocks(x.s, 1)
    slots, sizes = of_call["slots"], {"rows": of_call["rows"], "block_size": block_size}
    by_list, entries = tables.sums_by_list(**sizes), of_call["planes"] * slots  # entries of a query
    # The pass over keys reads lists only if it has sums for each of their entries.
    together = 1 if by_list else tables.neighbours(x.case, tables.selected_queries, slots=slots, **sizes)
    union = None if together == 1 else selected.unions(x, indices, block_size, together)
    tiles, stride = (
        tables.selected_queries(x.case, queries=together, **sizes),
        1 if x.packed else x.h * shares,
    )
    more = of_call | {"QUERIES": together, "stride_sb": stride, "stride_sh": shares}
    queries = selected.launch_by_queries(x, selected_backward_queries, tiles, more)

    width = (x.case.head_dim + x.case.value_dim) * of_call["shared"] * block_size  # of the sums of an entry
    most, count = max(1, tables.PARTS // (4 * width)), selected.tiles_of_queries(x)
    if by_list:
        item, chunk = 1, min(count, max(1, most // max(1, entries)))
        parts = chunk * entries
    else:
        item, chunk = max(tables.ITEM, 1 << (count * entries // most).bit_length()), count
        parts = count * entries // item + of_call["blocks"]
    more = of_call | {"PLANES": of_call["planes"], "ROWS": of_call["rows"], "ITEM": item}
    starts = range(0, max(1, count), max(1, chunk))
    passes = (_pass(x, more, range(start, min(start + chunk, count)), by_list=by_list) for start in starts)
    return SelectedBackward(
        x.prepare(), found.launch, union and union.launch, queries, tuple(passes), by_list, parts * width,
        max(found.numbers, union.numbers if union else 0), shares if x.learns_slopes else None,
    )  # fmt: skip


def _pass(x: BackwardShapes, more: dict[str, int], queries: range, *, by_list: bool) -> KeyPass:
    """Return the pass over keys for the lists of some queries."""
    from ..kernels.selected.backward import selected_backward_keys, selected_backward_sums

    size, of_query = more["BLOCK_SIZE"], more["planes"] * more["slots"]
    keys, rows = (size * more["slots"], 1) if by_list else (size, more["ITEM"])
    tiles = tables.selected_keys(x.case, rows=more["ROWS"] * rows, keys=keys)
    entries = slice(queries.start * of_query, queries.stop * of_query)
    count, blocks = entries.stop - entries.start, more["blocks"] * more["shared"]
    units = len(queries) * x.g if by_list else count // more["ITEM"] * more["shared"] + blocks
    more = more | {"first": queries.start, "entries": count, "ADD": queries.start > 0}
    summed = LaunchConfig(0, min(SUMMED, 1 << (size - 1).bit_length()), 1, 4)
    return KeyPass(
        entries,
        x.launch(selected_backward_keys, units * -(-keys // tiles.block_n), tiles, more),
        x.launch(selected_backward_sums, blocks * -(-size // summed.block_n), summed, more),
    )
