"""The loss that trains index scores to follow the probabilities of the layer's attention."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from ..call.call import Call
from ..call.statistic import Statistic, first_column
from ..dispatch.statistics import compute
from ..internal.checks import bind
from ..masks.band import CAUSAL
from ..scores import Score
from .branch import IndexTensors
from .choosing import Finish, block_keys, candidates_of, check, packed_sequences
from .chosen import keys_of
from .indexer import Indexer
from .scores import block_maxima, combined, widened

if TYPE_CHECKING:  # importing torch.distributed takes longer than importing attnlib
    from torch.distributed import ProcessGroup

BUDGET = 1 << 30  # bytes of probabilities, and of products of index heads, at a time


class MainAttention(NamedTuple):
    """The causal attention call that an index branch learns from.

    Queries are ``[b, s, h, d]``, keys ``[b, t, g, d]`` and the LSE ``[b, h, s]``; packed without ``b``. The
    queries are the last ``s`` of ``t`` tokens. The score has numbers only; sinks are part of the LSE.
    ``group`` has the ranks with the other heads of this layer, in tensor parallelism.
    """

    q: Tensor
    k: Tensor
    lse: Tensor
    score: Score = Score()
    group: "ProcessGroup | None" = None


def index_loss(
    index: IndexTensors,
    main: MainAttention,
    indexer: Indexer,
    *,
    chosen: Tensor | None = None,
    finish: Finish | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    budget: int = BUDGET,
) -> Tensor:
    """Return ``KL(p || softmax over C of I)``, the mean over queries that see a key.

    ``p`` are the probabilities of the main attention: the mean over its heads, or those of a KV head for its
    own lists, summed up over the keys of a block, and normalized over C. ``I`` are the index scores. C is
    every block that has a score and that the query sees (warm-up), or those in the lists ``chosen``
    ``[b, s, c, n]``. With ``chosen``, the main attention may be one over the same lists; its LSE says so.
    A query with lists for each KV head counts once for each.

    The loss is a differentiable fp32 (or fp64) number. It trains the index branch only: it has no gradient
    for the main attention, and :class:`IndexBranch` detaches its inputs. The forward pass computes the
    gradients as well, for some queries at a time, so that no more than about ``budget`` bytes are taken at
    once; there is no second derivative. Packed tensors have no ``b``, and int32 offsets, which are read from
    the device.

    The formula is that of DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv 2512.02556, equations 3 and 4).

    Raises:
        TypeError: index queries and keys have different dtypes.
        ValueError: shapes do not fit, only one of the offsets is given, or ``finish`` is missing.
        NotImplementedError: the score has tensors or a function.
    """
    _check(index, main, indexer, chosen, finish)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        b, n = index.queries.shape[0], _Sequences(main, indexer, chosen, budget).together(index.keys.shape[1])
        rows = [(x, x, x) for x in (slice(at, at + n) for at in range(0, b, n))]
    else:
        rows = [
            ((None, q), (None, k), (None, slice(None), q))
            for q, k in packed_sequences(cu_seqlens_q, cu_seqlens_k)
        ]
    kl, count = widened(index.queries[:0]).new_zeros(()), 0
    for of_q, of_k, of_lse in rows:
        lists = None if chosen is None else chosen[of_q]
        own = main._replace(q=main.q[of_q], k=main.k[of_k], lse=main.lse[of_lse])
        sequences = _Sequences(own, indexer, lists, budget)
        scored = block_keys(index.keys[of_k], indexer, finish)
        weights = None if index.weights is None else index.weights[of_q]
        kl = kl + _Divergence.apply(sequences, index.queries[of_q], scored, weights)
        count = count + sequences.counted().sum()
    return kl / torch.as_tensor(count, device=kl.device).clamp(min=1)


def _check(
    index: IndexTensors, main: MainAttention, indexer: Indexer, chosen: Tensor | None, finish: Finish | None
) -> None:
    check(index.queries, index.keys, index.weights, indexer, finish)
    dense = "b" * (index.queries.dim() == 4)
    sizes = dict(zip(f"{dense}s", index.queries.shape, strict=False))
    sizes["t"] = index.keys.shape[-2]
    named = [("q", main.q, f"{dense}shd"), ("k", main.k, f"{dense}tgd"), ("lse", main.lse, f"{dense}hs")]
    if chosen is not None:
        named.append(("chosen", chosen, f"{dense}scn"))
    bind(*named, known=sizes | {"c": indexer.lists})
    if found := [*main.score.tensors, *["score"] * (main.score.function is not None)]:
        raise NotImplementedError(f"index_loss: expected a score of numbers only, got {', '.join(found)}")
    if indexer.lists not in (1, main.k.shape[-2]):
        raise ValueError(
            f"indexer.heads: expected the {main.k.shape[-2]} KV heads of k with per='group', got "
            f"{indexer.heads}"
        )


class _Sequences(NamedTuple):
    """Sequences of equal length: their main attention with ``b``, and lists ``[b, s, c, n]`` or None."""

    main: MainAttention
    indexer: Indexer
    lists: Tensor | None
    budget: int

    @property
    def seen(self) -> Tensor:
        """The number of keys that each query sees, ``[s]``."""
        s, t = self.main.q.shape[1], self.main.k.shape[1]
        return torch.arange(t - s + 1, t + 1, device=self.main.q.device)

    def counted(self) -> Tensor:
        """Return the queries that see a key and have a scored block in C, bool ``[b, s, c]``."""
        candidates = candidates_of(self.seen, self.indexer)[:, None]
        sees = (self.main.lse > -torch.inf).any(1)[..., None]
        if self.lists is None:
            return (sees & (candidates > 0)).expand(-1, -1, self.indexer.lists)
        return sees & ((self.lists >= 0) & (self.lists < candidates[..., None])).any(-1)

    def together(self, scored: int) -> int:
        """Return how many sequences fit in the budget whole, at least 1, for this number of scored keys."""
        return max(1, self.budget // max(1, self.main.q.shape[1] * self._bytes_per_query(scored)))

    def chunks(self, scored: int) -> list[slice]:
        """Return the rows of each chunk, given the number of keys with a score; no rows if it is 0."""
        b, s = self.main.q.shape[:2]
        step = max(1, self.budget // max(1, b * self._bytes_per_query(scored)))
        return [slice(n, min(s, n + step)) for n in range(0, s if scored else 0, step)]

    def _bytes_per_query(self, scored: int) -> int:
        heads, t, indexer = self.main.q.shape[-2], self.main.k.shape[-3], self.indexer
        each = heads * t + 4 * indexer.heads * scored  # probabilities, and products with their gradients
        if self.lists is not None:  # gathered keys with their gradients, and products with theirs
            keys = self.lists.shape[-2:].numel() * indexer.block_size
            each = keys * (2 * indexer.head_dim + 4 * indexer.heads // indexer.lists)
        return 4 * each

    def divergence(self, rows: slice, queries: Tensor, scored: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of the divergences of some rows; it is differentiable in their index tensors."""
        size, seen = self.indexer.block_size, self.seen[rows]
        candidates = candidates_of(seen, self.indexer)[:, None, None]
        grouped = widened(queries).unflatten(2, (self.indexer.lists, -1))
        last = self.main.k.shape[1] - self.main.q.shape[1] + rows.stop
        if self.lists is None:
            scored = widened(scored[:, : last // size if self.indexer.pool == "mean" else last])
            products = torch.einsum("bscfd,btd->bscft", grouped, scored)
            j = torch.arange(scored.shape[1], device=seen.device)[None, None]
            blocks = torch.arange(-(-last // size), device=seen.device)[None, None]
        else:
            blocks = self.lists[:, rows].long()
            j = blocks if self.indexer.pool == "mean" else keys_of(blocks, size)
            n = torch.arange(len(j), device=j.device)[:, None, None, None]
            keys = scored[n, j.clamp(0, scored.shape[1] - 1)]
            products = torch.einsum("bscfd,bscnd->bscfn", grouped, widened(keys))
        scores = combined(products, weights, self.indexer)
        if self.indexer.pool == "max":
            hidden = (j < 0) | (j >= seen[:, None, None])
            scores = block_maxima(scores.masked_fill(hidden, -torch.inf), size)
        valid = (blocks >= 0) & (blocks < candidates)
        count = scores.shape[-1]  # an incomplete block has no mean
        return _kl(self._probabilities(rows, last)[..., :count], scores, valid[..., :count])

    def _probabilities(self, rows: slice, last: int) -> Tensor:
        """Return the probabilities of listed keys, or of all, summed over blocks: ``[b, s, c, n]``."""
        main, lists, size = self.main, self.indexer.lists, self.indexer.block_size
        q, lse = main.q[:, rows].unflatten(2, (lists, -1)), main.lse[:, :, rows].unflatten(1, (lists, -1))
        found = []
        for n in range(lists):  # by the heads that read one list
            k = main.k[:, :last] if lists == 1 else main.k[:, :last, n : n + 1]
            call = Call(q[:, :, n], CAUSAL, main.score, k, first_column(k))
            if self.lists is None:
                every = torch.arange(q.shape[1], device=q.device)
                found.append(compute(call, Statistic("rows", lse[:, n], every)).mean(1))
            else:
                at = keys_of(self.lists[:, rows, n].long(), size)
                at = at.masked_fill(at >= last, -1)
                found.append(compute(call, Statistic("heads", lse[:, n], at=at)))
        p = torch.stack(found, 2)
        if main.group is not None and lists == 1:
            torch.distributed.all_reduce(p, group=main.group)
            p /= main.group.size()
        return F.pad(p, (0, -p.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def _kl(p: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """Return the divergence of p from the softmax of scores, both over ``valid`` entries; the sum of rows."""
    p = torch.where(valid, p, 0).to(scores.dtype)
    p = p / p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    scores = torch.where(valid, scores, -torch.inf)
    scores = torch.where(valid.any(-1, keepdim=True), scores, 0)  # rows without an entry stay finite
    return (torch.xlogy(p, p) - p * scores.log_softmax(-1).masked_fill(~valid, 0)).sum()


class _Divergence(torch.autograd.Function):
    """The divergence of sequences, whose forward pass also computes the gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, sequences: _Sequences, queries: Tensor, scored: Tensor, weights: Tensor | None
    ) -> Tensor:
        given = [queries, scored] + ([] if weights is None else [weights])
        wanted = any(ctx.needs_input_grad)
        total, grads = widened(queries[:0]).new_zeros(()), [torch.zeros_like(widened(x)) for x in given]
        for rows in sequences.chunks(scored.shape[1]):
            own = (slice(None), rows)
            places = [own, slice(None), own][: len(given)]
            leaves = [x.detach()[at].requires_grad_(wanted) for x, at in zip(given, places, strict=True)]
            with torch.set_grad_enabled(wanted), torch.autocast(queries.device.type, enabled=False):
                found = sequences.divergence(rows, *leaves, *[None] * (3 - len(leaves)))
            total += found.detach()
            if wanted:
                parts = torch.autograd.grad(found, leaves)
                for grad, at, part in zip(grads, places, parts, strict=True):
                    grad[at] += part
        ctx.save_for_backward(*grads)
        ctx.dtypes = [x.dtype for x in given]
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "index_loss: expected a backward without create_graph=True, since the loss has no second "
                "derivative"
            )
        saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        grads = [(gradient * grad).to(dtype) for grad, dtype in saved]
        return None, *grads, *[None] * (3 - len(grads))
