"""torch's fused CPU attention, and the conditions under which it is exact."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...internal import probes
from ...internal.probes import answer, failure_of
from ...internal.watched import refuse_trials
from .batches import Batch, rows, unrows

FUSED = "torch's fused CPU attention"


class _Fused(NamedTuple):
    """torch's private functions for fused CPU attention, or None if they failed their trial."""

    forward: Callable | None
    backward: Callable | None
    failures: tuple[str, ...] = ()


def failures() -> list[str]:
    """Return the reason why torch's fused attention is not used; an empty list if it is used.

    Raises:
        NotNow: the trial cannot run now.
    """
    return probes.failures(FUSED, _find)


def _find() -> _Fused:
    refuse_trials()
    if why := failure_of(lambda: _try(_look_up())):
        cost = "attention on CPUs is computed tile by tile, which is correct but slower"
        return _Fused(None, None, (f"{FUSED}: {why}; {cost}",))
    return _look_up()


def _look_up() -> _Fused:
    aten = torch.ops.aten
    return _Fused(
        torch._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def causality(batch: Batch) -> bool | None:
    """Return the ``is_causal`` to pass to torch's fused attention; None if it cannot compute this batch."""
    q, keys, mask, first = batch.q, batch.keys, batch.mask, batch.first
    s, t = q.shape[1], keys.stop - keys.start
    # With fewer keys than a vector register holds (16 with AVX-512), torch returns zeros if a query is NaN
    # (pytorch#141128).
    if q.device.type != "cpu" or q.numel() == 0 or t < 16:
        return None
    if (
        batch.score.options
        or batch.dropout.p
        or batch.score_factor is not None
        or batch.functions is not None
        or q.shape[-1] != keys.v.shape[-1]
        or not keys.at_once
    ):
        return None
    if mask.covers(first, first + s, keys.start, keys.stop):
        causal = False
    elif first == keys.start and s == t and mask.is_causal_among(first, first + s):
        causal = True
    else:
        return None
    fused = answer(FUSED, _find)
    return None if fused is None or fused.forward is None else causal


def forward(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output ``[b, s, h, d]`` and the LSE ``[b, h, s]``, contiguous."""
    k, v = _read(batch)
    b, s, h, _ = batch.q.shape
    out, lse = answer(FUSED, _find).forward(
        rows(batch.q, h if causal else k.shape[1]), k, v, 0.0, causal, scale=batch.score.scale
    )
    return unrows(out, batch.q.shape).contiguous(), lse.reshape(b, h, s).contiguous()


def backward(
    batch: Batch, causal: bool, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a batch, contiguous.

    ``dout`` and ``out`` are ``[b, s, h, d]``, and the LSE is ``[b, h, s]``.
    """
    q, (k, v) = batch.q, _read(batch)
    # Without a causal mask, the query heads of a group share one pass over its keys.
    g = q.shape[2] if causal else k.shape[1]
    solved = (rows(out, g), lse.reshape(q.shape[0], g, -1))
    dq, dk, dv = answer(FUSED, _find).backward(
        rows(dout, g), rows(q, g), k, v, *solved, 0.0, causal, scale=batch.score.scale
    )
    return unrows(dq, q.shape).contiguous(), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


def _read(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return all keys and values of the batch, ``[b, g, t, d]``."""
    return batch.keys.read(slice(0, batch.q.shape[0]), batch.keys.start, batch.keys.stop)


def _try(fused: _Fused) -> None:
    """Compare torch's fused attention with the formula, causal and not, and check that a NaN query stays NaN.

    In fp32, its error may be up to three times as large as that of the formula. Both errors are measured
    against fp64.

    Raises:
        RuntimeError: a result differs.
    """
    for causal in (False, True):
        wide = [_numbers(n) for n in range(4)]
        q, k, v, dout = (x.float() for x in wide)
        out, lse = fused.forward(q, k, v, 0.0, causal, scale=0.5)
        found = out, lse, *fused.backward(dout, q, k, v, out, lse, 0.0, causal, scale=0.5)
        for x, exact, near in zip(
            found, _by_formula(causal, *wide), _by_formula(causal, q, k, v, dout), strict=True
        ):
            _compare(x, exact, near)
        q[..., 3, :] = torch.nan
        out, lse = fused.forward(q, k, v, 0.0, causal, scale=0.5)
        if (
            not (out[..., 3, :].isnan().all() and lse[..., 3].isnan().all())
            or out.isnan().sum() != out[..., 3, :].numel()
        ):
            raise RuntimeError("a NaN query must make its own row NaN, and no other row")


def _numbers(n: int) -> Tensor:
    """Return test numbers ``[1, 2, 19, 8]`` (sequences, heads, tokens, channels) that are not random."""
    return torch.arange(2 * 19 * 8, dtype=torch.float64, device="cpu").mul(0.7 + n).sin().view(1, 2, 19, 8)


def _by_formula(causal: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the output, the LSE and the gradients of q, k and v, computed from the formula."""
    scores = 0.5 * q @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    out = p @ v
    dscores = 0.5 * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return [out, lse[..., 0], dscores @ k, dscores.mT @ q, p.mT @ dout]


def _compare(x: Tensor, exact: Tensor, near: Tensor) -> None:
    ulp = torch.finfo(torch.float32).eps * exact.abs().max().item()
    allowed = 3 * (near - exact).abs().max().item() + ulp
    if x.shape != exact.shape or not (x - exact).abs().max().item() <= allowed:
        raise RuntimeError(f"a result of shape {list(exact.shape)} differs from the formula")
