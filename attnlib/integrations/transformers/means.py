"""Replaced layers whose index branch chooses blocks by the means of their keys, as in Qwen 4.

Blocks count the keys that a query sees. Lists of blocks therefore hold only for rows without padding, and
other rows get lists of single keys, and attention then needs no other mask.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...indexing import Chosen, IndexTensors, choose, choose_compacted
from ...rope.rope import Angles
from .handed import HandedMask
from .selecting import ReplacedChoosingAttention, visible_of


class TokenAngles(NamedTuple):
    """The rope angles of all tokens of a row, and of its new tokens."""

    every: Angles
    new: Angles


class ReplacedMeansAttention(ReplacedChoosingAttention):
    """A replaced grouped layer that chooses blocks by the means of their keys, and attends to them."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor | None, ...]:
        """Return the output for ``hidden_states`` ``[b, s, m]``.

        ``position_embeddings`` ``[b, t, p / 2]`` are those of all tokens, since means rotate like the first
        key of their block.
        """
        is_interleaved, new = self.layer.rope.interleaved, hidden_states.shape[1]
        angles = TokenAngles(
            Angles(*position_embeddings, is_interleaved),
            Angles(*(x[:, -new:] for x in position_embeddings), is_interleaved),
        )
        return super().forward(hidden_states, position_embeddings=angles, **kwargs)

    def _angles(self, theirs: TokenAngles, position_ids: Tensor | None) -> Angles:
        return theirs.new

    def _index_angles(self, embeddings: TokenAngles) -> TokenAngles:
        return embeddings

    @torch.no_grad()
    def _lists(
        self, x: Tensor, angles: TokenAngles, cache: Any, mask: Tensor | None, position_ids: Tensor | None
    ) -> Chosen | None:
        """Store the index keys of x, and return what is chosen for each query, or None for all keys."""
        branch, select = self.layer.indexer, self.layer.select
        index = branch(x, angles=angles.new)
        if cache is not None:
            index = index._replace(keys=self._stored_index(index.keys, cache))
        if index.keys.shape[1] <= select.top * select.block_size:
            return None
        return self._choice(index, angles.every, mask)

    def _choice(self, index: IndexTensors, every: Angles, mask: Tensor | None) -> Chosen:
        """Return the blocks or keys that are chosen for queries, which are the last tokens."""
        branch, select = self.layer.indexer, self.layer.select

        def finish(pooled: Tensor, places: Tensor) -> Tensor:
            places = places.clamp(max=every.cos.shape[1] - 1).expand(pooled.shape[0], -1)[..., None]
            cos, sin = (x.take_along_dim(places, 1) for x in (every.cos, every.sin))
            return branch.finished(pooled, Angles(cos, sin, every.interleaved))

        if mask is None or (isinstance(mask, HandedMask) and mask.is_whole):
            return Chosen(choose(*index, select, finish=finish), select.block_size)
        queries = index.queries.shape[1]
        if queries > 1 and isinstance(mask, HandedMask) and mask.bounds is not None:
            places = torch.arange(mask.plain.shape[1], device=mask.plain.device)
            visible = places >= mask.bounds[0][:, None, None]  # padding on the right is after all queries
        else:
            visible = visible_of(mask, queries)
        return Chosen(choose_compacted(index, select, visible, finish))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        chosen = given.pop("lists")
        if chosen is not None:
            given["chosen"], mask = chosen, None
        return super()._attend(query, key, value, mask, given)
