"""Calls whose mask holds lists of selected keys, and the description of the lists in a call's spec."""

from collections.abc import Mapping
from typing import NamedTuple

from ..masks.band import AnyMask
from ..masks.function import MaskFunction, Selection


class SelectedLists(NamedTuple):
    """The form of the lists of a call: blocks of keys, lists for each query, and entries of a list."""

    block_size: int
    lists: int
    entries: int

    def __str__(self) -> str:
        unit = "keys" if self.block_size == 1 else f"blocks of {self.block_size} keys"
        return f"{self.lists} x {self.entries} {unit} for each query"


def selection_of(mask: AnyMask | None) -> Selection | None:
    """Return the lists of selected keys in a mask; None if it holds none."""
    return mask.selection if isinstance(mask, MaskFunction) else None


def lists_of(mask: AnyMask) -> SelectedLists | None:
    """Return the form of the lists in a mask; None if it holds none."""
    selection = selection_of(mask)
    return None if selection is None else SelectedLists(selection.block_size, *selection.indices.shape[-2:])


def check_selection(call, sizes: Mapping[str, int]) -> None:
    """Validate the lists of a :class:`~attnlib.call.Call`, which has these ``sizes``.

    Raises:
        ValueError: there is not a list for each query and head, KV head, or all heads.
        NotImplementedError: the call is over a batch-invariant cache.
    """
    if (selection := selection_of(call.mask)) is None:
        return
    if call.kv is not None and call.kv.split_size:
        raise NotImplementedError(
            "mask: expected no masks.selected() over a batch-invariant cache, whose splits have fixed keys; "
            "make the cache with batch_invariant=False"
        )
    *rows, lists, _ = selection.indices.shape
    expected, counts = call.q.shape[:-2], (1, sizes["g"], sizes["h"])
    if (*rows,) != (*expected,) or lists not in counts:
        names = zip("bs" if len(expected) == 2 else "t", expected, strict=True)
        of_rows = ", ".join(f"{name}={size}" for name, size in names)
        got = tuple(selection.indices.shape)
        raise ValueError(
            f"indices: expected [{of_rows}, c, n] like q, with c=1, g={counts[1]} or h={counts[2]} lists, "
            f"got {got}"
        )


def refuse_selection(mask: AnyMask | None, where: str, remedy: str) -> None:
    """Raise NotImplementedError if a mask holds lists of selected keys, which do not work ``where``."""
    if selection_of(mask) is not None:
        raise NotImplementedError(f"mask: expected no masks.selected() {where}; {remedy}")
