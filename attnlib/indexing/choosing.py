"""The choice of keys: score all keys that a query sees, and list the entries with the largest scores."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..internal.checks import bind, came
from .indexer import Indexer
from .scores import AnyKeys, StoredKeys, bytes_per_query, index_scores, widened

BUDGET = 1 << 29  # bytes of scores at a time: those of 4k queries and 32k keys
Finish = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def choose(
    queries: Tensor,
    keys: AnyKeys,
    weights: Tensor | None,
    indexer: Indexer,
    *,
    finish: Finish | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Return the lists of keys, or blocks, that an indexer chooses: int32 ``[b, s, c, n]``.

    ``queries`` are ``[b, s, HI, dI]``, ``keys`` ``[b, t, dI]`` and ``weights`` ``[b, s, HI]`` or None, as an
    :class:`IndexBranch` returns them; its ``finish`` is needed for ``norm_after_pool``. The queries are the
    last ``s`` of ``t`` tokens, or of ``lengths`` int32 ``[b]`` tokens, whose later keys do not count; each
    sees the keys up to itself. Blocks that end before ``starts`` int32 ``[b]`` are left padding: they, like
    keys after the query, are chosen only where nothing else is left, and the attention must mask them. Packed
    queries ``[s, HI, dI]`` and keys ``[t, dI]`` have int32 offsets ``[b + 1]``, which are read from the
    device; their lists are ``[s, c, n]``. Keys of a cache are read in place where :func:`reads_stored` is
    true.

    The lists are those of :func:`attnlib.masks.selected` with ``indexer.block_size``. Entries stand on the
    left, in any order, and -1 stands for no entry. A query that sees at most ``top`` blocks gets all of them.
    Of equal scores, the lower position wins (on a GPU, as ``torch.topk`` chooses). Scores are computed for
    some queries at a time, so that they take at most ``budget`` bytes, unless those of one query take more.

    Raises:
        TypeError: queries and keys have different dtypes.
        ValueError: shapes do not fit, only one of the offsets is given, or ``finish`` is missing.
    """
    check(queries, keys, weights, indexer, finish)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    for name, x in (("lengths", lengths), ("starts", starts)):
        if x is not None and (packed or x.shape != keys.shape[:1] or x.dtype != torch.int32):
            expected = "None for packed keys" if packed else f"int32 [b={keys.shape[0]}]"
            raise ValueError(f"{name}: expected {expected}, got {came(x)}")
    if not packed:
        return _choose(queries, keys, weights, indexer, finish, _Bounds(lengths, starts), budget)
    lists = _no_entries(queries, indexer, keys.shape[0])
    for rows, of_keys in packed_sequences(cu_seqlens_q, cu_seqlens_k):
        own_weights = None if weights is None else weights[None, rows]
        own = _choose(
            queries[None, rows], keys[None, of_keys], own_weights, indexer, finish, _Bounds(), budget
        )
        lists[rows, :, : own.shape[-1]] = own[0]
    return lists


class _Bounds(NamedTuple):
    """The keys ``[starts, lengths)`` of each sequence, int32 ``[b]``; None for the first or the last key."""

    lengths: Tensor | None = None
    starts: Tensor | None = None


