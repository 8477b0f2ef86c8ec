"""Run a call on the selected backend, or explain the call without running it."""

from functools import partial

import torch
from torch import Tensor

from ..call.cache import key_of
from ..call.call import NO_ORIGIN, Call, Packing, PieceGradients, checked
from ..call.score_options import with_score_options
from ..internal.checks import are_checks_on
from .placements import MeshPlacement, local_call
from .select import CALL_CACHE, Explanation, explained, select


class Interceptor:
    """Pass an object of a subclass in place of a backend's name, to answer the calls that a layer makes.

    ``name`` is the name of the backend.
    """

    name: str | None

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output and LSE of a call on plain tensors, which is not validated yet."""
        raise NotImplementedError

    def from_head(self, first: int) -> "Interceptor":
        """Return the interceptor for calls that begin ``first`` heads later."""
        raise NotImplementedError


class ExplainOnly:
    """Pass this object in place of a backend's name to explain calls: they return zeros and do not run."""

    def __init__(self, name: str | None):
        self.name = name
        self.explanations: list[Explanation] = []

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        """Explain a validated call, and return zeros with the shapes of its results."""
        self.explanations.append(explained(call, self.name))
        return zeros(call)

    def note(self, ranks: str) -> None:
        """Add to the last explanation a text about how ranks share the call."""
        self.explanations[-1] = self.explanations[-1]._replace(ranks=ranks)


def zeros(call: Call) -> tuple[Tensor, Tensor]:
    """Return zeros with the shapes of the output and LSE of a call."""
    q, width = call.q, call.v.shape[-1] if call.kv is None else call.kv.layout.value_dim
    return q.new_zeros(*q.shape[:-1], width), q.new_zeros(q.shape[:-1]).float().movedim(-1, -2)


Runner = str | ExplainOnly | Interceptor | None  # what runs a call; None selects a backend


def attend(call: Call, name: Runner = None) -> tuple[Tensor, Tensor]:
    """Run a call on the backend of this name, or explain it, and return its output and LSE.

    Other modules of the package use this for a :class:`Call` that the public functions cannot express.
    """
    if call.score.function is not None:
        call = with_score_options(call)
    kv, explains, is_answered = call.kv, type(name) is ExplainOnly, isinstance(name, Interceptor)
    is_routed = kv is not None and kv.route is not None and not is_answered
    if is_routed and (result := _by_route(call, name)) is not None:
        return result
    key = None if explains else key_of(call, name)
    if key is not None and (run := CALL_CACHE.find(kv, key)) is not None:
        return run(call.q, call.k, call.v, call.descales)
    if key is None:
        part = MeshPlacement.empty if explains else MeshPlacement.local
        if (local := local_call(call, part)) is not None:
            results = attend(local.call, name)
            if explains:
                name.note(f"on DTensors, {local.sharing}")
            return local.whole(*results)
        if is_answered:
            return name.answer(call)
    call = checked(call)
    if (packed := packed_by_documents(call)) is not None:
        out, lse = attend(packed, name)
        return out.unsqueeze(0), lse.unsqueeze(0)
    if explains:
        return name.answer(call)
    backend = select(call.spec, name)
    if kv is None:
        result = backend.attention(call)
    else:
        if are_checks_on(kv.lengths):
            kv.check_contents(call.q.shape[0])
            key = None  # do not cache this call, so that the next one is validated too
        result = backend.cached_attention(call)
    if key is not None:
        CALL_CACHE.add(kv, key, backend.prepare(call))
    return result


def _by_route(call: Call, name: Runner) -> tuple[Tensor, Tensor] | None:
    """Split a call into several by its view's route and run them; None if one call must read the view."""
    route = call.kv.route
    if type(name) is not ExplainOnly:
        return route.attend(call, partial(attend, name=name))
    parts = ExplainOnly(name.name)
    result = route.attend(call, partial(attend, name=parts), dry=True)
    if result is not None:
        name.explanations.append(route.explain(call, parts.explanations))
    return result


def packed_by_documents(call: Call) -> Call | None:
    """Return a dense call of one row as a packed call if its mask only separates documents, else None."""
    mask, sections, score = call.mask, getattr(call.mask, "sections", None), call.score
    if sections is None or not score.is_alike or call.dropout.p or call.origin is not NO_ORIGIN:
        return None
    if mask.selection is not None:  # its entries count keys of the row
        return None
    others = (call.kv, call.packing, call.key_starts, call.key_ends, call.descales, call.compute_dtype)
    is_plain = mask.band.without_prefix() == mask.band and all(x is None for x in others)
    if not is_plain or not call.q.shape[:2] == call.k.shape[:2] == (1, mask.tensors[0].shape[1]):
        return None
    q, k, v = (x.squeeze(0) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, mask=mask.band, packing=Packing(sections, sections), spec=None)


@torch.no_grad()
def gradients(
    call: Call, name: str | Interceptor | None, dout: Tensor, out: Tensor, lse: Tensor
) -> PieceGradients:
    """Return the gradients that a chunk of a larger call contributes.

    ``dout``, ``out`` and ``lse`` belong to the larger call, at the chunk's queries. The chunk has no sinks,
    and its backward runs on the same backend as its forward.
    """
    call = checked(call)
    call = call._replace(spec=call.spec._replace(grad=True))
    name = name.name if isinstance(name, Interceptor) else name
    return select(call.spec, name).gradients(call, dout, out, lse)
