"""Attention over a sharded cache: each rank attends to its own tokens, and the results are merged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Origin, Packing
from ...dispatch.select import Explanation
from ...dispatch.storage import write_cache
from ...internal.checks import is_strided, refuse_tensor
from ...kv import KVView, RunCall
from ...masks.band import FULL
from ...merge import merge_states
from ...rope.rope import Angles, rotate
from .ranks import RankExchange, Ranks, Rehearsal


class NewTokens(NamedTuple):
    """The keys and values of the tokens that a step appends, rounded as if read back from the cache.

    ``k`` is ``[b, s, g, d]`` and ``v`` ``[b, s, g, e]``, or packed ``[t, g, *]``. In a dense step ``starts``,
    int32 ``[b]``, is the number of left-padding tokens among each sequence's new tokens.
    """

    k: Tensor
    v: Tensor
    starts: Tensor | None


class LocalShard(NamedTuple):
    """The tokens of a sharded cache that this rank attends to.

    ``stored`` is a view of the tokens that this rank stores; it is None if no sequence has stored any. The
    tokens of the present step are part of it, unless every rank gets all of them as ``new``. ``is_single`` is
    True if every sequence has at most one query, its last token.
    """

    stored: KVView | None
    is_single: bool
    new: NewTokens | None = None


@dataclass(frozen=True, slots=True)
class ShardedRoute:
    """The way attention reads a cache that is sharded over ``ranks``; this rank's tokens are in ``shard``.

    ``shard`` is None after ``dataclasses.replace`` has changed a view; attention then raises an error.
    """

    ranks: Ranks
    shard: LocalShard | None = None

    is_partial = True

    def after_replace(self) -> "ShardedRoute":
        """Return a route without a shard, since the shard belongs to the view before the change."""
        return ShardedRoute(self.ranks)

    def with_own_heads(self) -> "ShardedRoute":
        """Return the route for calls in which each rank has different query heads for the same KV heads."""
        return replace(self, ranks=self.ranks.with_own_heads())

    def attend(self, call: Call, run: RunCall, *, dry: bool = False) -> tuple[Tensor, Tensor]:
        """Attend to this rank's shard with the queries of all ranks, and merge the results of all ranks.

        Every rank has the tokens of the present step and attends to them without communication. Sinks are
        added after the merge, so that they count only once.

        Raises:
            NotImplementedError: a query does not see all keys before its own, or a score depends on the key's
                index.
            RuntimeError: the view has no shard.
            ValueError: several queries of a read do not see all keys, or sinks do not fit q.
        """
        q, shard, kv = call.q, self._shard(call), call.kv
        if shard.stored is None:
            return run(_over_new(call, shard.new))
        if not q.numel():
            return run(_over_stored(call, q, shard))
        heads, sinks = kv.layout.heads, call.score.sinks
        exchange: RankExchange = (
            Rehearsal(self.ranks.count, self.ranks.have_own_heads) if dry else self._exchange(call)
        )
        stored, lse = run(_over_stored(call, exchange.queries(q, heads), shard))
        is_all = shard.new is None and sinks is None
        out, lse = exchange.merged(stored, lse, heads, dtype=stored.dtype if is_all else lse.dtype)
        if shard.new is not None:
            new, new_lse = run(_over_new(call, shard.new))
            out, lse = merge_states(out, lse, new.to(out.dtype), new_lse)
        elif sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        return out.to(stored.dtype), lse

    def explain(self, call: Call, parts: Sequence[Explanation]) -> Explanation:
        """Explain the call over this rank's tokens, and say how ranks exchange queries."""
        if call.kv.route.shard.stored is None:
            return parts[0]
        return parts[0]._replace(ranks=f"over {self.ranks.count} ranks, {self._exchange(call)}")

    def _exchange(self, call: Call) -> RankExchange:
        return self.ranks.exchange(call.q, call.kv.layout.value_dim)

    def _shard(self, call: Call) -> LocalShard:
        """Return the shard to attend to, or raise an error if ranks cannot share the call."""
        q, shard = call.q, self.shard
        if not call.sees_all_before:
            raise NotImplementedError(
                "kv: over a cache that ranks share every query sees all keys before its own, and scores "
                "depend on q and k alone: expected a Mask such as CAUSAL or FULL, and no alibi_slopes, score "
                "or q_descale; make the cache without mesh=, or for a sliding window with a layout that has "
                "it"
            )
        if not is_strided(q):
            refuse_tensor("q", q)
        if torch.is_grad_enabled() and q.requires_grad:
            raise NotImplementedError("cached attention has no backward; wrap the call in torch.no_grad()")
        if shard is None:
            raise RuntimeError(
                "kv: expected the view that append() returned in this step, of a cache that ranks share, got "
                "one without the step's own tokens, as view() or replace() make it"
            )
        if shard.new is None and not shard.is_single and call.mask.without_prefix() != FULL:
            raise ValueError(
                "mask: expected FULL for several queries of a read, over a cache that ranks share, got "
                f"{call.mask}"
            )
        return shard


