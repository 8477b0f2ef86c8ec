"""The torch backend: torch's fused CPU attention where that is exact, else tile by tile.

No T x T tensor and no copy of K or V is made.
"""

import torch
from torch import Tensor

from ...call.call import Call, PieceGradients
from ...call.spec import AttentionSpec
from ...internal import watched
from ...internal.watched import are_watched
from ...kv import KVView
from ...rope.rope import Angles, rotate
from ..operators import flat, flat_over_view
from . import fused
from .implementations import OPERATORS, cached
from .pages import quantise


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    if spec.without_backward:
        return spec.without_backward
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


def failures(spec: AttentionSpec) -> list[str]:
    """Name each private part of torch that failed its trial, and what that costs."""
    return [*watched.failures(), *(fused.failures() if spec.device == "cpu" else [])]


def variant(call: Call) -> str:
    """Nothing: one code runs all calls."""
    return ""


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE, with gradients."""
    return OPERATORS(flat(call), grad=call.spec.grad)


def cached_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE, gathering at most 512 tokens at a time."""
    run = torch.ops.attnlib.torch_cached if are_watched(call.q, call.q, call.q) else cached
    return run(*flat_over_view(call))


def gradients(call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
    """The gradients of a piece of a larger call, of which these are the parts at its queries."""
    return OPERATORS.of_piece(call, dout, out, lse)


def prepare(call: Call) -> None:
    """No call is quicker the second time."""


def cannot_store(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Nothing: it stores everything everywhere."""
    return []


def new_schedule(heads: int, rows: int, device: torch.device, *, limit: int = 0, split_size: int = 0) -> None:
    """Sequences are not shared out here."""


def peer_memory(group: object, device: torch.device) -> None:
    """No rank reaches another one's memory from here."""


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> None:
    """Store tokens in the planes in place, rotated and quantised first; slot -1 is skipped."""
    latent, store = kv.layout.is_latent, kv.layout.store
    if latent:
        k, v = k.unsqueeze(-2), None if v is None else v.unsqueeze(-2)
    if angles is not None:
        k, v = (k, rotate(v, angles)) if latent else (rotate(k, angles), v)
    if store is not None:
        k, k_scale = quantise(k, store)
        v, v_scale = (v, None) if latent else quantise(v, store)
        torch.ops.attnlib.torch_write(kv.k_scale, None if latent else kv.v_scale, k_scale, v_scale, slots)
    torch.ops.attnlib.torch_write(kv.k, kv.k_tail if latent else kv.v, k, v, slots)
