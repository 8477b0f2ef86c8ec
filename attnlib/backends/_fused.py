"""torch's fused CPU attention, and when it is exact."""

import math

import torch
from torch import Tensor

from ._tiles import Part, Rule


def causality(part: Part, rule: Rule, v: Tensor) -> bool | None:
    """The ``is_causal`` with which torch's fused CPU attention solves ``part``; None if it cannot."""
    q, (s, first, low, high) = part.q, (part.q.shape[1], part.first, part.low, part.high)
    plain = rule.softcap is None and rule.dropout_p == 0 and part.slopes is None and part.sinks is None
    if not plain or q.device.type != "cpu" or q.shape[-1] != v.shape[-1] or q.numel() == 0 or low == high:
        return None
    mask = rule.mask
    if mask.covers(first, first + s, low, high):
        return False
    square = first == low and s == high - low and mask.right == 0 and mask.prefix <= low + 1
    return True if square and (mask.left is None or mask.left >= s - 1) else None


def all_finite(causal: bool, *tensors: Tensor) -> bool:
    """Whether the fused attention may multiply what a causal mask hides by zero. (An overflowing sum only costs time.)"""
    return not causal or all(math.isfinite(x.sum().item()) for x in tensors)


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output ``[b, s, h, d]`` and the LSE ``[b, h, s]``, contiguous."""
    solve = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = solve(*_heads_first(q, k, v), 0.0, causal, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(tensors: tuple[Tensor, ...], lse: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, from dout, q, k, v and out ``[b, s, h, d]``."""
    solve = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = solve(*_heads_first(*tensors), lse, 0.0, causal, scale=scale)
    return tuple(grad.transpose(1, 2).contiguous() for grad in grads)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]
