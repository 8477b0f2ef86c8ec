"""torch's fused attention, for CPUs and for GPUs, and the conditions under which it is exact."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.cache import Run
from ...call.spec import arch_of
from ...internal import probes
from ...internal.probes import answer, failure_of
from ...internal.watched import refuse_trials
from ...masks.band import Mask
from . import efficient
from .batches import Batch, rows, unrows

FUSED = "torch's fused CPU attention"
TOKENS = 19  # of a trial
GPU = TRIED_ON = "cuda"  # the kind of device that has memory-efficient attention, and that of its trial


class _Fused(NamedTuple):
    """torch's private functions for fused attention, or None if they failed their trial."""

    forward: Callable | None
    backward: Callable | None
    failures: tuple[str, ...] = ()


def failures(device: str = "cpu", dtype: torch.dtype = torch.float32, arch: int = 0) -> list[str]:
    """Return the reason why torch's fused attention is not used; an empty list if it is used.

    Raises:
        NotNow: the trial cannot run now.
    """
    return probes.failures(*_trial(device, dtype, arch))


def device_of(x: Tensor) -> str:
    """Return the kind of device that holds a tensor, such as "cuda"."""
    return x.device.type


def _trial(device: str, dtype: torch.dtype, arch: int) -> tuple[str, Callable[[], _Fused]]:
    """Return the name of a trial, and the trial: on GPUs, torch has kernels by dtype and architecture."""
    if device == "cpu":
        return FUSED, _find
    return f"{efficient.EFFICIENT}, {dtype} on sm_{arch}", partial(_find_efficient, dtype, arch)


def _functions(x: Tensor) -> _Fused | None:
    """Return torch's functions for tensors like ``x``; None if they have not been tried and cannot be now."""
    return answer(*_trial(device_of(x), x.dtype, arch_of(x.device)))


def _find() -> _Fused:
    refuse_trials()
    if why := failure_of(lambda: _try(_look_up())):
        cost = "attention on CPUs is computed tile by tile, which is correct but slower"
        return _Fused(None, None, (f"{FUSED}: {why}; {cost}",))
    return _look_up()


def _find_efficient(dtype: torch.dtype, arch: int) -> _Fused:
    refuse_trials()
    found = _Fused(efficient.forward, efficient.backward)
    if why := failure_of(lambda: _compare_all(found, dtype, TRIED_ON, queries=11)):
        cost = "calls that attnlib's kernels do not support are computed tile by tile, which is slower"
        return _Fused(None, None, (f"{efficient.EFFICIENT}: {why}; {cost}",))
    return found


def _look_up() -> _Fused:
    aten = torch.ops.aten
    return _Fused(
        torch._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )


def causality(batch: Batch) -> bool | None:
    """Return the ``is_causal`` to pass to torch's fused attention; None if it cannot compute this batch."""
    keys = batch.keys
    if (
        batch.score.options
        or batch.dropout.p
        or batch.score_factor is not None
        or batch.functions is not None
        or batch.selection is not None
        or not keys.at_once
    ):
        return None
    return causality_of(batch.q, keys.v.shape[-1], batch.mask, batch.first, keys.start, keys.stop)


def causality_of(q: Tensor, value_dim: int, mask: Mask, first: int, start: int, stop: int) -> bool | None:
    """Return what :func:`causality` does, for queries from ``first`` on and the keys ``[start, stop)``.

    Nothing but the mask and the scale changes the scores.
    """
    s, t, device, widths = q.shape[1], stop - start, device_of(q), (q.shape[-1], value_dim)
    # With fewer keys than a vector register holds (16 with AVX-512), torch returns zeros if a query is NaN
    # (pytorch#141128).
    takes = t >= 16 and widths[0] == widths[1]
    if device != "cpu":
        takes = device == GPU and t > 0 and efficient.takes(q.dtype, *widths)
    if not takes or q.numel() == 0:
        return None
    last = first + s
    if mask.covers(first, last, start, stop):
        causal = False
    # On CPUs, torch aligns the first query with the first key; on GPUs, the last with the last.
    elif last == stop and (s == t or (s < t and device == GPU)) and mask.is_causal_among(start, last):
        causal = True
    else:
        return None
    fused = _functions(q)
    return None if fused is None or fused.forward is None else causal


