"""The torch backend's operators: forward, backward, cached attention and cache writes, with their fakes.

Lengths, offsets and page tables are read on the host.
"""

import torch
from torch import Tensor

from ..mask import Mask
from . import _fused, _paged, _tiles
from ._autograd import Operators, refuse_gradients
from ._flops import backward_flops, cached_flops, forward_flops
from ._schema import BACKWARD, FORWARD, NUMBERS, fake_backward, outputs, register, sinks_grad, slopes_grad
from ._spans import Extras, part_of, spans
from ._tiles import Part, Rule


def _forward(q, k, v, *extras):
    x = Extras(*extras)
    rule = x.rule()
    if (causal := _fused_whole(q, k, v, x, rule, needs=(v,))) is not None:
        return _fused.forward(q, k, v, causal, rule.scale)
    out, lse = outputs(q, v)
    if x.cu_q is not None:
        _fill_nothing(out, lse)
    q4, k4, v4, out4, lse3 = _batched(x, q, k, v, out, lse)
    for span in spans(q4, k4, x):
        part, keys, values = part_of(q4, k4, v4, span, x)
        out_part, lse_part = out4[span.batch, span.rows], lse3[span.batch, :, span.rows]
        causal = _fused.causality(part, rule, values)
        if causal is not None and _fused.all_finite(causal, values):
            _into((out_part, lse_part), _fused.forward(part.q, keys, values, causal, rule.scale))
        else:
            _tiles.forward(part, rule, out_part, lse_part)
    return out, lse


def _backward(dout, dlse, out, lse, q, k, v, *extras):
    x = Extras(*extras)
    rule = x.rule()
    dout = dout.contiguous()  # autograd hands out expanded ones
    causal = _fused_whole(q, k, v, x, rule, needs=(q, k, v, dout)) if dlse is None else None
    if causal is not None:
        return *_fused.backward(dout, q, k, v, out, lse, causal, rule.scale), lse.new_empty(0), lse.new_empty(0)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # Rows that saw nothing have lse = -inf; +inf makes every probability of theirs 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    delta = (out.to(lse.dtype) * dout).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    dslopes = lse.new_zeros(q.shape[0] if x.cu_q is None else x.cu_q.shape[0] - 1, q.shape[-2])
    q4, k4, v4, out4, dout4, lse3, delta3, dq4, dk4, dv4 = _batched(x, q, k, v, out, dout, lse, delta, dq, dk, dv)
    for span in spans(q4, k4, x):
        part, keys, values = part_of(q4, k4, v4, span, x)
        at, of_rows = (span.batch, span.rows), (span.batch, slice(None), span.rows)
        into = (dq4[at], dk4[span.batch, span.keys], dv4[span.batch, span.keys])
        causal = None if dlse is not None else _fused.causality(part, rule, values)
        if causal is not None and _fused.all_finite(causal, part.q, keys, values, dout4[at]):
            tensors = (dout4[at], part.q, keys, values, out4[at], lse3[of_rows])
            grads = _fused.backward(*tensors, causal, rule.scale)
            _into((into[0], *(grad[:, part.low :] for grad in into[1:])), grads)
        else:
            wide_k, wide_v = (torch.zeros(grad.shape, dtype=lse.dtype, device=q.device) for grad in into[1:])
            here = dslopes[span.sequence : span.sequence + part.q.shape[0]]
            _tiles.backward(part, rule, dout4[at], lse3[of_rows], delta3[of_rows], into[0], wide_k, wide_v, here)
            into[1].copy_(wide_k)
            into[2].copy_(wide_v)
    return dq, dk, dv, slopes_grad(x.slopes, dslopes), sinks_grad(x.sinks, lse, delta)


