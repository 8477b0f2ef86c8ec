"""Plan the launches of a forward whose mask selects keys by lists."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from ....call.spec import AttentionSpec
from ....fp8 import E4M3
from ...operators import Arguments
from ..launching.config import LaunchConfig, power_of_two
from ..launching.launch import Launch
from ..launching.layouts import has_slopes
from ..launching.places import places_of
from . import hopper_tables, selected_tables, tables
from .shapes import DenseShapes


def unsupported(spec: AttentionSpec) -> list[str]:
    """Return the reasons why no kernel computes the lists of a call with this spec."""
    given = {
        "with dropout": spec.dropout,
        "in fp8": spec.kind != "cached" and E4M3 in (spec.dtype, spec.compute_dtype),
        "in attention_weights and attention_maxima": spec.statistic,
    }
    lacking = [name for name, is_given in given.items() if is_given]
    return [f"has no kernels yet for masks.selected() {name}; use backend='torch'" for name in lacking]


def forward(x: DenseShapes, indices: tuple[int, ...], block_size: int) -> tuple[tuple[Launch, ...], int]:
    """Return the launches of a forward, and the size of the buffer ``lists`` in int32 values.

    ``indices`` is the shape of the lists, ``[b, s, c, n]`` or packed ``[t, c, n]``.
    """
    from ..kernels.selected.forward import selected_forward

    rows, sizes = x.h // max(indices[-2], x.g), {"block_size": block_size}
    queries = selected_tables.neighbours(x.case, rows=rows, slots=indices[-1], **sizes)
    tiles = selected_tables.forward(x.case, rows=rows, queries=queries, own_values=x.own_values, **sizes)
    found = lists(x, indices, block_size) if queries == 1 else unions(x, indices, block_size, queries)
    return (found.launch, launch_by_queries(x, selected_forward, tiles, found.arguments)), found.numbers


def takes_latents(x: DenseShapes, a: Arguments) -> bool:
    """True if the Hopper kernel for selected tokens of latents takes a call with these layouts."""
    if x.selected is None or x.own_values:
        return False
    (*_, planes, _), block_size = x.selected
    plain = not (has_slopes(a) or x.case.by_function)
    near = a.q.strides[-2] < tables.FARTHEST  # int32 offsets must reach across 64 heads
    return (
        plain and x.g == planes == block_size == 1 and near and hopper_tables.takes_latents(x.case, heads=x.h)
    )


def forward_of_latents(
    x: DenseShapes, indices: tuple[int, ...], block_size: int
) -> tuple[tuple[Launch, ...], int]:
    """Return the launches of :func:`forward` for selected tokens of latents on Hopper."""
    from ..kernels.hopper.selected_latents.kernel import selected_latents

    found, tiles = lists(x, indices, block_size), hopper_tables.LATENTS
    programs = tiles_of_queries(x) * (x.h // tiles.block_m)
    of_cache = "stride_tt", "splits", "lines", "SPLIT"
    more = found.arguments | dict.fromkeys(of_cache)
    return (found.launch, x.launch(selected_latents, programs, tiles, more)), found.numbers


class Lists(NamedTuple):
    """The launch that lists visible blocks, the size of ``lists`` in int32 values, and kernel arguments."""

    launch: Launch
    numbers: int
    arguments: dict[str, int]


def lists(x: DenseShapes, indices: tuple[int, ...], block_size: int) -> Lists:
    """Return the launch that lists the visible blocks of lists; ``indices`` is their shape."""
    from ..kernels.selected.lists import list_blocks

    *tokens, planes, slots = indices
    owners = min(planes, x.g)  # of blocks: lists, or KV heads if each has several lists
    of_owner = x.blocks(x.t, block_size)
    more = _of_call(x, planes, slots, block_size, 1)
    more |= {
        "owners": owners, "shared": x.g // owners,
        "of_owner": of_owner, "blocks": of_owner * owners * (1 if x.packed else x.batch),
        **dict.fromkeys(("stride_table", "pages", "page_rows", "PAGE", "EARLY")),  # of a cache
    }  # fmt: skip
    places = places_of(prod(tokens) * planes, slots, -(-x.t // block_size))
    sizes, programs = LaunchConfig(power_of_two(slots), 0, 1, 4), tiles_of_queries(x) * planes
    return Lists(x.launch(list_blocks, programs, sizes, more | places.arguments), places.numbers, more)


def unions(x: DenseShapes, indices: tuple[int, ...], block_size: int, queries: int) -> Lists:
    """Return the launch that lists the visible blocks of ``queries`` neighbouring queries together."""
    from ..kernels.selected.lists import list_unions

    *_, planes, slots = indices
    more = _of_call(x, planes, slots, block_size, queries)
    entries = power_of_two(queries * slots)
    programs = tiles_of_queries(x, queries) * planes
    # One warp sorts up to 256 entries without shared memory.
    launch = x.launch(list_unions, programs, LaunchConfig(entries, 0, 1, 1 if entries <= 256 else 4), more)
    return Lists(launch, programs * (queries * slots + 1), more)


def _of_call(x: DenseShapes, planes: int, slots: int, block_size: int, queries: int) -> dict[str, int]:
    """Return the arguments of the kernels that make and read lists, by name."""
    return {
        "planes": planes, "slots": slots, "BLOCK_SIZE": block_size, "QUERIES": queries,
        "rows": x.h // max(planes, x.g),  # query heads that share a list and a KV head
        "OWN_VALUES": x.own_values,
    }  # fmt: skip


def launch_by_queries(x: DenseShapes, kernel: Callable, tiles: LaunchConfig, more: dict[str, int]) -> Launch:
    """Return a launch with programs for tiles of queries and the heads that share a list and a KV head."""
    queries = more["QUERIES"]
    units = x.h // more["rows"] * -(-more["rows"] // (tiles.block_m // queries))
    return x.launch(kernel, tiles_of_queries(x, queries) * units, tiles, more)


def tiles_of_queries(x: DenseShapes, queries: int = 1) -> int:
    """Return the number of tiles; packed sequences count one more, and so do the tokens after them."""
    return x.blocks(x.s, queries) * (1 if x.packed else x.batch)
