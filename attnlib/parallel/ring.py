"""Ring attention: keys and values travel around the ranks, and each rank attends to those that it holds.

See Liu, Zaharia and Abbeel, 2023, arXiv 2310.01889. While a rank computes with one block of keys and values,
it receives the next block. The backward sends the blocks around again, together with their gradients summed
so far.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call.call import Call, PieceGradients
from ..dispatch.run import ExplainOnly, Runner, attend, gradients
from .accumulation import PartialAttention, Sum
from .exchange import Passing, passed_on
from .pieces import Piece, pieces_of, whole_of
from .sharding import Sharing
from .source import Expand, KeyValueSource


def ring(call: Call, sharing: Sharing, name: Runner, source: KeyValueSource) -> Tensor:
    """Return the attention of this rank's queries over the keys and values of all ranks."""
    score, function = call.score, call.score.function
    captured = () if function is None else function.tensors
    plan = _Ring(whole_of(call), sharing, name, source.expand, len(captured), len(source.tensors))
    given = (call.q, score.alibi_slopes, score.sinks, *captured, *source.tensors, *source.weights)
    if isinstance(name, ExplainOnly):
        return plan.explain(*given)
    return _RingAttention.apply(plan, *given)


class _Given(NamedTuple):
    """The tensors of a ring call that may need a gradient."""

    q: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    captured: Sequence[Tensor]
    travelling: Sequence[Tensor]
    weights: Sequence[Tensor]


class _Ring(NamedTuple):
    """Everything about a ring call except the tensors that may need a gradient."""

    call: Call
    sharing: Sharing
    name: Runner
    expand: Expand
    captured: int
    travelling: int

    def parts(self, q: Tensor, slopes: Tensor | None, sinks: Tensor | None, *rest: Tensor) -> _Given:
        """Group the flat list of tensors that the autograd function takes."""
        at, end = self.captured, self.captured + self.travelling
        return _Given(q, slopes, sinks, rest[:at], rest[at:end], rest[end:])

    def pieces(self, given: _Given, k: Tensor, v: Tensor, rank: int) -> list[Piece]:
        """Return the calls in which this rank's queries attend to the keys and values of rank ``rank``.

        Sinks are left out, since only the final result includes them.
        """
        score = self.call.score._replace(alibi_slopes=given.slopes, sinks=None)
        if score.function is not None:
            score = score._replace(function=score.function.reading(given.captured))
        tokens = given.q.shape[-3]
        own, held = (self.sharing.ranges(x, tokens) for x in (self.sharing.rank, rank))
        return list(pieces_of(self.call._replace(score=score), given.q, k, v, own, held))

    def explain(self, *given: Tensor | None) -> Tensor:
        """Explain every backend call of the ring without running it; return zeros in the output's shape."""
        parts = self.parts(*given)
        k, v = self.expand(*parts.travelling)
        for rank in range(self.sharing.ranks):
            for piece in self.pieces(parts, k, v, rank):
                attend(piece.call, self.name)
        return parts.q.new_zeros(*parts.q.shape[:-1], v.shape[-1])


class _RingAttention(torch.autograd.Function):
    """Ring attention as an autograd function, which saves only this rank's tokens for the backward."""

    @staticmethod
    def forward(ctx: Any, plan: _Ring, *tensors: Tensor | None) -> Tensor:
        given = plan.parts(*tensors)
        state = PartialAttention(given.q)
        for rank, travelling in passed_on(given.travelling, plan.sharing.group):
            k, v = plan.expand(*travelling)
            state.begin(v)
            for piece in plan.pieces(given, k, v, rank):
                state.add(piece.queries, *attend(piece.call._replace(lse=True), plan.name))
        out, lse = state.result(given.sinks)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.plan, ctx.autocast = plan, _autocast_now(given.q.device.type)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        with ctx.autocast():
            found = _gradients(ctx.plan, ctx.plan.parts(*tensors), dout, out, lse)
        pairs = zip(found, tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(x.to(of.dtype) if is_asked else None for x, of, is_asked in pairs)


class _LocalGradients:
    """The gradients of q, ALiBi slopes and score tensors, which stay on this rank, summed over pieces."""

    def __init__(self, given: _Given, wide: torch.dtype):
        self.q, self.captured = Sum(given.q, wide), [_zeros(x, wide) for x in given.captured]
        self.slopes = None if given.slopes is None else _zeros(given.slopes, wide)

    def add(self, queries: slice, found: PieceGradients) -> None:
        """Add the gradients of one piece."""
        self.q.add(queries, found.q)
        if self.slopes is not None:
            self.slopes += found.slopes
        for total, x in zip(self.captured, found.captured, strict=True):
            total += 0 if x is None else x


def _gradients(plan: _Ring, given: _Given, dout: Tensor, out: Tensor, lse: Tensor) -> list[Tensor | None]:
    """Return the gradients of the tensors in ``given``, in the same order."""
    wide, last = lse.dtype, plan.sharing.ranks - 1
    sums, weight_gradients, back = (
        _LocalGradients(given, wide),
        [_zeros(x, wide) for x in given.weights],
        None,
    )
    for step, (rank, travelling) in enumerate(passed_on(given.travelling, plan.sharing.group)):
        leaves = [x.detach().requires_grad_() for x in travelling]
        with torch.enable_grad():
            k, v = plan.expand(*leaves)
        dk, dv = Sum(k, wide), Sum(v, wide)
        for piece in plan.pieces(given, k.detach(), v.detach(), rank):
            rows = piece.queries
            state = (x.contiguous() for x in (dout[..., rows, :, :], out[..., rows, :, :], lse[..., rows]))
            found = gradients(piece.call, plan.name, *state)
            sums.add(rows, found)
            dk.add(piece.keys, found.k)
            dv.add(piece.keys, found.v)
        of = torch.autograd.grad(
            (k, v), (*leaves, *given.weights), (dk.result().to(k.dtype), dv.result().to(v.dtype))
        )
        for total, x in zip(weight_gradients, of[len(leaves) :], strict=True):
            total += x
        of = (
            of[: len(leaves)]
            if back is None
            else _add_gradients(back.wait(), of, None if step == last else wide)
        )
        back = Passing(of, plan.sharing.group)
    score_gradients = (sums.slopes, _sink_gradients(given.sinks, dout, out, lse), *sums.captured)
    return [sums.q.result(), *score_gradients, *back.wait(), *weight_gradients]


def _add_gradients(
    arrived: Sequence[Tensor], own: Sequence[Tensor], wide: torch.dtype | None
) -> list[Tensor]:
    """Add this rank's gradients of a block to the sum that has arrived from the previous rank.

    The sum has the dtype ``wide``. None means that only the last hop remains, so the sum is rounded to the
    final dtype of the gradients.
    """
    if wide is None:
        return [(x + y).to(y.dtype) for x, y in zip(arrived, own, strict=False)]
    return [x.to(wide) + y for x, y in zip(arrived, own, strict=False)]


def _zeros(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _sink_gradients(sinks: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    """Return the gradient of the sinks (logits in the softmax), each treated as a key whose value is zero."""
    if sinks is None:
        return None
    delta = (out.to(lse.dtype) * dout).sum(-1).mT
    found = -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return found.sum(-1) if found.dim() == 2 else found.sum((0, -1))


def _autocast_now(device: str) -> Callable[[], torch.autocast]:
    """Return a function that creates autocast contexts in the current state, for use in the backward."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled)
