"""torch's fused CPU attention, and when it is exact."""

import torch
from torch import Tensor

from ...watched import KNOWN
from .batches import Batch, rows, unrows

# torch keeps these to itself; of another torch nobody knows what they compute.
FORWARD = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
IS_KNOWN = ".".join(torch.__version__.split(".")[:2]) in KNOWN and None not in (FORWARD, BACKWARD)


def causality(batch: Batch) -> bool | None:
    """The ``is_causal`` with which torch's fused CPU attention solves a batch; None if it cannot."""
    q, keys, mask, first = batch.q, batch.keys, batch.mask, batch.first
    s, t = q.shape[1], keys.stop - keys.start
    # Over fewer keys than a vector holds (16 with AVX-512), torch turns the row of a NaN query into zeros (#141128).
    if not IS_KNOWN or q.device.type != "cpu" or q.numel() == 0 or t < 16:
        return None
    if batch.score.options or batch.dropout.p or batch.score_factor is not None or batch.functions is not None:
        return None
    if q.shape[-1] != keys.v.shape[-1] or not keys.at_once:
        return None
    if mask.covers(first, first + s, keys.start, keys.stop):
        return False
    return True if first == keys.start and s == t and mask.is_causal_among(first, first + s) else None


def forward(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
    """The output ``[b, s, h, d]`` and the LSE ``[b, h, s]``, contiguous."""
    k, v = _read(batch)
    b, s, h, _ = batch.q.shape
    out, lse = FORWARD(rows(batch.q, h if causal else k.shape[1]), k, v, 0.0, causal, scale=batch.score.scale)
    return unrows(out, batch.q.shape).contiguous(), lse.reshape(b, h, s).contiguous()


def backward(batch: Batch, causal: bool, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of the batch's keys, contiguous, from tensors ``[b, s, h, d]`` and the LSE ``[b, h, s]``."""
    q, (k, v) = batch.q, _read(batch)
    # Without a causal order a group's queries share one pass over its keys.
    g = q.shape[2] if causal else k.shape[1]
    solved = (rows(out, g), lse.reshape(q.shape[0], g, -1))
    dq, dk, dv = BACKWARD(rows(dout, g), rows(q, g), k, v, *solved, 0.0, causal, scale=batch.score.scale)
    return unrows(dq, q.shape).contiguous(), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


def _read(batch: Batch) -> tuple[Tensor, Tensor]:
    """All keys and values, ``[b, g, t, d]``."""
    return batch.keys.read(slice(0, batch.q.shape[0]), batch.keys.start, batch.keys.stop)
