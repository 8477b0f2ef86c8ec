"""The definition of attention for one sequence, in which a query only reads the keys that it sees."""

from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    change: Callable[[Tensor, int, Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention for one sequence; return output ``[s, h, e]`` and natural-log LSE ``[h, s]``.

    The inputs are q ``[s, h, d]``, k ``[t, g, d]`` and v ``[t, g, e]``. The steps are, in this order:

    - ``scale`` multiplies the scores, and ``softcap`` bounds them.
    - ``bias`` ``[h, s, t]`` is added.
    - ``change(scores, i, keys)`` maps the scores ``[h, n]`` of query ``i`` and keys ``[n]`` to new ones.
    - ``visible``, bool ``[s, t]`` or ``[h, s, t]``, hides keys.
    - ``sinks`` ``[h]`` join the softmax as logits without a value.
    - ``weight`` ``[h, s, t]`` multiplies the probabilities (dropout).

    The computation is in fp32, or in fp64 for fp64 inputs, one query at a time. It only reads the keys that
    the query sees, so hidden keys affect neither the output nor a gradient.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    queries, keys, values = q.to(wide), k.to(wide), v.to(wide)
    out, lse = [], []
    for i in range(q.shape[0]):
        own = visible[..., i, :]
        seen = (own if own.dim() == 1 else own.any(0)).nonzero()[:, 0]
        # Query head h reads KV head h // group.
        heads = queries[i].unflatten(0, (-1, group))
        logits = scale * torch.einsum("gfd,tgd->gft", heads, keys[seen]).flatten(0, 1)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[:, i, seen]
        logits = logits if change is None else change(logits, i, seen)
        logits = logits if own.dim() == 1 else logits.masked_fill(~own[:, seen], -torch.inf)
        summed = logits if sinks is None else torch.cat((logits, sinks.to(wide)[:, None]), 1)
        lse.append(_logsumexp(summed))
        weights = torch.exp(logits - lse[-1].masked_fill(lse[-1] == -torch.inf, 0)[:, None])
        if weight is not None:
            weights = weights * weight[:, i, seen]
        out.append(
            torch.einsum("gft,tge->gfe", weights.unflatten(0, (-1, group)), values[seen]).flatten(0, 1)
        )
    if not out:
        # This sum of empty tensors makes autograd see that the output depends on all inputs.
        zero = queries.sum(-1) + keys[..., :0].sum() + values[..., :0].sum()
        return zero[..., None].expand(-1, -1, v.shape[-1]).to(q.dtype), zero.mT
    return torch.stack(out).to(q.dtype), torch.stack(lse, 1)


def _logsumexp(x: Tensor) -> Tensor:
    """Return ``log(sum(exp(x)))`` over the last dimension.

    If there are no elements, or all are -inf, the result is -inf and its gradient is zero.
    """
    if not x.shape[-1]:
        return x.sum(-1) - torch.inf
    nothing = (x == -torch.inf).all(-1)
    return torch.logsumexp(x.masked_fill(nothing[..., None], 0), -1).masked_fill(nothing, -torch.inf)
