"""Every rank computes some heads of all tokens: ranks exchange tokens for heads before attention, and back
after it.

DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509).
"""

from typing import Any

import torch
from torch import Tensor

from ..call.call import Call, Origin
from ..dispatch.run import ExplainOnly, attend
from ..masks.band import Mask
from .exchange import exchanged
from .sharding import Sharing, dealt, joined
from .source import KeyValueSource


def unshared(q_heads: int, kv_heads: int, ranks: int) -> list[str]:
    """Why ranks cannot share these heads."""
    named = {"q": q_heads, "k": kv_heads}
    return [
        f"{x}: expected heads that {ranks} ranks can share, got {n}" for x, n in named.items() if n % ranks
    ]


def heads(call: Call, sharing: Sharing, name: str | ExplainOnly | None, source: KeyValueSource) -> Tensor:
    """The output of this rank's tokens, whose heads other ranks have computed.

    Raises:
        ValueError: ranks cannot share the heads evenly.
    """
    q, (k, v) = call.q, source.expand(*source.tensors)
    if reasons := unshared(q.shape[-2], k.shape[-2], sharing.ranks):
        raise ValueError(f"{reasons[0]}; use another form")
    count = q.shape[-2] // sharing.ranks
    first = sharing.rank * count
    tensors = {x: y.narrow(-1, first, count) for x, y in call.score.tensors.items()}
    call = call._replace(score=call.score._replace(**tensors), origin=_origin(call, first))
    if isinstance(name, ExplainOnly):
        q, k, v = (_alike(x, sharing.ranks) for x in (q, k, v))
        attend(call._replace(q=q, k=k, v=v), name)
        return call.q.new_zeros(*call.q.shape[:-1], v.shape[-1])
    q, k, v = (_Moved.apply(x, sharing, True) for x in (q, k, v))
    out, _ = attend(call._replace(q=q, k=k, v=v), name)
    return _Moved.apply(out, sharing, False)


def _origin(call: Call, first: int) -> Origin:
    """Where heads begin, for those who count them: kernels of a known chip take calls without an origin
    alone.
    """
    counts = bool(call.dropout.p) or call.score.function is not None or not isinstance(call.mask, Mask)
    return call.origin._replace(head=call.origin.head + first) if counts else call.origin


class _Moved(torch.autograd.Function):
    """From tokens here of all heads to all tokens of the heads here, or the other way, in which a gradient
    returns.
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
    """From ``[b, tokens here, h, d]``, or packed ``[tokens here, h, d]``, to all tokens of the heads here."""
    batched = x if x.dim() == 4 else x.unsqueeze(0)
    parts = exchanged(batched.unflatten(2, (sharing.ranks, -1)).permute(2, 1, 0, 3, 4), sharing.group)
    x_of_heads = joined(parts, zigzag=sharing.zigzag).transpose(0, 1)
    return x_of_heads if x.dim() == 4 else x_of_heads.squeeze(0)


def _heads(x: Tensor, sharing: Sharing) -> Tensor:
    """From all tokens of the heads here to the tokens here of all heads."""
    batched = x if x.dim() == 4 else x.unsqueeze(0)
    parts = exchanged(dealt(batched.transpose(0, 1), sharing.ranks, zigzag=sharing.zigzag), sharing.group)
    x_of_tokens = parts.permute(2, 1, 0, 3, 4).flatten(2, 3)
    return x_of_tokens if x.dim() == 4 else x_of_tokens.squeeze(0)


def _alike(x: Tensor, ranks: int) -> Tensor:
    """Something of the shape of all tokens and the heads here."""
    *batch, tokens, heads, width = x.shape
    return x.new_zeros(1).expand(*batch, tokens * ranks, heads // ranks, width)
