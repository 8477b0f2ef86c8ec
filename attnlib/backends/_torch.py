"""The torch backend: torch's fused CPU attention where that is exact, else tiles; operators and autograd.

No T x T tensor and no copy of K or V is ever made. Lengths and offsets are read on the host.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cache.layout import KVView
from ..mask import Mask
from ..spec import AttentionSpec
from ..terms import Terms
from . import _fused, _paged, _tiles
from ._tiles import Part, Rule

_NUMBERS = "SymInt? left, SymInt? right, SymInt prefix, float scale, float? softcap"
_EXTRAS = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? key_starts, Tensor? key_ends, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? dropout_seed"
)
_LIMITS = "float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k"

_library = torch.library.Library("attnlib", "FRAGMENT")
_library.define(f"torch_forward(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_NUMBERS}, {_LIMITS}) -> (Tensor, Tensor)")
_library.define(
    f"torch_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {_EXTRAS}, "
    f"{_NUMBERS}, {_LIMITS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "torch_cached(Tensor q, Tensor k, Tensor? v, Tensor? k_tail, Tensor? k_scale, Tensor? v_scale, Tensor table, "
    f"Tensor starts, Tensor lengths, Tensor? cu_seqlens_q, Tensor? alibi_slopes, Tensor? sinks, {_NUMBERS}) "
    "-> (Tensor, Tensor)"
)
_library.define("torch_write(Tensor(a!) k, Tensor(b!)? v, Tensor new_k, Tensor? new_v, Tensor slots) -> ()")


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    if spec.kind == "cached" and spec.grad:
        return ["cached attention has no backward; wrap the call in torch.no_grad()"]
    return []


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V, or wait for the device."""
    reasons = [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]
    if spec.device not in ("cpu", "meta"):
        reasons.append("runs tile by tile from Python")
    if spec.device not in ("cpu", "meta") and (spec.kind != "dense" or spec.bounds or spec.dropout):
        reasons.append("waits for the device to read lengths on the host")
    return reasons


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE, with gradients."""
    q, k, v = (x.contiguous() if name in spec.strided else x for name, x in (("q", q), ("k", k), ("v", v)))
    extras = terms[2:9]
    numbers = (*_band(spec.mask), terms.scale, terms.softcap, *terms[9:])
    if spec.grad:
        return _Attention.apply(q, k, v, *extras, numbers)
    return torch.ops.attnlib.torch_forward(q, k, v, *extras, *numbers)


def _band(mask: Mask) -> tuple[int | None, int | None, int]:
    return mask.left, mask.right, mask.prefix


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE, gathering at most 512 tokens at a time."""
    q = q.contiguous() if "q" in spec.strided else q
    # One tensor may be passed to an operator once: a latent's value plane and scale are its key's.
    v, v_scale = (None, None) if kv.layout.is_latent else (kv.v, kv.v_scale)
    planes = (kv.k, v, kv.k_tail, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q)
    numbers = (*_band(spec.mask), terms.scale, terms.softcap)
    return torch.ops.attnlib.torch_cached(q, *planes, terms.alibi_slopes, terms.sinks, *numbers)


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
    """Store tokens in the planes in place, quantised if the layout says so; slot -1 is skipped."""
    latent, store = kv.layout.is_latent, kv.layout.store
    if store is not None:
        k, k_scale = _paged.quantise(k, store)
        v_scale = None
        if not latent:
            v, v_scale = _paged.quantise(v, store)
        torch.ops.attnlib.torch_write(kv.k_scale, None if latent else kv.v_scale, k_scale, v_scale, slots)
    torch.ops.attnlib.torch_write(kv.k, kv.k_tail if latent else kv.v, k, v, slots)


class _Attention(torch.autograd.Function):
    """Forward and backward operators as one differentiable step; the LSE is differentiable too."""

    @staticmethod
    def forward(ctx, q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed, numbers):
        tensors = (q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed)
        out, lse = torch.ops.attnlib.torch_forward(*tensors, *numbers)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dslopes, dsinks = torch.ops.attnlib.torch_backward(dout, dlse, out, lse, *tensors, *ctx.numbers)
        slopes, sinks = tensors[3:5]
        return (
            dq,
            dk,
            dv,
            None if slopes is None else dslopes,
            None if sinks is None else dsinks,
            *(None,) * 6,
        )


class _Extras(NamedTuple):
    """The operators' optional tensors and numbers, in schema order."""

    slopes: Tensor | None
    sinks: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    seed: Tensor | None
    left: int | None
    right: int | None
    prefix: int
    scale: float
    softcap: float | None
    dropout_p: float
    max_q: int | None
    max_k: int | None

    def rule(self) -> Rule:
        seed = 0 if self.seed is None else int(self.seed)
        return Rule(Mask(self.left, self.right, self.prefix), self.scale, self.softcap, self.dropout_p, seed)