def new_tokens(
    view: KVView, starts: Tensor | None, k: Tensor, v: Tensor | None, angles: Angles | None
) -> NewTokens:
    """Return the keys and values given to ``append``, rounded as if read back from the cache."""
    layout = view.layout
    # With torch.autocast, keys and values may have another dtype than the cache.
    k, v = k.to(layout.dtype), None if v is None else v.to(layout.dtype)
    if layout.storage_dtype is not None:
        return NewTokens(*_read_back(view, k, v, angles), starts)
    if layout.is_latent:
        k, v = k.unsqueeze(-2), None if v is None else v.unsqueeze(-2)
        v = v if v is None or angles is None else rotate(v, angles)
        k = k if v is None else torch.cat((k, v), -1)
        return NewTokens(k, k[..., : layout.dim], starts)
    return NewTokens(k if angles is None else rotate(k, angles), v, starts)


def _read_back(view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None) -> tuple[Tensor, Tensor]:
    """Write keys and values to a temporary page, and return them as the cache would quantize them."""
    layout, shape = view.layout, k.shape[:-1] if view.layout.is_latent else k.shape[:-2]
    tokens = shape.numel()
    planes = {
        name: torch.empty(1, tokens, heads, *((width,) if width else ()), dtype=dtype, device=k.device)
        for name, (heads, width, dtype) in layout.planes.items()
    }
    if layout.is_latent:
        planes |= {"v": planes["k"], "v_scale": planes["k_scale"]}
    page = replace(view, **planes, page_size=tokens, route=None, check=False)
    write_cache(page, k, v, torch.arange(tokens, device=k.device), angles=angles)

    def read(plane: Tensor, scale: Tensor) -> Tensor:
        return (plane[0].float() * scale[0][..., None]).to(layout.dtype).unflatten(0, shape)

    k, v = read(page.k, page.k_scale), read(page.v, page.v_scale)
    return (k if page.k_rope is None else torch.cat((k, page.k_rope[0].unflatten(0, shape)), -1)), v


def _over_stored(call: Call, q: Tensor, shard: LocalShard) -> Call:
    """Return an attention call with the queries of all ranks, over the tokens that this rank stores."""
    return call._replace(q=q, mask=FULL, score=call.score._replace(sinks=None), kv=shard.stored, lse=True)


def _over_new(call: Call, new: NewTokens) -> Call:
    """Return an attention call over the tokens that the step appends."""
    kv, mask, packing, origin = call.kv, call.mask, None, call.origin
    if kv.cu_seqlens_q is not None:
        packing = Packing(kv.cu_seqlens_q, kv.cu_seqlens_q)
    if mask.without_prefix() != mask:  # a prefix counts tokens of the whole sequence
        before = kv.lengths - (call.q.shape[1] if packing is None else kv.cu_seqlens_q.diff())
        origin = Origin(before.int(), before.int())
    own = {"k": new.k, "v": new.v, "kv": None, "key_starts": new.starts}
    return call._replace(**own, packing=packing, origin=origin, lse=True)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return an attention result after adding sinks ``[h]`` to its softmax."""
    if sinks.shape != out.shape[-2:-1]:
        raise ValueError(f"sinks: expected [h={out.shape[-2]}] like q, got {tuple(sinks.shape)}")
    joint = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    seen = torch.exp(lse - joint.masked_fill(joint == -torch.inf, 0))
    return out * seen.transpose(-1, -2)[..., None], joint