def forward(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output ``[b, s, h, e]`` and the LSE ``[b, h, s]``, contiguous."""
    out, lse = _forward(_functions(batch.q), causal, batch.score.scale, batch.q, *_read(batch))
    return out, lse.contiguous()


def forward_at_end(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor] | None:
    """Return what :func:`forward` does, for the last queries of keys ``[b, g, t, d]``, or None."""
    t = k.shape[2]
    if (causal := causality_of(q, v.shape[-1], mask, t - q.shape[1], 0, t)) is None:
        return None
    out, lse = _forward(_functions(q), causal, scale, q, k, v)
    return out, lse.contiguous()


def backward(
    batch: Batch, causal: bool, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of a batch, contiguous.

    ``dout`` and ``out`` are ``[b, s, h, e]``, and the LSE is ``[b, h, s]``.
    """
    solved = dout, out, lse
    return _backward(_functions(batch.q), causal, batch.score.scale, *solved, batch.q, *_read(batch))


def replay(
    q: Tensor, causal: bool, scale: float, *, lse: bool
) -> tuple[Run, Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Return functions that repeat the forward and the backward of a dense call on tensors like ``q``.

    The backward takes dout, the output, the LSE, q, k and v. Unless ``lse`` is set, only it reads the LSE.
    """
    given = _functions(q), causal, scale

    def on(q: Tensor, k: Tensor, v: Tensor, descales: None = None) -> tuple[Tensor, Tensor]:
        out, found = _forward(*given, q, k.transpose(1, 2), v.transpose(1, 2))
        return out, found.contiguous() if lse else found  # to copy it takes 10 us for 128 tokens, 8 heads

    def gradients(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple:
        return _backward(*given, dout, out, lse, q, k.transpose(1, 2), v.transpose(1, 2))

    return on, gradients


def _forward(fused: _Fused, causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple:
    b, s, h, _ = q.shape
    out, lse = fused.forward(rows(q, h if causal else k.shape[1]), k, v, 0.0, causal, scale=scale)
    if out.shape[1:3] == (h, s):
        return out.transpose(1, 2).contiguous(), lse
    return unrows(out, (b, s, h, v.shape[-1])).contiguous(), lse.reshape(b, h, s)


def _backward(
    fused: _Fused,
    causal: bool,
    scale: float,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    # Hooks may return saved tensors with other strides, and torch assumes contiguous channels.
    dout, out, q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out, q, k, v))
    # Without a causal mask, the query heads of a group share one pass over its keys.
    g = q.shape[2] if causal else k.shape[1]
    solved = rows(out, g), lse.reshape(q.shape[0], g, -1)
    dq, dk, dv = fused.backward(rows(dout, g), rows(q, g), k, v, *solved, 0.0, causal, scale=scale)
    return unrows(dq, q.shape).contiguous(), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


def _read(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return all keys and values of the batch, ``[b, g, t, d]``."""
    return batch.keys.read(slice(0, batch.q.shape[0]), batch.keys.start, batch.keys.stop)


def _try(fused: _Fused) -> None:
    """Compare torch's fused attention with the formula, causal and not, and check that a NaN query stays NaN.

    Raises:
        RuntimeError: a result differs.
    """
    _compare_all(fused, torch.float32, "cpu", queries=TOKENS)
    for causal in (False, True):
        q, k, v = (_numbers(n).float() for n in range(3))
        q[..., 3, :] = torch.nan
        out, lse = fused.forward(q, k, v, 0.0, causal, scale=0.5)
        if (
            not (out[..., 3, :].isnan().all() and lse[..., 3].isnan().all())
            or out.isnan().sum() != out[..., 3, :].numel()
        ):
            raise RuntimeError("a NaN query must make its own row NaN, and no other row")


def _compare_all(fused: _Fused, dtype: torch.dtype, device: str, *, queries: int) -> None:
    """Compare torch's fused attention with the formula, causal and not.

    Its error may be up to three times as large as that of the formula. Both errors are measured against fp64.

    Raises:
        RuntimeError: a result differs.
    """
    for causal in (False, True):
        wide = [_numbers(n).to(dtype).double().to(device) for n in range(4)]
        wide = [x[..., :queries, :] if n in (0, 3) else x for n, x in enumerate(wide)]
        q, k, v, dout = (x.to(dtype) for x in wide)
        out, lse = fused.forward(q, k, v, 0.0, causal, scale=0.5)
        found = out, lse, *fused.backward(dout, q, k, v, out, lse, 0.0, causal, scale=0.5)
        for x, exact, near in zip(
            found, _by_formula(causal, *wide), _by_formula(causal, q, k, v, dout), strict=True
        ):
            _compare(x, exact, near)


def _numbers(n: int) -> Tensor:
    """Return test numbers ``[1, 2, 19, 8]`` (sequences, heads, tokens, channels) that are not random."""
    count = torch.arange(2 * TOKENS * 8, dtype=torch.float64, device="cpu")
    return count.mul(0.7 + n).sin().view(1, 2, TOKENS, 8)


def _by_formula(causal: bool, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the output, the LSE and the gradients of q, k and v, computed from the formula."""
    scores = 0.5 * q @ k.mT
    if causal:
        scores = scores.masked_fill(_hidden(scores), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    out = p @ v
    dscores = 0.5 * p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return [out, lse[..., 0], dscores @ k, dscores.mT @ q, p.mT @ dout]


def _hidden(scores: Tensor) -> Tensor:
    """Return True for the pairs that a causal mask hides; the last query sees the last key."""
    s, t = scores.shape[-2:]
    return torch.ones_like(scores, dtype=torch.bool).triu(1 + t - s)


def _compare(x: Tensor, exact: Tensor, near: Tensor) -> None:
    ulp = torch.finfo(near.dtype).eps * exact.abs().max().item()
    allowed = 3 * (near - exact).abs().max().item() + ulp
    if x.shape != exact.shape or not (x - exact).abs().max().item() <= allowed:
        raise RuntimeError(f"a result of shape {list(exact.shape)} differs from the formula")
