"""Options for merging heads: merge method, alignment and grouping, with defaults for all three."""

from dataclasses import dataclass
from typing import Literal, get_args

from ...internal.checks import check_count
from .align import Align, check_align

Merge = Literal["principal", "principal-values", "mean", "first", "energy", "learned"]
Grouping = Literal["neighbours", "similar"]
PRINCIPAL = ("principal", "principal-values")


@dataclass(frozen=True, slots=True)
class MergeRecipe:
    """The options of a merge of heads: the method, the alignment before it, and the grouping.

    Key errors are averaged over query-key distances up to ``reach``.
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
    maps_values: bool = True,
    moves_heads: bool = True,
) -> MergeRecipe:
    """Validate the options of a merge, and replace each None with the best known default.

    With a calibration, the default is the principal merge in the groups with the least loss. Without a
    calibration, it is the mean of neighbours, which needs no knowledge of the inputs. ``maps_keys`` is False
    if linear maps of keys are not possible, for example because keys are normalised after projection; the
    default is then a principal merge of values only. ``maps_values`` is False if an output gate has a factor
    for each value channel, so that no rotation of values can be undone after the gate. ``moves_heads`` is
    False if heads may not be reordered, as with ALiBi slopes.

    Raises:
        ValueError: an option is unknown, a principal merge is requested for keys that cannot be mapped, or
            an alignment is requested before a principal merge, which finds every rotation itself, or a
            merge or an alignment would map values that cannot be mapped.
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
        merge = best if calibrated and align == "none" and maps_values else "mean"
    if merge == "principal" and not maps_keys:
        raise ValueError(
            'merge: "principal" maps keys, which needs a layer without norms of q and k and the same rotated '
            'channels in all loaders; use merge="principal-values", which averages the keys'
        )
    if not maps_values and (merge in PRINCIPAL or align != "none"):
        raise ValueError(
            f"merge: {merge!r} with align={align!r} rotates value channels, each of which has its own output "
            'gate; use "mean", "first", "energy" or "learned" without align'
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
