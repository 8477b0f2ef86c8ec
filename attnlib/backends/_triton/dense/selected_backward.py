"""Plan the launches of a backward whose mask selects keys by lists."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from . import selected, tables
from .shapes import BackwardShapes

SUMMED = 16  # keys whose partial sums a program adds


class KeyPass(NamedTuple):
    """The launches that write partial sums of dk and dv for ``entries`` entries of lists, and add them up."""

    entries: slice
    keys: Launch
    sums: Launch


class SelectedBackward(NamedTuple):
    """The launches of a backward with lists of selected keys, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta.
        list_blocks: the launch that writes the visible blocks of each list.
        queries: the launch that writes dq, and the gradients of ALiBi slopes for each query.
        passes: the launches that write dk and dv. Passes after the first add to what it writes.
        by_list: True if each entry of a list has a partial sum, not up to ``ITEM`` lists with the same block.
        lists: the size of the lists in int32 values.
        entries: the number of all entries.
        slots: the number of entries of a list.
        blocks: the number of blocks of all sequences and lists, or KV heads.
        parts: the size of the buffer of partial sums in fp32 values.
        shares: the number of gradients per slope that ``queries`` writes; None if no slope needs one.
        share_rows: the number of queries that such a gradient covers.
        sums: 0, since dq needs no buffer of sums.
    """

    prepare: Launch
    list_blocks: Launch
    queries: Launch
    passes: tuple[KeyPass, ...]
    by_list: bool
    lists: int
    entries: int
    slots: int
    blocks: int
    parts: int
    shares: int | None
    share_rows: int = 1
    sums: int = 0
    variant: str = "plain"

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors; allocate the partial sums, and invert the lists by a sort."""
        q, dk, dv = tensors["q"], tensors["dk"], tensors["dv"]
        # Numbers of 16 bits take half of the passes of a radix sort.
        dtype = torch.int16 if self.blocks < 2**15 else torch.int32
        tensors = tensors | {"block_ids": q.new_empty(self.entries, dtype=dtype)}
        for launch in (self.prepare, self.list_blocks, self.queries):
            launch.on(tensors)
        tensors["parts"] = q.new_empty(self.parts, dtype=torch.float32)
        if is_added := len(self.passes) > 1:
            tensors |= {"dk": torch.empty_like(dk, dtype=torch.float32)}
            tensors |= {"dv": torch.empty_like(dv, dtype=torch.float32)}
        for entries, keys, sums in self.passes:
            tensors |= self._inverted(tensors["block_ids"][entries])
            keys.on(tensors)
            sums.on(tensors)
        if is_added:
            dk.copy_(tensors["dk"])
            dv.copy_(tensors["dv"])

    def _inverted(self, block_ids: Tensor) -> dict[str, Tensor | None]:
        """Sort entries by their blocks, and return them with the first entry of each block, as tensors."""
        ids, order = block_ids.sort(stable=True)
        blocks = torch.arange(self.blocks + 1, dtype=ids.dtype, device=ids.device)
        edges = torch.searchsorted(ids, blocks, out_int32=True)
        if self.by_list:
            return {"edges": edges, "order": order, "choosers": None}
        return {"edges": edges, "order": None, "choosers": (order // max(1, self.slots)).int()}


def backward(x: BackwardShapes, indices: tuple[int, ...], block_size: int) -> SelectedBackward:
    """Return the launches of a backward; ``indices`` is the shape of the lists.

    dk and dv have partial sums of at most about ``PARTS`` bytes, beside one for each block of keys.
    """
    from ..kernels.selected.backward import selected_backward_queries

    *tokens, planes, slots = indices
    tokens, rows = prod(tokens), x.h // max(planes, x.g)
    owners = min(planes, x.g)
    blocks = owners * x.blocks(x.t, block_size) * (1 if x.packed else x.batch)
    by_list = tables.sums_by_list(rows=rows, block_size=block_size)
    lists, more, numbers = selected.lists(x, indices, block_size, blocks=blocks)
    of_queries = tables.selected_queries(x.case, rows=rows, block_size=block_size)
    shares = x.blocks(x.s, 1)
    of_slopes = {"stride_sb": 1 if x.packed else x.h * shares, "stride_sh": shares}
    queries = selected.launch_by_queries(x, selected_backward_queries, of_queries, more | of_slopes)

    width = 4 * (x.case.head_dim + x.case.value_dim) * (x.g // owners) * block_size  # bytes of a partial sum
    most = max(1, tables.PARTS // width)
    item = tables.ITEM
    while not by_list and tokens * planes * slots // item > most:
        item *= 2
    chunk = max(1, most // max(1, planes * slots)) if by_list else max(1, tokens)
    parts = min(chunk, tokens) * planes * slots if by_list else tokens * planes * slots // item + blocks
    more |= {"PLANES": planes, "ROWS": rows, "ITEM": item}
    starts = range(0, max(1, tokens), chunk)
    passes = (_pass(x, more, start, min(start + chunk, tokens), by_list=by_list) for start in starts)
    return SelectedBackward(
        x.prepare(), lists, queries, tuple(passes), by_list, numbers, tokens * planes * slots, slots, blocks,
        parts * width // 4, shares if x.learns_slopes else None,
    )  # fmt: skip


def _pass(x: BackwardShapes, more: dict, start: int, stop: int, *, by_list: bool) -> KeyPass:
    """Return the pass over keys for the lists of the tokens from ``start`` to ``stop``."""
    from ..kernels.selected.backward import selected_backward_keys, selected_backward_sums

    of_token, size, blocks = more["planes"] * more["slots"], more["BLOCK_SIZE"], more["blocks"]
    entries, shared = (stop - start) * of_token, x.g // min(more["planes"], x.g)
    rows = more["ROWS"] * (1 if by_list else more["ITEM"])
    tiles = tables.selected_keys(x.case, rows=rows, keys=size * (more["slots"] if by_list else 1))
    if by_list:
        programs = (stop - start) * x.g * -(-more["slots"] * size // tiles.block_n)
    else:
        programs = (entries // more["ITEM"] + blocks) * shared * -(-size // tiles.block_n)
    of_pass = more | {"first": start, "entries": entries, "ADD": start > 0}
    summed = LaunchConfig(0, min(SUMMED, 1 << (size - 1).bit_length()), 1, 4)
    return KeyPass(
        slice(start * of_token, stop * of_token),
        x.launch(selected_backward_keys, programs, tiles, of_pass),
        x.launch(selected_backward_sums, blocks * shared * -(-size // summed.block_n), summed, of_pass),
    )
