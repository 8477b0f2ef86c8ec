"""Plan the launches of a backward over lists of which each entry has partial sums of dk and dv."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from . import selected, selected_tables
from .selected_backward import inverted, new_ids
from .shapes import BackwardShapes

SUMS = LaunchConfig(0, 0, 1, 2)  # a program of selected_sums has few numbers for each thread
AT_ONCE = 8  # shares of a key that it reads before it adds them


class Pass(NamedTuple):
    """The launches for the lists of some queries, and the ``entries`` of these lists."""

    entries: slice
    products: tuple[Launch, ...]
    sums: Launch


class EntriesBackward(NamedTuple):
    """The launches of a backward with lists that many heads share, and the sizes of their buffers.

    Attributes:
        prepare: the launch that writes lse2 and delta.
        list_blocks: the launch that writes the visible blocks of each list.
        passes: the launches that write dq, and add shares to dk and dv.
        weights: the number of probabilities and gradients of scores that a pass writes.
        keys: the number of keys whose numbers it writes.
        parts: the number of shares in dk and dv that a pass writes, before they are added.
        dtype: the dtype of these shares.
        lists: the size of the lists in int32 values.
        shares: the number of gradients per slope; None if no slope needs one.
        share_rows: the number of queries that such a gradient covers.
        sums: 0, since dq needs no buffer of sums.
    """

    prepare: Launch
    list_blocks: Launch
    passes: tuple[Pass, ...]
    weights: int
    keys: int
    parts: int
    dtype: torch.dtype
    lists: int
    shares: int | None
    share_rows: int = 1
    sums: int = 0
    variant: str = "plain"

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors; allocate the buffers of a pass, and invert the lists by sorts."""
        q, dk, dv = tensors["q"], tensors["dk"], tensors["dv"]
        ids, blocks = new_ids(self.list_blocks, self.passes[-1].entries.stop, q)
        self.prepare.on(tensors)
        self.list_blocks.on(tensors | {"block_ids": ids})
        tensors = tensors | {
            "weights": q.new_empty(self.weights), "at": q.new_empty(self.keys, dtype=torch.int32),
            "parts": q.new_empty(self.parts, dtype=self.dtype),
        }  # fmt: skip
        if is_added := len(self.passes) > 1:
            tensors |= {x: torch.empty_like(tensors[x], dtype=torch.float32) for x in ("dk", "dv")}
        for entries, products, sums in self.passes:
            for launch in products:
                launch.on(tensors)
            edges, order = inverted(ids[entries], blocks)
            sums.on(tensors | {"edges": edges, "order": order})
        if is_added:
            dk.copy_(tensors["dk"])
            dv.copy_(tensors["dv"])


def backward(x: BackwardShapes, indices: tuple[int, ...], block_size: int) -> EntriesBackward:
    """Return the launches of a backward; ``indices`` is the shape of the lists.

    Besides the numbers of entries, the buffers of a pass take at most about ``PARTS`` bytes, but at least
    those of one query.
    """
    found = selected.lists(x, indices, block_size)
    of_call, shares, count = found.arguments, x.blocks(x.s, 1), selected.tiles_of_queries(x)
    entries, keys = of_call["planes"] * of_call["slots"], of_call["slots"] * block_size
    width = -(-max(1, keys) // 64) * 64  # rows of weights begin at multiples of 16 bytes
    weights, parts = 2 * x.h * width, x.g * keys * (x.case.head_dim + x.case.value_dim)  # of a query
    # Shares in fp16 may overflow before they are added.
    dtype = torch.float32 if x.out.dtype == torch.float16 else x.out.dtype
    chunk = min(count, max(1, selected_tables.PARTS // (x.case.itemsize * weights + dtype.itemsize * parts)))
    more = of_call | {
        "width": width, "stride_sb": 1 if x.packed else x.h * shares, "stride_sh": shares,
    }  # fmt: skip
    starts = range(0, max(1, count), max(1, chunk))
    passes = tuple(_pass(x, more, range(start, min(start + chunk, count)), entries) for start in starts)
    return EntriesBackward(
        x.prepare(), found.launch, passes, chunk * weights, chunk * x.g * width, chunk * parts, dtype,
        found.numbers, shares if x.learns_slopes else None,
    )  # fmt: skip


def _pass(x: BackwardShapes, more: dict[str, int], queries: range, entries: int) -> Pass:
    """Return the launches for the lists of some queries, which have ``entries`` entries each."""
    from ..kernels.selected.backward import selected_weights
    from ..kernels.selected.sums import selected_parts, selected_queries, selected_sums

    rows, block_size = more["rows"], more["BLOCK_SIZE"]
    of_pass, keys = slice(queries.start * entries, queries.stop * entries), more["slots"] * block_size
    units = len(queries) * x.h // rows  # lists of a KV head
    more = more | {"first": queries.start, "entries": of_pass.stop - of_pass.start, "ADD": queries.start > 0}

    of_weights, of_queries, of_parts = (
        selected_tables.by_entry(x.case, name, rows=rows) for name in selected_tables.ENTRIES
    )
    parts = 1 if x.learns_slopes else max(1, -(-keys // of_weights.tiles.block_n))
    programs = units * -(-rows // of_weights.tiles.block_m) * parts
    weights = x.launch(selected_weights, programs, *of_weights.arguments(more | {"parts": parts}))
    programs = units * -(-rows // of_queries.tiles.block_m) * -(-x.case.head_dim // of_queries.channels)
    dq = x.launch(selected_queries, programs, *of_queries.arguments(more))
    programs = units * -(-keys // of_parts.tiles.block_n) * 2  # for dk, and for dv
    products = weights, dq, x.launch(selected_parts, programs, *of_parts.arguments(more))
    programs = more["blocks"] * more["shared"] * block_size
    return Pass(of_pass, products, x.launch(selected_sums, programs, SUMS, more | {"AT_ONCE": AT_ONCE}))
