"""The scores of index queries and keys: the definition in torch, and the choice of a kernel for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch.index_scores import kernel, pooled
from ..kv import KVView
from .indexer import Indexer


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """Index keys ``[pages, page, dI]`` in a cache, with a scale ``[pages, page]`` each if they are in fp8.

    ``table`` int32 ``[b, n]`` has the pages of each sequence, whose first ``tokens`` tokens count. Without a
    table, keys are ``[b, t, dI]``.
    """

    keys: Tensor
    scale: Tensor | None
    table: Tensor | None
    tokens: int

    @classmethod
    def of(cls, view: KVView, tokens: int) -> "StoredKeys":
        """Return the index keys of a view, which has one index head."""
        scale = None if view.index_scale is None else view.index_scale.squeeze(-1)
        return cls(view.index.squeeze(-2), scale, view.table, tokens)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the keys if they were gathered, ``[b, t, dI]``."""
        return self.table.shape[0], self.tokens, self.keys.shape[-1]


AnyKeys = Tensor | StoredKeys


def index_scores(
    queries: Tensor,
    keys: AnyKeys,
    weights: Tensor | None,
    ends: Tensor,
    indexer: Indexer,
    starts: Tensor | None = None,
) -> Tensor:
    """Return the scores ``[b, s, c, t]`` of queries for keys; they are -inf for keys that a query cannot see.

    ``queries`` are ``[b, s, HI, dI]``, ``keys`` ``[b, t, dI]`` and ``weights`` ``[b, s, HI]`` or None. A
    query sees the keys before its number in ``ends``, int32 ``[b, s]``, from ``starts`` int32 ``[b]`` on.
    With ``pool="max"``, the scores are those of blocks. They are fp32, or fp64 for fp64 queries, and have no
    gradient. Keys in a cache are read by a kernel only.
    """
    size = indexer.block_size if indexer.pool == "max" else 1
    stored = keys if isinstance(keys, StoredKeys) else StoredKeys(keys, None, None, keys.shape[1])
    if (run := kernel(queries, stored.keys)) is not None:
        options = indexer.score_scale, indexer.activation is not None, indexer.per == "group"
        by_kernel = pooled(queries, size)
        of_keys = ends, starts, stored.table, stored.scale
        scores = run(queries, stored.keys, weights, *of_keys, *options, by_kernel, stored.tokens)
        return scores if by_kernel == size else block_maxima(scores, size)
    grouped = queries.unflatten(2, (indexer.lists, -1))
    with torch.autocast(queries.device.type, enabled=False):
        products = torch.einsum("bscfd,btd->bscft", widened(grouped), widened(keys))
        scores = combined(products, weights, indexer)
    place = torch.arange(keys.shape[1], device=keys.device)
    hidden = place >= ends[..., None]
    if starts is not None:
        hidden = hidden | (place < starts[:, None, None])
    return block_maxima(scores.masked_fill_(hidden[:, :, None], -torch.inf), size)


def reads_stored(queries: Tensor, view: KVView, indexer: Indexer) -> bool:
    """True if a kernel reads the index keys of a view in place; the means of blocks need all of them."""
    return indexer.pool != "mean" and kernel(queries, view.index) is not None


def combined(products: Tensor, weights: Tensor | None, indexer: Indexer) -> Tensor:
    """Return the scores ``[..., c, t]`` of products ``[..., c, f, t]`` and weights ``[..., HI]``.

    There are ``c * f`` index heads. This definition is differentiable.
    """
    products = products if indexer.activation is None else products.relu()
    if weights is None:
        return products.sum(-2) * indexer.score_scale
    factors = weights.unflatten(-1, (indexer.lists, -1)).to(products.dtype) * indexer.score_scale
    return torch.einsum("...cft,...cf->...ct", products, factors)


def bytes_per_query(queries: Tensor, keys: AnyKeys, indexer: Indexer) -> int:
    """Return how many bytes :func:`index_scores` takes for one query of each sequence and all keys."""
    (b, t, _), size = keys.shape, indexer.block_size if indexer.pool == "max" else 1
    if kernel(queries, keys.keys if isinstance(keys, StoredKeys) else keys) is not None:
        return 4 * b * indexer.lists * -(-t // pooled(queries, size))
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