def packed_sequences(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each packed sequence; the offsets are read from the device.

    Raises:
        ValueError: only one of the offsets is given, or they are not of equally many sequences.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError("cu_seqlens_k: expected offsets [b + 1] of keys like cu_seqlens_q, got another form")
    of_q, of_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    bounds = zip(of_q, of_q[1:], of_k, of_k[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in bounds if b > a]


def block_keys(keys: AnyKeys, indexer: Indexer, finish: Finish | None) -> AnyKeys:
    """Return the keys that scores are computed with: ``keys``, or the means of complete blocks of them."""
    if indexer.pool != "mean":
        return keys
    size = indexer.block_size
    blocks = keys[:, : keys.shape[1] // size * size].unflatten(1, (-1, size))
    pooled = blocks.mean(2, dtype=widened(keys[:0]).dtype).to(keys.dtype)
    if not indexer.norm_after_pool:
        return pooled
    return finish(pooled, torch.arange(pooled.shape[1], device=keys.device) * size)


def check(
    queries: Tensor,
    keys: AnyKeys,
    weights: Tensor | None,
    indexer: Indexer,
    finish: Finish | None,
) -> None:
    """Raise ValueError or TypeError unless index tensors fit each other and the indexer."""
    named = [("queries", queries, "bshd" if queries.dim() == 4 else "shd")]
    named += [("keys", keys, "btd" if queries.dim() == 4 else "td")]
    if weights is not None:
        named += [("weights", weights, "bsh" if queries.dim() == 4 else "sh")]
    bind(*named, known={"h": indexer.heads, "d": indexer.head_dim})
    if isinstance(keys, Tensor) and keys.dtype != queries.dtype:
        raise TypeError(f"keys: expected {queries.dtype} like queries, got {keys.dtype}")
    if (weights is not None) != indexer.weighted:
        expected, got = ("None", "some") if weights is not None else ("a tensor", "None")
        raise ValueError(f"weights: expected {expected} for weighted={indexer.weighted}, got {got}")
    if indexer.norm_after_pool and finish is None:
        raise ValueError("finish: expected IndexBranch.finish for norm_after_pool, got None")


def _no_entries(queries: Tensor, indexer: Indexer, tokens: int) -> Tensor:
    """Allocate lists without entries, no longer than those over ``tokens`` keys can be."""
    blocks = -(-tokens // indexer.block_size)
    width = min(indexer.entries, blocks)
    return queries.new_full((*queries.shape[:-2], indexer.lists, width), -1, dtype=torch.int32)


def _choose(
    queries: Tensor,
    keys: AnyKeys,
    weights: Tensor | None,
    indexer: Indexer,
    finish: Finish | None,
    bounds: _Bounds,
    budget: int,
) -> Tensor:
    """Return the lists of dense queries and keys, for some queries at a time."""
    lengths = bounds.lengths
    (b, s), t, size = queries.shape[:2], keys.shape[1], indexer.block_size
    if s > t:
        raise ValueError(f"keys: expected at least the s={s} tokens of the queries, got t={t}")
    scored, lists = block_keys(keys, indexer, finish), _no_entries(queries, indexer, t)
    tokens = torch.arange(1 - s, 1, device=queries.device, dtype=torch.int32)
    seen = (tokens + t)[None].expand(b, s) if lengths is None else lengths[:, None] + tokens
    rows = max(1, budget // max(1, bytes_per_query(queries, scored, indexer)))
    for start in range(0, s, rows):
        stop = min(s, start + rows)
        last = t if lengths is not None else t - s + stop  # no query of this chunk sees later keys
        if -(-last // size) > indexer.top:
            own = first_keys(scored, last // size if indexer.pool == "mean" else last)
            part = slice(start, stop)
            own_weights = None if weights is None else weights[:, part]
            found = _chunk(queries[:, part], own, own_weights, seen[:, part], bounds.starts, indexer)
        else:
            found = _all_blocks(seen[:, start:stop], lists.shape[-1], size).expand(-1, -1, lists.shape[2], -1)
        lists[:, start:stop, :, : found.shape[-1]] = found
    return lists


def first_keys(keys: AnyKeys, count: int) -> AnyKeys:
    """Return the first keys of each sequence."""
    return replace(keys, tokens=count) if isinstance(keys, StoredKeys) else keys[:, :count]


def _all_blocks(seen: Tensor, width: int, size: int) -> Tensor:
    """Return lists ``[b, s, 1, width]`` of all blocks that a query sees, in which there is place for them."""
    places = torch.arange(width, device=seen.device, dtype=torch.int32)
    return torch.where(places * size < seen[..., None], places, -1)[:, :, None]


def candidates_of(seen: Tensor, indexer: Indexer) -> Tensor:
    """Return the number of blocks that compete for a list, for queries that see ``seen`` keys each."""
    size = indexer.block_size
    return (seen if indexer.tail else seen + size - 1).clamp(min=0) // size


def _chunk(
    queries: Tensor,
    scored: AnyKeys,
    weights: Tensor | None,
    seen: Tensor,
    starts: Tensor | None,
    indexer: Indexer,
) -> Tensor:
    """Return the lists of some queries, of which one may see more than ``top`` blocks."""
    size, candidates = indexer.block_size, candidates_of(seen, indexer)
    ends = candidates if indexer.pool == "mean" else candidates * size if indexer.tail else seen
    of_tokens = None if indexer.pool == "mean" else starts
    scores = index_scores(queries, scored, weights, ends.int(), indexer, of_tokens)
    scores[..., : indexer.first] = torch.inf
    if indexer.local:
        back = torch.arange(1, indexer.local + 1, device=seen.device)
        local = (candidates[..., None] - back).clamp(min=0)[:, :, None]
        scores.scatter_(-1, local.long().expand(-1, -1, scores.shape[2], -1), torch.inf)
    if starts is not None:
        ends = torch.arange(1, scores.shape[-1] + 1, device=seen.device) * size
        scores.masked_fill_((ends <= starts[:, None])[:, None, None], -torch.inf)
    best = largest(scores, min(indexer.top, scores.shape[-1])).int()
    if indexer.tail:
        own = torch.where(seen % size != 0, seen // size, -1)
        best = torch.cat((best, own[..., None, None].expand(-1, -1, best.shape[2], 1).int()), -1)
    every = _all_blocks(seen, best.shape[-1], size)
    return torch.where((candidates <= indexer.top)[..., None, None], every, best)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` largest scores, in any order; of equal ones, the lower places.

    On a GPU, torch.topk lists what is above the last score, and then equal ones from the left. On a CPU it
    takes any of them, so rows in which some are left over are sorted.
    """
    if torch.compiler.is_compiling() and not scores.is_cuda:  # compiled code cannot read which rows are left
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    values, places = scores.topk(count, -1, sorted=False)
    if scores.is_cuda:
        return places
    least = values.amin(-1, keepdim=True)
    equal = (scores == least).sum(-1) > (values == least).sum(-1)
    left_over = equal & (least[..., 0] > -torch.inf)
    if left_over.any():
        order = scores[left_over].sort(dim=-1, descending=True, stable=True).indices
        places[left_over] = order[..., :count]
    return places