class _Span(NamedTuple):
    """One attention problem: its batch entries, rows and keys; keys before ``low`` are hidden, row 0 is ``first``."""

    batch: slice
    sequence: int
    rows: slice
    keys: slice
    low: int
    first: int


def _forward(q, k, v, *extras):
    x = _Extras(*extras)
    rule = x.rule()
    if (causal := _fused_whole(q, k, v, x, rule, needs=(v,))) is not None:
        return _fused.forward(q, k, v, causal, rule.scale)
    out, lse = _outputs(q, v)
    if x.cu_q is not None:
        _fill_nothing(out, lse)
    q4, k4, v4, out4, lse3 = _batched(x, q, k, v, out, lse)
    for span in _spans(q4, k4, x):
        part, keys, values = _part(q4, k4, v4, span, x)
        out_part, lse_part = out4[span.batch, span.rows], lse3[span.batch, :, span.rows]
        causal = _fused.causality(part, rule, values)
        if causal is not None and _fused.all_finite(causal, values):
            _into((out_part, lse_part), _fused.forward(part.q, keys, values, causal, rule.scale))
        else:
            _tiles.forward(part, rule, out_part, lse_part)
    return out, lse


def _backward(dout, dlse, out, lse, q, k, v, *extras):
    x = _Extras(*extras)
    rule = x.rule()
    causal = _fused_whole(q, k, v, x, rule, needs=(q, k, v, dout)) if dlse is None else None
    if causal is not None:
        return *_fused.backward(dout, q, k, v, out, lse, causal, rule.scale), lse.new_empty(0), lse.new_empty(0)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Rows that saw nothing have lse = -inf; +inf makes every probability of theirs 0.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    delta = (out.to(lse.dtype) * dout).sum(-1).transpose(-1, -2)
    if dlse is not None:
        delta = delta - dlse
    dslopes = lse.new_zeros(q.shape[0] if x.cu_q is None else x.cu_q.shape[0] - 1, q.shape[-2])
    q4, k4, v4, out4, dout4, lse3, delta3, dq4, dk4, dv4 = _batched(x, q, k, v, out, dout, lse, delta, dq, dk, dv)
    for span in _spans(q4, k4, x):
        part, keys, values = _part(q4, k4, v4, span, x)
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
    return dq, dk, dv, _slopes_grad(x.slopes, dslopes), _sinks_grad(x.sinks, lse, delta)


def _fused_whole(q: Tensor, k: Tensor, v: Tensor, x: _Extras, rule: Rule, *, needs: tuple[Tensor, ...]) -> bool | None:
    """The fused attention's ``is_causal`` if it solves a dense call in one piece, else None."""
    if any(t is not None for t in (x.slopes, x.sinks, x.starts, x.ends, x.cu_q)):
        return None
    s, t = q.shape[1], k.shape[1]
    causal = _fused.causality(Part(q, None, 0, t, k.shape[2], t - s), rule, v)
    return causal if causal is not None and _fused.all_finite(causal, *needs) else None


