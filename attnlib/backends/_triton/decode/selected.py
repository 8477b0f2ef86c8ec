"""Plan the launches of a call over a cache whose mask selects keys by lists."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from ..launching.config import LaunchConfig
from ..launching.launch import Launch
from ..launching.places import places_of
from . import tables
from .shapes import DecodeShapes


class SelectedPlan(NamedTuple):
    """The launches of a call, and the sizes of two buffers.

    Attributes:
        listing: the launch that writes the visible blocks of each list to the buffer ``lists``; for the
            Hopper kernel, it writes their rows in the cache.
        variant: the name of the kernels: "plain" or "Hopper".
        decode: the launch that writes the output and LSE, or partial results if lists are split.
        combine: the launch that merges the partial results; None if lists are not split.
        lists: the size of the buffer ``lists``, in int32 values.
        floats: the size of the buffer for partial results, in fp32 values.
    """

    listing: Launch
    variant: str
    decode: Launch
    combine: Launch | None
    lists: int
    floats: int


def plan(x: DecodeShapes) -> SelectedPlan:
    """Return the launches of a call."""
    from ..kernels.selected.decode import merge_splits
    from ..kernels.selected.lists import list_blocks

    *tokens, planes, slots = x.a.selected.shape
    tiles, arguments, rows = x.tiles, x.arguments(), x.case.rows
    queries, lines = x.s + x.b + 1 if x.packed else x.b * x.s, prod(tokens) * x.h
    units = x.h // rows * -(-rows // tiles.block_m)
    keys = min(slots * x.a.block_size, x.max_tokens)
    own = x.hopper is not None
    shared = tiles._replace(block_n=2 * tiles.block_n) if own else tiles  # Hopper's tiles come in pairs
    splits = tables.list_splits(shared, keys, prod(tokens) * units, x.processors)
    places = places_of(prod(tokens) * planes, slots, -(-x.max_tokens // x.a.block_size))
    arguments |= places.arguments | dict.fromkeys(("owners", "of_owner", "blocks"))  # for gradients only
    arguments |= {
        "heads": x.h, "rows": rows, "planes": planes, "slots": slots, "t": arguments["limit"],
        "BLOCK_SIZE": x.a.block_size, "splits": splits, "lines": lines, "SPLIT": splits > 1,
        "NATURAL": own, "stride_kb": arguments["stride_kp"],
        "page_rows": arguments["stride_kp"] // arguments["stride_kt"] if own else None,
    }  # fmt: skip
    early, combine = arguments["EARLY"], None
    if splits > 1:
        together, at_once, channels = tables.joined(splits, arguments["E_MAIN"], lines)
        arguments |= {"WIDTH": channels, "AT_ONCE": at_once, "TOGETHER": together}
        programs = -(-lines // together) * (arguments["E_MAIN"] // channels)
        combine = Launch(merge_splits, programs, arguments, LaunchConfig(0, 0, 1, 4), early=early)
    floats = splits * lines * (arguments["E_MAIN"] + 1) if splits > 1 else 0
    decode = Launch(_kernel(x), queries * units * splits, arguments, tiles, early=early)
    # Lists of entries have no pages: the generic kernel looks them up itself.
    of_lists = arguments if own else arguments | {"PAGE": None}
    listing = Launch(list_blocks, queries * planes, of_lists, tables.listing(slots), early=early)
    return SelectedPlan(listing, "Hopper" if own else "plain", decode, combine, places.numbers, floats)


def _kernel(x: DecodeShapes) -> Callable:
    """Return the kernel that attends to the listed keys of a call."""
    if x.hopper is None:
        from ..kernels.selected.decode import selected_decode

        return selected_decode
    from ..kernels.hopper.selected_latents.kernel import selected_latents

    return selected_latents
