"""What ranks send each other, with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# By their names since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gathered(torch.autograd.Function):
    """x of every rank, ``[ranks, ...]``; the gradient of a rank's own part is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size(), *x.shape))
        _all_gather(out.flatten(0, 1), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[1:])
        _reduce_scatter(own, grad.contiguous().flatten(0, 1), group=ctx.group)
        return own, None


class _Exchanged(torch.autograd.Function):
    """The ``r``-th part of each rank's x ``[ranks, ...]``, for rank ``r``; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchanged.apply(grad, ctx.group), None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every rank of a group, ``[ranks, ...]``."""
    return _Gathered.apply(x, group)


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From x ``[ranks, ...]``, whose ``r``-th part is for rank ``r``: what every rank has for this one."""
    return _Exchanged.apply(x, group)