def _into(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _batched(x: _Extras, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Packed tensors with a batch of one in front."""
    return tensors if x.cu_q is None else tuple(t[None] for t in tensors)


def _slopes_grad(slopes: Tensor | None, per_sequence: Tensor) -> Tensor:
    """The gradient in the slopes' own shape; empty where there are none."""
    if slopes is None:
        return per_sequence.new_empty(0)
    return (per_sequence.sum(0) if slopes.dim() == 1 else per_sequence).to(slopes.dtype)


def _sinks_grad(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key whose value is zero, so its gradient is its probability times ``0 - delta``."""
    if sinks is None:
        return lse.new_empty(0)
    grad = torch.where(lse == torch.inf, 0, -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta)
    return grad.transpose(0, -2).flatten(1).sum(1).to(sinks.dtype)


def _fill_nothing(out: Tensor, lse: Tensor) -> None:
    """What a row that belongs to no sequence gets."""
    out.zero_()
    lse.fill_(-torch.inf)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lead = q.shape[:-3]
    return out, q.new_empty(*lead, q.shape[-2], q.shape[-3], dtype=wide)


def _spans(q: Tensor, k: Tensor, x: _Extras) -> Iterator[_Span]:
    """The attention problems of a call on ``[b, s, h, d]`` and ``[b, t, g, d]``; packed ones have ``b = 1``."""
    if x.cu_q is not None:
        yield from _packed_spans(q, k, x)
        return
    b, s, h, _ = q.shape
    t = k.shape[1]
    rows = slice(0, s)
    if x.starts is None and x.ends is None:
        # As many sequences together as a tile of up to 64 rows has room for.
        several = max(1, _tiles.SCORES // max(1, h * min(s, 64) * min(t, _tiles.KEYS)))
        for n in range(0, b, several):
            yield _Span(slice(n, min(b, n + several)), n, rows, slice(0, t), 0, t - s)
        return
    starts = [0] * b if x.starts is None else x.starts.tolist()
    ends = [t] * b if x.ends is None else x.ends.tolist()
    for n in range(b):
        low, high = max(starts[n], 0), max(0, min(ends[n], t))
        yield _Span(slice(n, n + 1), n, rows, slice(0, high), min(low, high), t - s)


def _packed_spans(q: Tensor, k: Tensor, x: _Extras) -> Iterator[_Span]:
    rows = _offsets("cu_seqlens_q", x.cu_q, q.shape[1], "max_seqlen_q", x.max_q)
    keys = _offsets("cu_seqlens_k", x.cu_k, k.shape[1], "max_seqlen_k", x.max_k)
    for n, (r0, r1, k0, k1) in enumerate(zip(rows, rows[1:], keys, keys[1:], strict=False)):
        yield _Span(slice(0, 1), n, slice(r0, r1), slice(k0, k1), 0, (k1 - k0) - (r1 - r0))


def _offsets(name: str, cu_seqlens: Tensor, tokens: int, limit_name: str, limit: int | None) -> list[int]:
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name}: expected offsets that start at 0 and never decrease, got {offsets}")
    if offsets[-1] > tokens:
        raise ValueError(f"{name}: expected offsets up to {tokens} tokens, got {offsets[-1]}")
    if limit is not None and lengths and max(lengths) > limit:
        raise ValueError(f"{limit_name}: expected at least the longest sequence, {max(lengths)}, got {limit}")
    return offsets


def _part(q: Tensor, k: Tensor, v: Tensor, span: _Span, x: _Extras) -> tuple[Part, Tensor, Tensor]:
    """The part of one span, and its visible keys and values as tensors."""
    q, k, v = q[span.batch, span.rows], k[span.batch, span.keys], v[span.batch, span.keys]
    slopes, sinks = _tiles.per_head(x.slopes, x.sinks, span.sequence, q)
    part = Part(
        q,
        lambda a, b: (k[:, a:b], v[:, a:b]),
        span.low,
        k.shape[1],
        k.shape[2],
        span.first,
        span.sequence,
        slopes,
        sinks,
    )
    return part, k[:, span.low :], v[:, span.low :]


def _fake_forward(q, k, v, *extras):
    return _outputs(q, v)


def _fake_backward(dout, dlse, out, lse, q, k, v, *extras):
    x = _Extras(*extras)
    empty = lse.new_empty(0)
    dslopes = empty if x.slopes is None else torch.empty_like(x.slopes)
    dsinks = lse.new_empty(0) if x.sinks is None else torch.empty_like(x.sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dslopes, dsinks


def _cached(
    q, k, v, k_tail, k_scale, v_scale, table, starts, lengths, cu_q, slopes, sinks, left, right, prefix, *numbers
):
    stored = _paged.Stored(k, k if v is None else v, k_tail, k_scale, k_scale if v is None else v_scale, q.dtype)
    out, lse = _outputs(q, stored.v)
    if cu_q is not None:
        _fill_nothing(out, lse)
    rule = Rule(Mask(left, right, prefix), *numbers, 0.0, 0)
    q4, out4, lse3 = (q, out, lse) if cu_q is None else (q[None], out[None], lse[None])
    batch = _paged.Batch(
        table, starts.tolist(), lengths.tolist(), None if cu_q is None else cu_q.tolist(), slopes, sinks
    )
    for part, at, rows, view in _paged.problems(q4, stored, batch):
        out_part, lse_part = out4[at, rows], lse3[at, :, rows]
        causal = None if view is None else _fused.causality(part, rule, view[1])
        if causal is not None and _fused.all_finite(causal, view[1]):
            solved = _fused.forward(part.q, *view, causal, rule.scale)
            if solved[0].shape == out.shape:
                return solved  # this one problem is the whole step
            _into((out_part, lse_part), solved)
        else:
            _tiles.forward(part, rule, out_part, lse_part)
    return out, lse


def _fake_cached(q, k, v, *rest):
    return _outputs(q, k if v is None else v)


def _write(k, v, new_k, new_v, slots):
    slots = slots.flatten()
    kept = None if slots.numel() == 0 or int(slots.min()) >= 0 else slots >= 0
    for plane, new in ((k, new_k), (v, new_v)):
        if plane is not None:
            _paged.store(plane, new, slots, kept)


def _fake_write(k, v, new_k, new_v, slots):
    return None


for _name, _run, _fake in (
    ("torch_forward", _forward, _fake_forward),
    ("torch_backward", _backward, _fake_backward),
    ("torch_cached", _cached, _fake_cached),
    ("torch_write", _write, _fake_write),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(f"attnlib::{_name}", _fake, lib=_library)
