"""A drop-in replacement for torch's ``scaled_dot_product_attention``."""

import torch
from torch import Tensor

from ..call.call import Call, Dropout
from ..dispatch.run import attend
from ..internal.checks import came
from ..internal.signatures import kind
from ..masks.band import CAUSAL, FULL, AnyMask
from ..masks.ready_made import mask_tensor
from ..scores import Score, ScoreFunction, bias_tensor


@kind
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of query ``[..., h, s, d]`` over key ``[..., g, t, d]`` and value ``[..., g, t, e]``.

    Returns ``[..., h, s, e]``, like ``torch.nn.functional.scaled_dot_product_attention``. ``is_causal``
    aligns the first query with the first key. A bool ``attn_mask`` is True for visible keys; a float mask is
    added to the scores and may require gradients. Both broadcast to ``[..., h, s, t]``. Fewer key heads than
    query heads need ``enable_gqa``. A query that sees no key returns 0. The dropout pattern differs from
    torch's.

    Raises:
        ValueError, TypeError: shapes do not broadcast, or both ``is_causal`` and ``attn_mask`` are given.

    >>> q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, expected, atol=1e-6)
    True
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() < 2:
            raise ValueError(f"{name}: expected [..., heads, tokens, channels], got {came(x)}")
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attn_mask: expected None with is_causal=True, as in torch; make the mask itself causal"
        )
    rank = max(x.dim() for x in (query, key, value))
    q, k, v = (x.reshape(*[1] * (max(rank, 4) - x.dim()), *x.shape) for x in (query, key, value))
    heads = q.shape[-3]
    if not enable_gqa:
        heads = _one("heads", [x.shape[-3] for x in (q, k, v)])
        q, k, v = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (q, k, v))
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4).transpose(1, 2) for x in (q, k, v))
    s, t = q.shape[1], k.shape[1]
    mask, score = _masked(attn_mask, (*lead, heads, s, t), CAUSAL.shift(s - t) if is_causal else FULL)
    call = Call(q, mask, Score(scale, function=score), k, v, dropout=Dropout(dropout_p))
    out = attend(call)[0].transpose(1, 2)
    # Inputs of lower rank were extended to four dimensions; remove the extra ones from the output.
    return out.reshape(*(*lead, heads)[max(0, 4 - rank) :], s, v.shape[-1])


def _masked(
    given: Tensor | None, shape: tuple[int, ...], band: AnyMask
) -> tuple[AnyMask, ScoreFunction | None]:
    """Convert torch's ``attn_mask`` to attnlib's mask and score function; ``shape`` is that of the scores."""
    if given is None:
        return band, None
    given = given.reshape(*[1] * (len(shape) - given.dim()), *given.shape)
    if len(shape) > 4:  # merge the batch dimensions, because attnlib has only one
        given = given.expand(*shape[:-3], *given.shape[-3:]).flatten(0, -4)
    for have, want in zip(reversed(given.shape), reversed(shape), strict=False):
        if have not in (1, want) and len(shape) == 4:
            raise ValueError(
                f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(given.shape)}"
            )
    return (mask_tensor(given), None) if given.dtype == torch.bool else (band, bias_tensor(given))


def _one(name: str, sizes: list[int]) -> int:
    """Return the size to which all ``sizes`` of one dimension broadcast."""
    found = {size for size in sizes if size != 1} or {1}
    if len(found) > 1:
        raise ValueError(
            f"{name}: expected the same number in query, key and value, got {sizes}; "
            "pass enable_gqa=True for grouped heads"
        )
    return found.pop()
