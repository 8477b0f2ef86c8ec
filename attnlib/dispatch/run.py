"""A call run: checked once, planned as one call or two, and given to the backend that is selected."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.cache import key_of
from ..call.call import NO_ORIGIN, Call, Origin, Packing, PieceGradients, checked
from ..internal.checks import are_checks_on, is_strided, refuse_tensor
from ..kv import Held
from ..masks.band import FULL, Mask
from ..merge import merge_states
from .placements import MeshPlacement, local_call
from .select import PREPARED, Explanation, explained, select


class CallPlan(NamedTuple):
    """The calls that answer one call: itself alone, or two that :func:`merge_states` joins.

    Then ``own`` attends to the keys that each sequence has for itself, ``shared`` to those that groups of
    them share.
    """

    own: Call
    shared: Call | None = None


def planned(call: Call) -> CallPlan:
    """The calls that answer this one. Shared keys get a call of their own where every query sees all of
    them.
    """
    kv, q = call.kv, call.q
    if kv is None or kv.shared is None or not _sees_all_before(call) or not is_strided(q):
        return CallPlan(call)
    packed = q if kv.cu_seqlens_q is not None or q.dim() != 4 else q.flatten(0, 1)
    shared = Call(packed, FULL, call.score._replace(sinks=None), kv=kv.shared, lse=True)
    return CallPlan(call._replace(kv=kv.own, lse=True), shared)


def packed_by_documents(call: Call) -> Call | None:
    """The packed call that a checked dense one is, if its mask does no more than keep documents of a row
    apart.
    """
    mask, sections, score = call.mask, getattr(call.mask, "sections", None), call.score
    if sections is None or not score.is_alike or call.dropout.p or call.origin is not NO_ORIGIN:
        return None
    others = (call.kv, call.packing, call.key_starts, call.key_ends, call.descales)
    is_plain = mask.band.without_prefix() == mask.band and all(x is None for x in others)
    if not is_plain or not call.q.shape[:2] == call.k.shape[:2] == (1, mask.tensors[0].shape[1]):
        return None
    q, k, v = (x.squeeze(0) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, mask=mask.band, packing=Packing(sections, sections), spec=None)


def told(call: Call, name: str | None) -> Explanation:
    """What a call would run on, and why. Over keys that ranks share, what this rank runs over those that it
    stored.
    """
    if call.kv is not None and call.kv.ranks is not None:
        held, ranks = _held_of(call), call.kv.ranks
        if held.stored is None:
            return told(_of_fresh(call, held), name)
        q = call.q.repeat_interleave(ranks.count if ranks.have_own_heads else 1, -2)
        how = f"over {ranks.count} ranks, {ranks.exchange(call.q, call.kv.layout.value_dim)}"
        return told(_of_stored(call, q, held), name)._replace(ranks=how)
    if (local := local_call(call, MeshPlacement.empty)) is not None:
        return told(local.call, name)._replace(ranks=f"on DTensors, {local.sharing}")
    plan = planned(call)
    own = checked(plan.own)
    packed = packed_by_documents(own)
    own = explained(own if packed is None else checked(packed), name)
    return own if plan.shared is None else own._replace(shared=explained(checked(plan.shared), name))


class ExplainOnly:
    """In the place of a backend's ``name``: calls only tell what they would run on, and give zeros."""

    def __init__(self, name: str | None):
        self.name = name
        self.told: list[Explanation] = []

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        """Zeros of the shapes that the call would give."""
        self.told.append(told(call, self.name))
        q, values = call.q, call.v if call.kv is None else call.kv.layout
        width = values.shape[-1] if isinstance(values, Tensor) else values.value_dim
        return q.new_zeros(*q.shape[:-1], width), q.new_zeros(q.shape[:-1]).float().movedim(-1, -2)