def _fused_whole(q: Tensor, k: Tensor, v: Tensor, x: Extras, rule: Rule, *, needs: tuple[Tensor, ...]) -> bool | None:
    """The fused attention's ``is_causal`` if it solves a dense call in one piece, else None."""
    if any(t is not None for t in (x.slopes, x.sinks, x.starts, x.ends, x.cu_q)):
        return None
    s, t = q.shape[1], k.shape[1]
    causal = _fused.causality(Part(q, None, 0, t, k.shape[2], t - s), rule, v)
    return causal if causal is not None and _fused.all_finite(causal, *needs) else None


def _into(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _batched(x: Extras, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors with a batch of one in front."""
    return tensors if x.cu_q is None else tuple(t[None] for t in tensors)


def _fill_nothing(out: Tensor, lse: Tensor) -> None:
    """What a row that belongs to no sequence gets."""
    out.zero_()
    lse.fill_(-torch.inf)


def _fake_forward(q, k, v, *extras):
    return outputs(q, v)


def cached(
    q, k, v, k_tail, k_scale, v_scale, table, starts, lengths, cu_q, slopes, sinks, left, right, prefix, *numbers
):
    stored = _paged.Stored(k, k if v is None else v, k_tail, k_scale, k_scale if v is None else v_scale, q.dtype)
    rule = Rule(Mask(left, right, prefix), *numbers, 0.0, 0)
    batch = _paged.Batch(
        table, starts.clamp(min=0).tolist(), lengths.tolist(), None if cu_q is None else cu_q.tolist(), slopes, sinks
    )
    problems = list(_paged.problems(q if cu_q is None else q[None], stored, batch))
    if cu_q is None and len(problems) == 1 and (solved := _solve_at_once(problems[0], rule, stored)) is not None:
        return solved
    out, lse = outputs(q, stored.v)
    if cu_q is not None:
        _fill_nothing(out, lse)
    out4, lse3 = (out, lse) if cu_q is None else (out[None], lse[None])
    for problem in problems:
        targets = (out4[problem.at, problem.rows], lse3[problem.at, :, problem.rows])
        if (solved := _solve_at_once(problem, rule, stored)) is not None:
            _into(targets, solved)
        else:
            _tiles.forward(problem.part, rule, *targets)
    return out, lse


def _solve_at_once(problem: _paged.Problem, rule: Rule, stored: _paged.Stored) -> tuple[Tensor, Tensor] | None:
    """The fused attention over keys that can be read at once; None where it is not exact."""
    if problem.whole is None or (causal := _fused.causality(problem.part, rule, stored.v)) is None:
        return None
    k, v = problem.whole()
    if not _fused.all_finite(causal, v):
        return None
    return _fused.forward(problem.part.q, k, v, causal, rule.scale)


def _fake_cached(q, k, v, *rest):
    return outputs(q, k if v is None else v)


def _write(k, v, new_k, new_v, slots):
    slots = slots.flatten()
    kept = None if slots.numel() == 0 or int(slots.min()) >= 0 else slots >= 0
    for plane, new in ((k, new_k), (v, new_v)):
        if plane is not None:
            _paged.store(plane, new, slots, kept)


def _fake_write(k, v, new_k, new_v, slots):
    return None


OPERATORS = Operators("torch", _forward)
_library = register(
    (
        (f"torch_forward{FORWARD}", _forward, _fake_forward, forward_flops),
        (f"torch_backward{BACKWARD}", _backward, fake_backward, backward_flops),
        (
            "torch_cached(Tensor q, Tensor k, Tensor? v, Tensor? k_tail, Tensor? k_scale, Tensor? v_scale, "
            "Tensor table, Tensor starts, Tensor lengths, Tensor? cu_seqlens_q, Tensor? alibi_slopes, Tensor? sinks, "
            f"{NUMBERS}) -> (Tensor, Tensor)",
            cached,
            _fake_cached,
            cached_flops,
        ),
        (
            "torch_write(Tensor(a!) k, Tensor(b!)? v, Tensor new_k, Tensor? new_v, Tensor slots) -> ()",
            _write,
            _fake_write,
            None,
        ),
    )
)
if _library is not None:
    OPERATORS.register(_library)
    refuse_gradients("torch_cached", _library)
