"""The options of a merge of heads: merge method, alignment and grouping, with defaults for all three."""

from dataclasses import dataclass
from typing import Literal, get_args

from ...internal.checks import check_count
from .align import Align, check_align

Merge = Literal["principal", "principal-values", "mean", "first", "energy", "learned"]
Grouping = Literal["neighbours", "similar"]
PRINCIPAL = ("principal", "principal-values")


@dataclass(frozen=True, slots=True)
class MergeRecipe:
    """The merge method, the alignment before it, and the grouping of heads.

    Key errors are averaged over distances up to ``reach``.
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
    """Return the given choices, with the best known default for each None.

    With a calibration, the default is the principal merge in the groups with the least loss. Without one, it
    is the mean of neighbours, which needs no knowledge of the inputs. ``maps_keys`` is False if keys may not
    be mapped, for example because they are normalised after projection; the default then merges only values
    by principal directions. ``moves_heads`` is False if heads may not be reordered, as with ALiBi slopes.

    Raises:
        ValueError: an unknown choice, a principal merge of keys that may not be mapped, or an alignment
            before a principal merge, which finds every rotation itself.
        NotImplementedError: ``grouping="similar"`` if heads may not be reordered.

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
            'merge: "principal" maps keys, which needs a layer without norms of q and k and the same rotated '
            'channels in all loaders; use "principal-values", which averages the keys'
        )
    if merge in PRINCIPAL and align != "none":
        raise ValueError(
            f'align: expected "none" with merge="{merge}", which finds every rotation itself, got {align!r}'
        )
    if grouping is None:
        grouping = "similar" if merge in PRINCIPAL and moves_heads else "neighbours"
    if grouping == "similar" and not moves_heads:
        raise NotImplementedError(
            'grouping: "similar" reorders query heads, but ALiBi\'s slopes depend on their order; use '
            '"neighbours"'
        )
    return MergeRecipe(merge, align, grouping, reach)
