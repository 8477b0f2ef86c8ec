"""The torch backend: torch's fused attention if it is exact, otherwise attention tile by tile.

The scores of a whole sequence never exist at once. K and V are copied only if their channels are strided.
"""

from functools import partial

import torch
from torch import Tensor

from ...call.cache import Run, Write
from ...call.call import Call, PieceGradients
from ...call.spec import AttentionSpec
from ...call.statistic import Statistic
from ...internal import watched
from ...internal.watched import are_watched
from ...kv import KVView
from ...rope.rope import Angles, rotate
from ..operators import flat, flat_over_view, flat_statistic
from . import fused
from .efficient import may_take
from .implementations import OPERATORS, cached, put_tokens
from .implementations import statistic as computed
from .pages import quantise

EFFICIENT = "runs on torch's memory-efficient attention, since attnlib's kernels do not take the call"


def unsupported(spec: AttentionSpec) -> list[str]:
    """Return the reasons why this backend cannot run ``spec``."""
    if spec.without_backward:
        return spec.without_backward
    if spec.batch_invariant:
        return ["batch_invariant: torch may sum a matrix product in an order that depends on the batch"]
    return []


def slow(spec: AttentionSpec) -> list[str]:
    """Return the reasons why this backend would copy K or V, or wait for the device."""
    reasons = [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]
    if spec.device not in ("cpu", "meta"):
        reasons.append(EFFICIENT if may_take(spec) else "runs tile by tile from Python")
    if spec.device not in ("cpu", "meta") and (spec.kind != "dense" or spec.bounds or spec.dropout):
        reasons.append("waits for the device to read lengths on the host")
    return reasons


def failures(spec: AttentionSpec) -> list[str]:
    """Return a line for each private function of torch that failed its trial, with the cost."""
    takes = spec.device == "cpu" or may_take(spec)
    return [*watched.failures(), *(fused.failures(spec.device, spec.dtype, spec.arch) if takes else [])]


def variant(call: Call) -> str:
    """Return an empty name for the kernels, since all calls run the same code."""
    return ""


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Return dense or packed attention and its LSE, with gradients if the call needs them."""
    return OPERATORS(flat(call), grad=call.spec.grad)


def cached_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Return attention over a cache and its LSE, gathering at most 512 tokens at a time."""
    run = torch.ops.attnlib.torch_cached if are_watched(call.q, call.q, call.q) else cached
    return run(*flat_over_view(call))


def statistic(call: Call, wanted: Statistic) -> Tensor:
    """Return a quantity that is computed from the scores of a dense or packed call."""
    run = torch.ops.attnlib.torch_statistic if are_watched(call.q, call.k, call.v) else computed
    return run(*flat_statistic(call, wanted))


def gradients(call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
    """Return what ``call``, a chunk of a larger call, contributes to the gradients of that larger call.

    ``dout``, ``out`` and ``lse`` belong to the larger call, and have only the queries of the chunk.
    """
    return OPERATORS.chunk_gradients(call, dout, out, lse)


def prepare(call: Call) -> Run | None:
    """Return a function that repeats a call on a CPU, over a cache or by torch's fused attention, or None."""
    spec, (_, s, *_) = call.spec, call.q.shape
    if spec.device != "cpu" or spec.strided or call.score.options or call.descales or spec.compute_dtype:
        return None
    if call.kv is not None:
        return _over_view(call)
    t, width = call.k.shape[1], call.v.shape[-1]
    if (causal := fused.causality_of(call.q, width, call.mask, t - s, 0, t)) is None:
        return None
    run, gradients = fused.replay(call.q, causal, call.score.scale, lse=call.lse)
    if not spec.grad:
        return run
    a = flat(call)._replace(q=None, k=None, v=None)  # a cached call must not keep tensors alive
    return OPERATORS.replay(run, gradients, a, lse=call.lse)


def _over_view(call: Call) -> Run:
    """Return a function that repeats a call over a cache on new queries.

    If the sequences have equal lengths in adjacent rows of a contiguous cache, it reads them at once.
    """
    a, given, kv = flat_over_view(call)._replace(q=None), (call.mask, call.score.scale), call.kv
    is_plain = not kv.layout.is_latent and kv.k_scale is kv.cu_seqlens_q is None and kv.table.shape[1] == 1

    def read() -> tuple[Tensor, Tensor] | None:
        rows, lengths, starts = a.table.flatten().tolist(), a.lengths.tolist(), a.starts.tolist()
        first, t = (rows[0], lengths[0]) if rows else (-1, 0)
        if not 0 <= first <= a.k.shape[0] - len(rows) or not 0 < t <= a.k.shape[1] or any(starts):
            return None
        if lengths.count(t) != len(rows) or rows != [*range(first, first + len(rows))]:
            return None
        return tuple(x[first : first + len(rows), :t].transpose(1, 2) for x in (a.k, a.v))

    def run(q: Tensor, k: None, v: None, descales: None = None) -> tuple[Tensor, Tensor]:
        keys = read() if is_plain else None
        result = None if keys is None else fused.forward_at_end(q, *keys, *given)
        return cached(*a._replace(q=q)) if result is None else result

    return run


def cannot_store(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return no reasons, since tokens of every dtype can be stored on every device."""
    return []


def new_schedule(heads: int, rows: int, device: torch.device, *, limit: int = 0, split_size: int = 0) -> None:
    """Return None: this backend runs no kernels over which sequences could be distributed."""


def peer_memory(group: object, device: torch.device) -> None:
    """Return None: ranks cannot read each other's memory in this backend."""


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> Write:
    """Rotate and quantise tokens if needed, and write them to the cache in place; slot -1 is skipped.

    Return a function that writes other tokens to the same slots. It does not keep the view alive.
    """
    latent = kv.layout.is_latent
    planes, scales = (kv.k, kv.k_rope if latent else kv.v), (kv.k_scale, None if latent else kv.v_scale)
    write = partial(_write, kv.layout.storage_dtype, planes, scales, slots, latent=latent)
    write(k, v, angles)
    return write


def write_index(kv: KVView, index: Tensor, slots: Tensor) -> Write:
    """Write index keys to the cache, as :func:`write_cache` writes keys."""
    write = partial(_write, kv.layout.index_dtype, (kv.index, None), (kv.index_scale, None), slots)
    write(index, None, None)
    return write


def _write(
    store: torch.dtype | None,
    planes: tuple[Tensor, Tensor | None],
    scales: tuple[Tensor | None, Tensor | None],
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    angles: Angles | None,
    *,
    latent: bool = False,
) -> None:
    put = put_tokens
    if are_watched(k, k, slots):
        put = torch.ops.attnlib.torch_write
    if latent:
        k, v = k.unsqueeze(-2), None if v is None else v.unsqueeze(-2)
    if angles is not None:
        k, v = (k, rotate(v, angles)) if latent else (rotate(k, angles), v)
    if store is not None:
        k, k_scale = quantise(k, store)
        v, v_scale = (v, None) if scales[1] is None else quantise(v, store)
        put(*scales, k_scale, v_scale, slots)
    put(*planes, k, v, slots)
