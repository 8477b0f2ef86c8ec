"""Context parallelism by heads: every rank computes attention for some of the heads, over all tokens.

Before attention, ranks exchange their tokens of all heads for all tokens of their own heads; after attention,
they exchange the outputs back. This is DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).
"""

from typing import Any

import torch
from torch import Tensor

from ..call.call import Call, Origin
from ..dispatch.run import ExplainOnly, Interceptor, Runner, attend
from ..masks.band import Mask
from .exchange import exchanged
from .sharding import Sharing, joined, sharded
from .source import KeyValueSource


def unshared(q_heads: int, kv_heads: int, ranks: int) -> list[str]:
    """Return why ``ranks`` ranks cannot divide the heads evenly; the list is empty if they can."""
    named = {"q": q_heads, "k": kv_heads}
    return [
        f"{x}: expected heads that {ranks} ranks can share, got {n}" for x, n in named.items() if n % ranks
    ]


def heads(call: Call, sharing: Sharing, name: Runner, source: KeyValueSource) -> Tensor:
    """Return the attention output of this rank's tokens, while each rank computes some of the heads.

    Raises:
        ValueError: the ranks cannot divide the heads evenly.
    """
    q, (k, v) = call.q, source.expand(*source.tensors)
    if reasons := unshared(q.shape[-2], k.shape[-2], sharing.ranks):
        raise ValueError(f"{reasons[0]}; use another form")
    count = q.shape[-2] // sharing.ranks
    first = sharing.rank * count
    tensors = {x: y.narrow(-1, first, count) for x, y in call.score.tensors.items()}
    call = call._replace(score=call.score._replace(**tensors), origin=_origin(call, first))
    if isinstance(name, ExplainOnly):
        q, k, v = (_placeholder(x, sharing.ranks) for x in (q, k, v))
        attend(call._replace(q=q, k=k, v=v), name)
        return call.q.new_zeros(*call.q.shape[:-1], v.shape[-1])
    if isinstance(name, Interceptor):
        name = name.from_head(first)
    q, k, v = (_ExchangeHeads.apply(x, sharing, True) for x in (q, k, v))
    out, _ = attend(call._replace(q=q, k=k, v=v), name)
    return _ExchangeHeads.apply(out, sharing, False)


def _origin(call: Call, first: int) -> Origin:
    """Return the call's origin (offsets of indices), with this rank's first head if results depend on heads.

    This is so with dropout and with mask or score functions. Otherwise the origin does not change, since
    kernels for a specific chip only accept calls without one.
    """
    counts = bool(call.dropout.p) or call.score.function is not None or not isinstance(call.mask, Mask)
    return call.origin._replace(head=call.origin.head + first) if counts else call.origin


class _ExchangeHeads(torch.autograd.Function):
    """The exchange between sharding by tokens and sharding by heads, as an autograd function.

    With ``to_heads=True`` the forward exchanges this rank's tokens of all heads for all tokens of this rank's
    heads; otherwise it does the reverse. The backward exchanges gradients in the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing, to_heads: bool) -> Tensor:
        ctx.sharing, ctx.to_heads = sharing, to_heads
        return _tokens(x, sharing) if to_heads else _heads(x, sharing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = _heads if ctx.to_heads else _tokens
        return back(grad, ctx.sharing), None, None


def _tokens(x: Tensor, sharing: Sharing) -> Tensor:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads.

    The input is ``[b, tokens here, h, d]``, or packed ``[tokens here, h, d]``.
    """
    # The shape of by_rank is [ranks, tokens here, b (if any), h, d].
    by_rank = x.unflatten(-2, (sharing.ranks, -1)).movedim((-3, -4), (0, 1))
    return joined(exchanged(by_rank, sharing.group), zigzag=sharing.zigzag).movedim(0, -3)


def _heads(x: Tensor, sharing: Sharing) -> Tensor:
    """Exchange all tokens of this rank's heads for this rank's tokens of all heads."""
    # The shape of by_rank is [ranks, tokens here, b (if any), h, d].
    by_rank = sharded(x.movedim(-3, 0), sharing.ranks, zigzag=sharing.zigzag)
    return exchanged(by_rank, sharing.group).movedim((1, 0), (-4, -3)).flatten(-3, -2)


def _placeholder(x: Tensor, ranks: int) -> Tensor:
    """Return zeros in the shape that x has after the exchange to heads, for a call that is only explained."""
    *batch, tokens, heads, width = x.shape
    return x.new_zeros(1).expand(*batch, tokens * ranks, heads // ranks, width)
