"""The torch backend's operators: forward, backward, cached attention and cache writes, with their fakes.

Lengths, offsets and page tables are read on the host.
"""

import torch
from torch import Tensor

from ..autograd import Operators, register_cached
from ..operators import Arguments, CachedArguments, fake_write, option_grads, outputs
from ..registration import Operator, register
from . import fused, pages, tiles
from .problems import part_of, spans
from .tiles import Part, Rule, rule_of


def _forward(*arguments):
    a = Arguments(*arguments)
    rule = rule_of(a)
    if (causal := _fused_whole(a, rule)) is not None:
        return fused.forward(a.q, a.k, a.v, causal, rule.scale)
    out, lse = outputs(a.q, a.v)
    if a.cu_seqlens_q is not None:
        _fill_nothing(out, lse)
    q4, k4, v4, out4, lse3 = _batched(a, a.q, a.k, a.v, out, lse)
    for span in spans(q4, k4, a):
        part, keys, values = part_of(q4, k4, v4, span, a)
        out_part, lse_part = out4[span.batch, span.rows], lse3[span.batch, :, span.rows]
        if (causal := fused.causality(part, rule, values)) is not None:
            _into((out_part, lse_part), fused.forward(part.q, keys, values, causal, rule.scale))
        else:
            tiles.forward(part, rule, out_part, lse_part)
    return out, lse


def _backward(dout, dlse, out, lse, *arguments):
    a = Arguments(*arguments)
    (q, k, v), rule = (a.q, a.k, a.v), rule_of(a)
    dout = dout.contiguous()  # autograd hands out expanded ones
    if dlse is None and (causal := _fused_whole(a, rule)) is not None:
        return *fused.backward(dout, q, k, v, out, lse, causal, rule.scale), lse.new_empty(0), lse.new_empty(0)
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    # Rows that saw nothing have lse = -inf; +inf makes every probability of theirs 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    delta = (out.to(lse.dtype) * dout).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    dslopes = lse.new_zeros(q.shape[0] if a.cu_seqlens_q is None else a.cu_seqlens_q.shape[0] - 1, q.shape[-2])
    q4, k4, v4, out4, dout4, lse3, delta3, dq4, dk4, dv4 = _batched(a, q, k, v, out, dout, lse, delta, dq, dk, dv)
    for span in spans(q4, k4, a):
        part, keys, values = part_of(q4, k4, v4, span, a)
        at, of_rows = (span.batch, span.rows), (span.batch, slice(None), span.rows)
        into = (dq4[at], dk4[span.batch, span.keys], dv4[span.batch, span.keys])
        causal = None if dlse is not None else fused.causality(part, rule, values)
        if causal is not None:
            tensors = (dout4[at], part.q, keys, values, out4[at], lse3[of_rows])
            grads = fused.backward(*tensors, causal, rule.scale)
            _into((into[0], *(grad[:, part.low :] for grad in into[1:])), grads)
        else:
            wide_k, wide_v = (torch.zeros(grad.shape, dtype=lse.dtype, device=q.device) for grad in into[1:])
            here = dslopes[span.sequence : span.sequence + part.q.shape[0]]
            tiles.backward(part, rule, dout4[at], lse3[of_rows], delta3[of_rows], into[0], wide_k, wide_v, here)
            into[1].copy_(wide_k)
            into[2].copy_(wide_v)
    return dq, dk, dv, *option_grads(a, dslopes, lse, delta)


def _fused_whole(a: Arguments, rule: Rule) -> bool | None:
    """The fused attention's ``is_causal`` if it solves a dense call in one piece, else None."""
    if any(x is not None for x in (a.alibi_slopes, a.sinks, a.key_starts, a.key_ends, a.cu_seqlens_q, a.origin)):
        return None
    s, t = a.q.shape[1], a.k.shape[1]
    return fused.causality(Part(a.q, None, a.mask, 0, t, a.k.shape[2], t - s), rule, a.v)


def _into(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _batched(a: Arguments, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors with a batch of one in front."""
    return tensors if a.cu_seqlens_q is None else tuple(x[None] for x in tensors)


def _fill_nothing(out: Tensor, lse: Tensor) -> None:
    """What a row that belongs to no sequence gets."""
    out.zero_()
    lse.fill_(-torch.inf)


def cached(*arguments):
    """Attention over a cache, and its LSE."""
    a = CachedArguments(*arguments)
    q, cu_q = a.q, None if a.cu_seqlens_q is None else a.cu_seqlens_q.tolist()
    stored = pages.Stored(a.k, a.value_plane, a.k_tail, a.k_scale, a.k_scale if a.v is None else a.v_scale, q.dtype)
    rule = rule_of(a)
    starts = [max(0, start) for start in a.starts.tolist()]
    batch = pages.Batch(a.table, starts, a.lengths.tolist(), cu_q, a.alibi_slopes, a.sinks, a.mask, a.origin)
    problems = list(pages.problems(q if cu_q is None else q[None], stored, batch))
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
            tiles.forward(problem.part, rule, *targets)
    return out, lse


def _solve_at_once(problem: pages.Problem, rule: Rule, stored: pages.Stored) -> tuple[Tensor, Tensor] | None:
    """The fused attention over keys that can be read at once; None where it is not exact."""
    if problem.whole is None or (causal := fused.causality(problem.part, rule, stored.v)) is None:
        return None
    return fused.forward(problem.part.q, *problem.whole(), causal, rule.scale)


def _write(k, v, new_k, new_v, slots):
    slots = slots.flatten()
    kept = None if slots.numel() == 0 or int(slots.min()) >= 0 else slots >= 0
    for plane, new in ((k, new_k), (v, new_v)):
        if plane is not None:
            pages.store(plane, new, slots, kept)


OPERATORS = Operators("torch", _forward, _backward)
WRITE = "torch_write(Tensor(a!) k, Tensor(b!)? v, Tensor new_k, Tensor? new_v, Tensor slots) -> ()"
_libraries = register_cached("torch", cached), register(Operator(WRITE, _write, fake_write))
