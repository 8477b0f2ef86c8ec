"""From many KV heads to fewer: regroup, align, merge.

Regrouping and aligning keep the function; merging is the only step that loses anything, and loses nothing where heads
that become one are equal, or equal up to an alignment.
"""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..calibration import Calibration, fitting
from ..weights import Heads
from .align import Align, check_align, similarity
from .align import align as align_heads
from .grouping import Groups, neighbours, similar

Merge = Literal["mean", "first", "energy", "learned"]
Grouping = Literal["neighbours", "similar"]


def arrange(
    heads: Heads, num_kv_heads: int, *, align: Align, grouping: Grouping, calibration: Calibration | None
) -> Heads:
    """The same function with heads in the order in which they will be merged, and turned towards each other.

    Raises: as :func:`mha_to_gqa`.
    """
    if grouping not in get_args(Grouping):
        raise ValueError(f"grouping: expected one of {get_args(Grouping)}, got {grouping!r}")
    check_align(align)
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    groups = neighbours(len(heads.k), num_kv_heads)
    if len(heads.k) == num_kv_heads:
        return heads
    if grouping == "similar":
        groups = similar(similarity(heads, calibration, align), num_kv_heads)
    return align_heads(regroup(heads, groups), num_kv_heads, calibration, align)


def regroup(heads: Heads, groups: Groups) -> Heads:
    """The same function with KV heads, and with them their query heads, columns of o and sinks, in another order."""
    order = torch.tensor([i for group in groups for i in group], device=heads.k.device)
    queries = (order[:, None] * heads.group + torch.arange(heads.group, device=order.device)).flatten()
    sinks = None if heads.sinks is None else heads.sinks[queries]
    moved = {"q": heads.q[queries], "o": heads.o[:, queries], "k": heads.k[order], "v": heads.v[order]}
    return replace(heads, **moved, sinks=sinks)


def shares(heads: Heads, num_kv_heads: int, *, merge: Merge, calibration: Calibration | None) -> tuple[Tensor, Tensor]:
    """What each head gives to its group's key and value: weights ``[g, f]`` each, which sum to 1 in a group.

    Raises:
        ValueError: an unknown merge.
    """
    if merge not in get_args(Merge):
        raise ValueError(f"merge: expected one of {get_args(Merge)}, got {merge!r}")
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)

    def share(rows: Tensor) -> Tensor:
        size = torch.ones(len(rows), dtype=rows.dtype, device=rows.device)
        if merge == "energy":
            size = calibration.energy(rows)
        size = size.unflatten(0, (num_kv_heads, -1)).clone()
        if merge == "first":
            size[:, 1:] = 0
        size[size.sum(1) == 0] = 1  # heads that are all zero may be weighted at will
        return size / size.sum(1, keepdim=True)

    return share(heads.k), share(heads.v)


def merge_heads(heads: Heads, key_mix: Tensor, value_mix: Tensor) -> Heads:
    """One KV head for each row of the mixes ``[g, f]``, from runs of f neighbours; queries and o stay."""
    k, v = (
        torch.einsum("gf,gfdm->gdm", mix, rows.unflatten(0, tuple(mix.shape)))
        for mix, rows in ((key_mix, heads.k), (value_mix, heads.v))
    )
    return replace(heads, k=k, v=v)
