"""How heads become fewer: which merge, after which turns, in which groups; and the best choice where none is
made.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from ...internal.checks import check_count
from .align import Align, check_align

Merge = Literal["principal", "principal-values", "mean", "first", "energy", "learned"]
Grouping = Literal["neighbours", "similar"]
PRINCIPAL = ("principal", "principal-values")


@dataclass(frozen=True, slots=True)
class MergeRecipe:
    """``merge`` makes one head of each group, ``align`` turns heads before, and ``grouping`` says which are a
    group.

    Keys are weighed at distances up to ``reach``.
    """

    merge: Merge
    align: Align
    grouping: Grouping
    reach: int = 2048


def recipe(
    merge: Merge | None = None,
    align: Align | None = None,
    grouping: Grouping | None = None,
    *,
    reach: int = 2048,
    calibrated: bool,
    maps_keys: bool = True,
    moves_heads: bool = True,
) -> MergeRecipe:
    """These choices, and the best that is known in the place of each None.

    With a calibration that is the principal merge, in the groups in which it loses least; without, the mean
    of neighbours, of which nothing has to be known. ``maps_keys`` says whether keys may be mapped: norms
    behind their projection forbid it, and then values alone are merged by principal directions.
    ``moves_heads`` says whether heads may change their order: the slopes of ALiBi forbid it.

    Raises:
        ValueError: an unknown choice, a principal merge of keys that may not be mapped, or turns before one,
        which
            finds every turn itself.
        NotImplementedError: ``grouping="similar"`` where heads may not change their order.

    >>> recipe(calibrated=True)
    MergeRecipe(merge='principal', align='none', grouping='similar', reach=2048)
    >>> recipe(calibrated=False)
    MergeRecipe(merge='mean', align='none', grouping='neighbours', reach=2048)
    """
    for name, value, known in (("merge", merge, Merge), ("grouping", grouping, Grouping)):
        if value is not None and value not in get_args(known):
            raise ValueError(f"{name}: expected one of {get_args(known)}, got {value!r}")
    align = "none" if align is None else align
    check_align(align)
    check_count("reach", reach, least=1)
    if merge is None:
        best = "principal" if maps_keys else "principal-values"
        merge = best if calibrated and align == "none" else "mean"
    if merge == "principal" and not maps_keys:
        raise ValueError(
            "merge: expected no norms of q and k, and the same rotated channels for every loader, for "
            '"principal", which maps keys; use "principal-values", which merges keys by their mean'
        )
    if merge in PRINCIPAL and align != "none":
        raise ValueError(
            f'align: expected "none" with merge="{merge}", which finds every turn itself, got {align!r}'
        )
    if grouping is None:
        grouping = "similar" if merge in PRINCIPAL and moves_heads else "neighbours"
    if grouping == "similar" and not moves_heads:
        raise NotImplementedError(
            'grouping: "similar" moves query heads, and ALiBi\'s slopes belong to their order; use '
            '"neighbours"'
        )
    return MergeRecipe(merge, align, grouping, reach)
