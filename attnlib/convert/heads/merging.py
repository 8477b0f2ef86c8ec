"""Merging of KV heads into fewer: regroup, align, merge.

Regrouping and aligning do not change the layer's output; only merging can. A merge is exact if the heads of
each group are equal, or become equal by a linear map that the merge or the alignment finds.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..calibration import Calibration, fitting
from ..weights import Heads
from .align import align, similarity
from .grouping import Groups, neighbours, similar
from .principal import Merged, group_by_loss, merge_principal
from .recipe import PRINCIPAL, Merge, MergeRecipe


def arrange(heads: Heads, num_kv_heads: int, recipe: MergeRecipe, calibration: Calibration | None) -> Heads:
    """Reorder the heads by group and align them, without changing the layer's output.

    Raises:
        ValueError: ``num_kv_heads`` does not divide the KV-head count, or the norm weights do not commute
            with the alignment (:func:`check_norm_weights`).
    """
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    groups = neighbours(len(heads.k), num_kv_heads)
    if len(heads.k) == num_kv_heads:
        return heads
    if recipe.grouping == "similar" and recipe.merge in PRINCIPAL:
        groups = group_by_loss(heads, num_kv_heads, calibration, keys=recipe.merge == "principal")
    elif recipe.grouping == "similar":
        groups = similar(similarity(heads, calibration, recipe.align), num_kv_heads)
    return align(regroup(heads, groups), num_kv_heads, calibration, recipe.align)


def regroup(heads: Heads, groups: Groups) -> Heads:
    """Reorder KV heads with their query heads, o columns, sinks and gates; the output does not change."""
    order = torch.tensor([i for group in groups for i in group], device=heads.k.device)
    queries = (order[:, None] * heads.group + torch.arange(heads.group, device=order.device)).flatten()
    sinks = None if heads.sinks is None else heads.sinks[queries]
    gates = None if heads.gates is None else heads.gates[queries]
    gains = None if heads.gains is None else (heads.gains[0][queries], heads.gains[1][order])
    return replace(
        heads,
        q=heads.q[queries],
        o=heads.o[:, queries],
        k=heads.k[order],
        v=heads.v[order],
        sinks=sinks,
        gains=gains,
        gates=gates,
    )


def merge_heads(
    heads: Heads, num_kv_heads: int, recipe: MergeRecipe, calibration: Calibration | None
) -> Merged:
    """Merge runs of neighbouring heads into ``num_kv_heads`` KV heads, by the method in ``recipe``.

    Principal merges also fold their linear maps into q and o.
    """
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    principal = partial(merge_principal, heads, num_kv_heads, calibration, reach=recipe.reach)
    if recipe.merge == "principal":
        return principal(keys=True)
    key_mix, value_mix = shares(heads, num_kv_heads, recipe.merge, calibration)
    k = _mixed(heads.k, key_mix)
    gains = heads.gains and (heads.gains[0], _mixed(heads.gains[1][..., None], key_mix)[..., 0])
    if recipe.merge == "principal-values":
        merged = principal(keys=False)
        return replace(merged, heads=replace(merged.heads, k=k, gains=gains))
    return Merged(replace(heads, k=k, v=_mixed(heads.v, value_mix), gains=gains), recipe.reach)


def shares(heads: Heads, num_kv_heads: int, merge: Merge, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return the weights of old heads in the merged keys and in the merged values.

    Both results are ``[g, f]``, for f old heads in each of g groups; each row sums to 1.
    """

    def share(rows: Tensor) -> Tensor:
        size = torch.ones(len(rows), dtype=rows.dtype, device=rows.device)
        if merge == "energy":
            size = calibration.energy(rows)
        size = size.unflatten(0, (num_kv_heads, -1)).clone()
        if merge == "first":
            size[:, 1:] = 0
        size[size.sum(1) == 0] = 1  # if all heads of a group are zero, weight them equally
        return size / size.sum(1, keepdim=True)

    return share(heads.k), share(heads.v)


def _mixed(rows: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("gf,gfdm->gdm", mix, rows.unflatten(0, tuple(mix.shape)))
