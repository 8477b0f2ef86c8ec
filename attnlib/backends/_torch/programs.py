"""Compute the gradients of a score function on a tile of scores."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...tracing.derivative import BY_RESULT, Derivative
from ...tracing.evaluation import index_at, run
from ...tracing.kinds import FLOAT, INT64
from ...tracing.program import Operand


def differentiated(
    by: Derivative,
    d: Tensor,
    hidden: Tensor | None,
    inputs: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    grads: Tensor,
) -> Tensor:
    """Return the gradient of a score function's input scores, given ``d``, the gradient of its results.

    ``by`` is the derivative of the score function. Hidden pairs get the gradient 0. The gradients of all
    captured floating-point tensors are added to ``grads``, one flat tensor.
    """
    firsts = [0, *accumulate(x.numel() if x.is_floating_point() else 0 for x in tensors)]
    operand = run(by.steps, {**inputs, BY_RESULT: d}, tensors, d.dtype)

    def visible(x: Operand) -> Tensor:
        whole = operand(x, FLOAT).broadcast_to(d.shape)
        # For hidden pairs, a score function may compute NaN.
        return whole if hidden is None else whole.masked_fill(hidden, 0)

    for tensor, indices, value in by.reads:
        n = int(tensor.name[1:])
        at = torch.full((1,) * d.dim(), firsts[n], device=d.device)
        for x, size, stride in zip(indices, tensors[n].shape, _contiguous_strides(tensors[n]), strict=True):
            at = at + index_at(x, size, operand, INT64) * stride
        value = visible(value).sum_to_size(at.shape)  # sum over pairs that read the same element
        grads.index_add_(0, at.flatten(), value.flatten())
    return visible(by.score)


def _contiguous_strides(x: Tensor) -> Sequence[int]:
    """Return the strides of a contiguous tensor with the shape of ``x``."""
    return torch.empty(x.shape, device="meta").stride()
