"""Replaced layers with an index branch, which choose keys as transformers' own indexers do.

The mask of transformers tells which keys a query sees: it may have holes, and packed sequences. Lists of
single keys hold visible keys only. Blocks count hidden keys too, as in transformers. Attention therefore
applies the mask in addition, and rows may be padded on the right only.
"""

from typing import Any

import torch
from torch import Tensor

from ...functional import attention, cached_attention
from ...indexing import AnyKeys, Chosen, Indexer, IndexTensors, choose, choose_visible, first_keys
from ...kv import KVView
from ...layers.attending import runner_of
from ...layers.tensor_parallel import share_of
from ...masks.band import AnyMask
from ...masks.selection import selected
from ...rope.rope import Angles
from .attention import check_arguments
from .handed import HandedMask
from .latents import absorbed, are_latents, can_absorb, require_absorption, unabsorbed
from .lists import check_padding, check_positions, refuse_offsets
from .pages import pages_of
from .replaced_layers import ReplacedAttention, ReplacedLatentAttention


class ReplacedChoosingAttention(ReplacedAttention):
    """The base of replaced layers that may have an index branch: store index keys, choose, and attend.

    Subclasses attend to the ``lists`` among the arguments of ``_attend``, if these are not None.
    """

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_embeddings: Angles | tuple[Tensor, Tensor] | None = None,
        cache: Any = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return the output for ``hidden_states`` ``[b, s, m]``, and the lists that layers share, if any.

        The model passes the lists to the next layer as ``prev_topk_indices``. If they are None, attention is
        dense.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        lists = prev_topk_indices
        if self.layer.select is not None:
            angles, positions = self._index_angles(position_embeddings), kwargs.get("position_ids")
            lists = self._lists(hidden_states, angles, cache, attention_mask, positions)
        given = {"attention_mask": attention_mask, "position_embeddings": position_embeddings, "cache": cache}
        out, *rest = super().forward(hidden_states, **given, lists=lists, **kwargs)
        return (out, *rest) if self.family.returns == 2 else (out, None, lists)

    @torch.no_grad()
    def _lists(
        self, x: Tensor, angles: Angles | None, cache: Any, mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor | None:
        """Store the index keys of x, and return what is chosen for each query, int32 ``[b, s, c, n]``.

        The result is None while lists would hold all keys.
        """
        branch, select = self.layer.indexer, self.layer.select
        stored = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        end = stored + x.shape[1]  # a new tensor in a static cache, which counts in place
        keys = branch.keys(x, angles)
        keys = keys if cache is None else self._stored_index(keys, cache)
        if select.block_size > 1:
            self._check_blocks(mask, position_ids, end, keys.shape[1])
        if keys.shape[1] <= select.top * select.block_size:
            return None
        latent = self.layer.query_source(x) if select.source == "latent" else None
        queries, _, weights = branch(x, latent, angles=angles, positions=position_ids)
        return self._choice(IndexTensors(queries, keys, weights), mask, end)

    def _index_angles(self, embeddings: Any) -> Angles | None:
        """Return the angles of the index branch, which are the model's."""
        rope = self.layer.select.rope
        if rope is None or isinstance(embeddings, Angles):
            return None if rope is None else embeddings
        return Angles(*embeddings, rope.interleaved)

    def _stored_index(self, keys: Tensor, cache: Any) -> AnyKeys:
        """Store index keys ``[b, s, d]`` of new tokens in a cache of the model, and return those of all."""
        layer = cache.layers[self.layer_idx]
        if hasattr(layer, "append_index"):  # of a PagedCache
            return layer.append_index(keys, self.layer.select)
        if hasattr(layer, "update_index"):  # MiniMax-M3 stores them with a dimension of heads
            return layer.update_index(keys[:, None])[:, 0]
        return cache.update_indexer(keys, self.layer_idx)

    def _check_blocks(
        self, mask: Tensor | None, position_ids: Tensor | None, end: int | Tensor, keys: int
    ) -> None:
        """Raise NotImplementedError if padding or positions would change the chosen blocks.

        The new tokens end before the slot ``end`` of ``keys`` slots.
        """
        check_padding(self, mask, keys, self.layer.select.block_size)
        check_positions(self, position_ids, mask, end, keys, self.layer.select.block_size)

    def _choice(self, index: IndexTensors, mask: Tensor | None, end: int | Tensor) -> Tensor:
        """Return the lists of queries, the last of which is the token before the slot ``end``."""
        select, t = self.layer.select, index.keys.shape[1]
        if select.block_size == 1:
            return visible_lists(index, select, mask)
        if isinstance(end, int) and end == t:
            return choose(*index, select)
        lengths = torch.zeros(index.keys.shape[0], dtype=torch.int32, device=index.queries.device) + end
        return choose(*index, select, lengths=lengths.int())


class ReplacedSelectingGroupedAttention(ReplacedChoosingAttention):
    """A replaced grouped layer that attends to chosen keys, or to chosen blocks of keys."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        lists, select = given.pop("lists"), self.layer.select
        if lists is None:
            return super()._attend(query, key, value, mask, given)
        if lists.shape[2] > 1 and query.shape[1] != self.layer.num_heads:
            raise ValueError(
                f"select: expected all {self.layer.num_heads} query heads with a list for each KV head, "
                f"which ranks cannot share, got {query.shape[1]}; shard no layers that choose blocks"
            )
        chosen = Chosen(lists, 1 if select is None else select.block_size)
        return super()._attend(query, key, value, mask, given | {"chosen": chosen})


class ReplacedSelectingAttention(ReplacedChoosingAttention, ReplacedLatentAttention):
    """A replaced MLA layer that attends to chosen keys; an earlier layer may have chosen them."""

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        lists = given.pop("lists")
        if lists is None:
            return super()._attend(query, key, value, mask, given)
        check_arguments(given)
        refuse_offsets(given)
        share = share_of(self.layer.query_projection, self.layer.num_heads, query.shape[1])
        options = {"scale": self.layer.scale, "backend": runner_of(self.layer, share)}
        if (pages := pages_of(key, value)) is not None:
            pages.was_read = True
            return self._over_pages(query, pages.view, selected(lists.flatten(0, 1)), options)
        options |= {"mask": selected(lists), "dropout_p": self.layer.dropout_p if self.training else 0.0}
        q, is_latent = query.transpose(1, 2), are_latents(query, key)
        if is_latent and can_absorb(self, query):
            k = torch.cat((value, key), -1).transpose(1, 2)
            out = attention(absorbed(self, q), k, k[..., : value.shape[-1]], **options)
            return unabsorbed(self, out)
        key, value = self.expand_kv(value, key) if is_latent else (key, value)
        return attention(q, key.transpose(1, 2), value.transpose(1, 2), **options)

    def _over_pages(self, query: Tensor, view: KVView, mask: AnyMask, options: dict[str, Any]) -> Tensor:
        """Return attention ``[b, s, h, e]`` of queries ``[b, h, s, d]`` over the pages of latents."""
        require_absorption(self, query)
        q = absorbed(self, query.transpose(1, 2)).flatten(0, 1)
        out = cached_attention(q, view, mask=mask, **options)
        return unabsorbed(self, out.unflatten(0, (query.shape[0], -1)))


def visible_lists(index: IndexTensors, select: Indexer, mask: Tensor | None) -> Tensor:
    """Return the visible keys chosen for each query, int32 ``[b, s, 1, n]``."""
    queries = index.queries.shape[1]
    if mask is None:  # a causal mask without padding
        return choose(*index, select)
    if queries > 1 and isinstance(mask, HandedMask) and (mask.is_whole or mask.bounds is not None):
        return _after(mask, index, select)
    return choose_visible(index, select, visible_of(mask, queries))


def _after(mask: HandedMask, index: IndexTensors, select: Indexer) -> Tensor:
    """Return the keys chosen after left padding, int32 ``[b, s, 1, n]``; the mask ends at the last query."""
    index = index._replace(keys=first_keys(index.keys, mask.plain.shape[1]))
    if mask.is_whole:
        return choose(*index, select)
    starts = mask.bounds[0].int()
    lists, (s, t) = choose(*index, select, starts=starts), (index.queries.shape[1], index.keys.shape[1])
    # A query that sees fewer keys than a list has entries gets hidden keys as well.
    last = torch.arange(t - s, t, device=lists.device)[:, None, None]
    return torch.where((lists >= starts[:, None, None, None]) & (lists <= last), lists, -1)


def visible_of(mask: Tensor, queries: int) -> Tensor:
    """Return which keys each query sees, bool ``[b, s, t]``, from a mask of transformers.

    Masks ``[b, t]`` hold visible keys or the numbers of documents, and are causal besides; the queries are
    the last of ``t`` tokens, unless there is one.

    Raises:
        NotImplementedError: the mask is additive and does not only hide keys, is that of a tree, or has
            several heads.
    """
    if getattr(mask, "tree", None) is not None:
        raise NotImplementedError(
            "attention_mask: expected no tree of sequences with layers that choose their keys, got one; "
            "compute the sequences of the tree one by one"
        )
    mask = mask.plain if isinstance(mask, HandedMask) else mask
    if mask.dim() == 2:
        shown = mask.bool()[:, None]
        if queries == 1:
            return shown
        t = mask.shape[1]
        shown = shown & torch.ones(queries, t, dtype=torch.bool, device=mask.device).tril(t - queries)
        return shown if mask.dtype == torch.bool else shown & (mask[:, -queries:, None] == mask[:, None])
    if mask.shape[1] > 1:
        raise NotImplementedError(
            "attention_mask: expected one mask for all heads, [b, 1, s, t], with layers that choose their "
            f"keys, got {tuple(mask.shape)}"
        )
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    if not (shown | (mask <= torch.finfo(mask.dtype).min / 2)).all():
        raise NotImplementedError(
            "attention_mask: expected one that hides keys or not, since an index branch does not know other "
            "biases, got values other than 0 and the least of the dtype"
        )
    return shown
