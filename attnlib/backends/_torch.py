"""The torch backend: torch's fused CPU attention where that is exact, else tile by tile.

No T x T tensor and no copy of K or V is made.
"""

import torch
from torch import Tensor

from ..cache.layout import KVView
from ..mask import Mask
from ..rope import Angles, rotate
from ..spec import AttentionSpec
from ..terms import Terms
from ._autograd import are_watched
from ._operators import OPERATORS, cached
from ._paged import quantise


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    if spec.kind == "cached" and spec.grad:
        return ["cached attention has no backward; wrap the call in torch.no_grad()"]
    if spec.batch_invariant:
        return ["batch_invariant: how torch adds a product up depends on what shares the batch"]
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
    numbers = (*_band(spec.mask), terms.scale, terms.softcap, *terms[9:])
    return OPERATORS(q, k, v, *terms[2:9], *numbers, grad=spec.grad)


def _band(mask: Mask) -> tuple[int | None, int | None, int]:
    return mask.left, mask.right, mask.prefix


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE, gathering at most 512 tokens at a time."""
    q = q.contiguous() if "q" in spec.strided else q
    # One tensor may be passed to an operator once: a latent's value plane and scale are its key's.
    v, v_scale = (None, None) if kv.layout.is_latent else (kv.v, kv.v_scale)
    planes = (kv.k, v, kv.k_tail, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q)
    numbers = (*_band(spec.mask), terms.scale, terms.softcap)
    run = torch.ops.attnlib.torch_cached if are_watched(q, q, q) else cached
    return run(q, *planes, terms.alibi_slopes, terms.sinks, *numbers)


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> None:
    """Store tokens in the planes in place, rotated and quantised first; slot -1 is skipped."""
    latent, store = kv.layout.is_latent, kv.layout.store
    if latent:
        k, v = k.unsqueeze(-2), None if v is None else v.unsqueeze(-2)
    if angles is not None:
        k, v = (k, rotate(v, angles)) if latent else (rotate(k, angles), v)
    if store is not None:
        k, k_scale = quantise(k, store)
        v_scale = None
        if not latent:
            v, v_scale = quantise(v, store)
        torch.ops.attnlib.torch_write(kv.k_scale, None if latent else kv.v_scale, k_scale, v_scale, slots)
    torch.ops.attnlib.torch_write(kv.k, kv.k_tail if latent else kv.v, k, v, slots)