def attend(call: Call, name: str | ExplainOnly | None = None) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call, on the backend of this name; for those who say more of a call than its doors
    take.
    """
    if type(name) is ExplainOnly:
        return name.answer(call)
    kv = call.kv
    if kv is not None and kv.ranks is not None:
        return _attend_dealt(call, name)
    if kv is not None and kv.shared is not None and (plan := planned(call)).shared is not None:
        return _merged(plan, name)
    key = key_of(call, name)
    if key is not None and (run := PREPARED.find(kv, key)) is not None:
        return run(call.q, call.k, call.v, call.descales)
    if key is None and (local := local_call(call)) is not None:
        return local.whole(*attend(local.call, name))
    call = checked(call)
    if (packed := packed_by_documents(call)) is not None:
        out, lse = attend(packed, name)
        return out.unsqueeze(0), lse.unsqueeze(0)
    backend = select(call.spec, name)
    if kv is None:
        result = backend.attention(call)
    else:
        if are_checks_on(kv.lengths):
            kv.check_contents(call.q.shape[0])
            key = None  # or the next call would not be checked
        result = backend.cached_attention(call)
    if key is not None:
        PREPARED.remember(kv, key, backend.prepare(call))
    return result


@torch.no_grad()
def gradients(call: Call, name: str | None, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
    """The gradients of a piece of a larger call, of which dout, output and LSE are the parts at its queries.

    The piece has no sinks, and is run by the backend that has run its forward.
    """
    call = checked(call)
    call = call._replace(spec=call.spec._replace(grad=True))
    return select(call.spec, name).gradients(call, dout, out, lse)


def _sees_all_before(call: Call) -> bool:
    """Whether every query sees all keys before its own, and no score depends on how far off they are, or on
    whose.
    """
    is_alike = call.score.is_alike and call.descales is None  # those of sequences may differ
    return isinstance(call.mask, Mask) and call.mask.sees_all_before and is_alike


def _attend_dealt(call: Call, name: str | None) -> tuple[Tensor, Tensor]:
    """Attention to keys that ranks share. Each attends to those that it has, and all merge what they found.

    A step's own tokens every rank has, and attends to without the others. Sinks come last, so that they count
    once.
    """
    kv, held, q = call.kv, _held_of(call), call.q
    if held.stored is None:
        return attend(_of_fresh(call, held), name)
    if not q.numel():
        return attend(_of_stored(call, q, held), name)
    heads, sinks, exchange = kv.layout.heads, call.score.sinks, kv.ranks.exchange(q, kv.layout.value_dim)
    stored, lse = attend(_of_stored(call, exchange.queries(q, heads), held), name)
    is_all = held.fresh is None and sinks is None
    out, lse = exchange.merged(stored, lse, heads, dtype=stored.dtype if is_all else lse.dtype)
    if held.fresh is not None:
        own, own_lse = attend(_of_fresh(call, held), name)
        out, lse = merge_states(out, lse, own.to(out.dtype), own_lse)
    elif sinks is not None:
        if sinks.shape != q.shape[-2:-1]:
            raise ValueError(f"sinks: expected [h={q.shape[-2]}] like q, got {tuple(sinks.shape)}")
        joint = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        seen = torch.exp(lse - joint.masked_fill(joint == -torch.inf, 0))
        out, lse = out * seen.transpose(-1, -2)[..., None], joint
    return out.to(stored.dtype), lse


def _held_of(call: Call) -> Held:
    """What this rank has of the keys of a call, which is one that ranks can share.

    Raises:
        NotImplementedError: a query does not see all keys before its own, or a score depends on which key it
        is of. RuntimeError: the view does not say what this rank has. ValueError: queries of a read do not
        see all keys.
    """
    q, held = call.q, call.kv.held
    if not _sees_all_before(call):
        raise NotImplementedError(
            "kv: over a cache that ranks share every query sees all keys before its own, and scores depend "
            "on q and k alone: expected a Mask such as CAUSAL or FULL, and no alibi_slopes, score or "
            "q_descale; make the cache without mesh=, or for a sliding window with a layout that has it"
        )
    if not is_strided(q):
        refuse_tensor("q", q)
    if torch.is_grad_enabled() and q.requires_grad:
        raise NotImplementedError("cached attention has no backward; wrap the call in torch.no_grad()")
    if held is None:
        raise RuntimeError(
            "kv: expected the view that append() returned in this step, of a cache that ranks share, got one "
            "without the step's own tokens, as view() or replace() make it"
        )
    if held.fresh is None and not held.is_single and call.mask.without_prefix() != FULL:
        raise ValueError(
            "mask: expected FULL for several queries of a read, over a cache that ranks share, got "
            f"{call.mask}"
        )
    return held


def _of_stored(call: Call, q: Tensor, held: Held) -> Call:
    """The call of the queries of all ranks over the keys that this one has."""
    return call._replace(q=q, mask=FULL, score=call.score._replace(sinks=None), kv=held.stored, lse=True)


def _of_fresh(call: Call, held: Held) -> Call:
    """The call over a step's own tokens."""
    kv, mask, fresh, packing, origin = call.kv, call.mask, held.fresh, None, call.origin
    if kv.cu_seqlens_q is not None:
        packing = Packing(kv.cu_seqlens_q, kv.cu_seqlens_q)
    if mask.without_prefix() != mask:  # a prefix, which counts from where the sequences begin
        before = kv.lengths - (call.q.shape[1] if packing is None else kv.cu_seqlens_q.diff())
        origin = Origin(before.int(), before.int())
    own = {"k": fresh.k, "v": fresh.v, "kv": None, "key_starts": fresh.starts}
    return call._replace(**own, packing=packing, origin=origin, lse=True)


def _merged(plan: CallPlan, name: str | None) -> tuple[Tensor, Tensor]:
    """The results of both calls as one. The shared keys are read once for all queries of a group."""
    state, q = attend(plan.own, name), plan.own.q
    out, lse = attend(plan.shared, name)
    if q.dim() == 4:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return merge_states(*state, out, lse)
