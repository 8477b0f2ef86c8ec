"""Layers of attnlib's own form with an index branch, which choose keys over any cache of transformers.

The choice may be replaced in a call, and trains: :meth:`ChoosesKeys.index_loss` is the loss of the branch.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from ...indexing import Chosen, IndexTensors, choose, keys_of
from ...internal.padding import edges_of
from ...rope.rope import Angles
from .handed import HandedMask
from .replaced_layers import ReplacedAttention
from .replacing import angles_at
from .selecting import visible_lists

ALL = Chosen(None)


class ChoosesKeys(ReplacedAttention):
    """A replaced layer that chooses its keys by an index branch; ``selected=`` in a call replaces the choice.

    The methods take the arguments with which the model calls the layer.
    """

    def choose(self, hidden_states: Tensor, **given: Any) -> Chosen:
        """Return the keys that the index branch chooses for each token of sequences without padding."""
        return self.layer.choose(hidden_states, **self._of_layer(given))

    def index_loss(self, hidden_states: Tensor, *, selected: Chosen, **given: Any) -> Tensor:
        """Return the loss of the index branch over the ``selected`` keys, for sequences without padding."""
        return self.layer.index_loss(hidden_states, selected=selected, **self._of_layer(given))

    def recall(self, hidden_states: Tensor, *, selected: Chosen, **given: Any) -> Tensor:
        """Return the share of the dense attention's probability on the ``selected`` keys, ``[b, s]``."""
        at = keys_of(selected.indices[:, :, 0], selected.block_size)
        given = self._of_layer(given) | {"selected": ALL, "over": "heads"}
        return self.layer.weights(hidden_states, at=at, **given).sum(-1)

    def _of_layer(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the attnlib layer, from those of the model's layer."""
        position_ids = given.get("position_ids")
        angles = self._angles(given.get("position_embeddings"), position_ids)
        layer, rope = self.layer, self.layer.select.rope
        counts = rope not in (None, layer.rope) and not rope.needs_length  # else by the tokens of x
        needs_them = counts or layer.temperature is not None
        return {"angles": angles, "positions": position_ids if needs_them else None}

    @torch.no_grad()
    def _own_choice(
        self, x: Tensor, angles: Angles | None, cache: Any, mask: Tensor | None, given: dict[str, Any]
    ) -> dict[str, Any]:
        """Store the index keys of x, and return the keys that its tokens see."""
        branch, select, selected = self.layer.indexer, self.layer.select, given.pop("selected", None)
        if cache is None and selected is not None:
            return {"chosen": selected}
        if select.rope is None:
            angles = None
        elif select.rope != self.layer.rope:
            angles = self._index_angles(given.get("position_ids"))
        keys = branch.keys(x, angles)
        keys = keys if cache is None else _layer_of(cache, self.layer_idx).update_indexer(keys)
        if selected is not None or keys.shape[1] <= select.top * select.block_size:
            return {"chosen": selected or ALL}
        queries, _, weights = branch(x, angles=angles)
        return {"chosen": self._chosen(IndexTensors(queries, keys, weights), mask)}

    def _index_angles(self, position_ids: Tensor | None) -> Angles:
        """Return the angles of an index branch that does not rotate like its layer."""
        if position_ids is None:
            raise NotImplementedError(
                f"{self.config.model_type}: does not tell its attention position_ids, which an index branch "
                "with fewer channels than the rope needs; convert with more channels, --select head_dim=N"
            )
        return angles_at(self.layer.select.rope, position_ids)

    def _chosen(self, index: IndexTensors, mask: Tensor | None) -> Chosen:
        """Return the keys that are chosen among those that a mask of transformers shows."""
        select, s = self.layer.select, index.queries.shape[1]
        if select.block_size == 1:
            return Chosen(visible_lists(index, select, mask))
        if isinstance(mask, HandedMask) and mask.is_whole:
            index, mask = index._replace(keys=index.keys[:, : mask.plain.shape[1]]), None
        if mask is None:
            return Chosen(choose(*index, select), select.block_size)
        bounds = mask.bounds if isinstance(mask, HandedMask) else None
        if bounds is None and mask.dim() == 2 and torch.compiler.is_compiling():
            bounds = edges_of(mask)  # the attention hides what is chosen in a hole
        if bounds is None:
            raise NotImplementedError(
                'attention_mask: expected padding on one side only, and attn_implementation="attnlib", with '
                f"an index branch that chooses blocks, got {type(mask).__name__} {tuple(mask.shape)}"
            )
        starts, ends = (x.int() for x in bounds)
        tokens = mask.shape[1]
        lengths = ends if s == 1 else torch.full_like(ends, tokens)
        index = index._replace(keys=index.keys[:, :tokens])
        return Chosen(choose(*index, select, lengths=lengths, starts=starts), select.block_size)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        chosen = given.pop("chosen")
        if chosen.indices is not None:
            indices = keys_of(chosen.indices[:, :, 0], chosen.block_size)
            given["indices"] = indices.masked_fill(indices >= key.shape[2], -1)  # after the last token
        return super()._attend(query, key, value, mask, given)


def _layer_of(cache: Any, index: int) -> Any:
    """Return a layer of a cache that also stores index keys; it takes the place of an empty layer.

    Raises:
        NotImplementedError: the layer cannot store index keys, or has keys without them.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if hasattr(layer, "update_indexer"):
        return layer
    name = type(layer).__name__.removesuffix("Layer")
    kind = getattr(cache_utils, f"{name}IndexedLayer", None)
    if kind is None or layer.get_seq_length():
        raise NotImplementedError(
            f"cache: expected an empty dynamic or static cache, or hf.PagedCache, to store the index keys of "
            f"layer {index}, got a {type(layer).__name__} with {layer.get_seq_length()} tokens"
        )
    cache.layers[index] = kind() if name == "Dynamic" else kind(max_cache_len=layer.max_cache_len)
    return cache.layers[index]
