"""The scores of index queries and keys: the definition in torch, and the choice of a kernel for them."""

import torch
from torch import Tensor

from ..dispatch.index_scores import kernel, pooled
from .indexer import Indexer


def index_scores(
    queries: Tensor, keys: Tensor, weights: Tensor | None, ends: Tensor, indexer: Indexer
) -> Tensor:
    """Return the scores ``[b, s, c, t]`` of queries for keys; they are -inf for keys that a query cannot see.

    ``queries`` are ``[b, s, HI, dI]``, ``keys`` ``[b, t, dI]`` and ``weights`` ``[b, s, HI]`` or None. A
    query sees the keys before its number in ``ends``, int32 ``[b, s]``. With ``pool="max"``, the scores are
    those of blocks. They are fp32, or fp64 for fp64 queries, and have no gradient.
    """
    size = indexer.block_size if indexer.pool == "max" else 1
    if (run := kernel(queries, keys)) is not None:
        options = indexer.score_scale, indexer.activation is not None, indexer.per == "group"
        by_kernel = pooled(keys, size)
        scores = run(queries, keys, weights, ends, *options, by_kernel)
        return scores if by_kernel == size else block_maxima(scores, size)
    grouped = queries.unflatten(2, (indexer.lists, -1))
    with torch.autocast(queries.device.type, enabled=False):
        products = torch.einsum("bscfd,btd->bscft", widened(grouped), widened(keys))
        scores = combined(products, weights, indexer)
    hidden = torch.arange(keys.shape[1], device=keys.device) >= ends[..., None]
    return block_maxima(scores.masked_fill_(hidden[:, :, None], -torch.inf), size)


def combined(products: Tensor, weights: Tensor | None, indexer: Indexer) -> Tensor:
    """Return the scores ``[..., c, t]`` of products ``[..., c, f, t]`` and weights ``[..., HI]``.

    There are ``c * f`` index heads. This definition is differentiable.
    """
    products = products if indexer.activation is None else products.relu()
    if weights is None:
        return products.sum(-2) * indexer.score_scale
    factors = weights.unflatten(-1, (indexer.lists, -1)).to(products.dtype) * indexer.score_scale
    return torch.einsum("...cft,...cf->...ct", products, factors)


def bytes_per_query(queries: Tensor, keys: Tensor, indexer: Indexer) -> int:
    """Return how many bytes :func:`index_scores` takes for one query of each sequence and all keys."""
    (b, t, _), size = keys.shape, indexer.block_size if indexer.pool == "max" else 1
    if kernel(queries, keys) is not None:
        return 4 * b * indexer.lists * -(-t // pooled(keys, size))
    return 2 * widened(queries[:0]).itemsize * b * t * (indexer.heads + 1)


def block_maxima(scores: Tensor, size: int) -> Tensor:
    """Return the largest score of each block of ``size`` keys, of which the last may be incomplete."""
    if size == 1:
        return scores
    whole = scores.shape[-1] // size * size
    blocks = scores[..., :whole].unflatten(-1, (-1, size)).amax(-1)
    if whole == scores.shape[-1]:
        return blocks
    return torch.cat((blocks, scores[..., whole:].amax(-1, keepdim=True)), -1)


def widened(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
