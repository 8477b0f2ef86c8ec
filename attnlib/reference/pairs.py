"""The query-key pairs of one head, in tiles: which pairs are visible, their scores, and dropout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .traffic import tiles


class Visibility(Protocol):
    """The methods of a mask that the reference algorithms call; :class:`attnlib.Mask` documents them."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor: ...
    def keys(self, first: int, last: int, total: int) -> tuple[int, int]: ...
    def covers(self, first: int, last: int, start: int, stop: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """All pairs of ``queries`` queries and ``keys`` keys of one head under a mask.

    The last query belongs to the last key. A tile is two slices, ``i`` of queries and ``j`` of keys, both
    counted from 0. ``kept(i, j)`` returns a bool tensor, True where dropout keeps the probability. It depends
    only on positions, so a backward pass computes it again instead of storing it. Probabilities that dropout
    keeps are divided by ``1 - dropout_p`` (the product with Z_ij in Dao et al., 2022).
    """

    mask: Visibility
    queries: int
    keys: int
    scale: float
    dropout_p: float = 0.0
    kept: Callable[[slice, slice], Tensor] | None = None

    @property
    def whole(self) -> tuple[slice, slice]:
        """A single tile that contains all pairs."""
        return slice(0, self.queries), slice(0, self.keys)

    def seen_by(self, i: slice, size: int) -> list[slice]:
        """Return the tiles of ``size`` keys that contain a key visible to one of the queries ``i``."""
        return [j for j in tiles(self.keys, size) if self._meet(i, j)]

    def seeing(self, j: slice, size: int) -> list[slice]:
        """Return the tiles of ``size`` queries that contain a query that sees one of the keys ``j``."""
        return [i for i in tiles(self.queries, size) if self._meet(i, j)]

    def scores(self, q_i: Tensor, k_j: Tensor, i: slice, j: slice) -> Tensor:
        """Return the scores of a tile, S_ij = scale * q_i k_j', with -inf for hidden pairs."""
        s_ij, visible = self.scale * q_i @ k_j.T, self._visible(i, j, q_i.device)
        return s_ij if visible is None else torch.where(visible, s_ij, -torch.inf)

    def drop(self, p_ij: Tensor, i: slice, j: slice) -> Tensor:
        """Apply dropout to the probabilities of a tile: return P_ij * Z_ij."""
        return p_ij if self.kept is None else p_ij * self.kept(i, j) / (1 - self.dropout_p)

    def hide(self, x_ij: Tensor, i: slice, j: slice) -> Tensor:
        """Return the numbers ``x_ij`` of a tile, with 0 in place of those of hidden pairs."""
        visible = self._visible(i, j, x_ij.device)
        return x_ij if visible is None else torch.where(visible, x_ij, 0)

    def sum_keys(self, x_ij: Tensor, v_j: Tensor, i: slice, j: slice) -> Tensor:
        """Return the product x_ij v_j over the visible pairs of a tile: for each query, a sum over keys."""
        return _product(x_ij, v_j, self._visible(i, j, v_j.device))

    def sum_queries(self, x_ij: Tensor, q_i: Tensor, i: slice, j: slice) -> Tensor:
        """Return the product x_ij' q_i over the visible pairs of a tile: for each key, a sum over queries."""
        visible = self._visible(i, j, q_i.device)
        return _product(x_ij.T, q_i, None if visible is None else visible.T)

    def _meet(self, i: slice, j: slice) -> bool:
        start, stop = self.mask.keys(*self._storage(i), self.keys)
        return start < j.stop and j.start < stop  # correct because the range of visible keys has no gap

    def _visible(self, i: slice, j: slice, device: torch.device) -> Tensor | None:
        """Return which pairs of a tile are visible, or None if all are."""
        first, last = self._storage(i)
        if self.mask.covers(first, last, j.start, j.stop):
            return None
        columns = torch.arange(j.start, j.stop, device=device)
        return self.mask.visible(torch.arange(first, last, device=device)[:, None], columns)

    def _storage(self, i: slice) -> tuple[int, int]:
        first = self.keys - self.queries
        return first + i.start, first + i.stop


def _product(x: Tensor, y: Tensor, visible: Tensor | None) -> Tensor:
    """Return ``x @ y`` without the terms of hidden pairs, which torch.where drops since 0 * NaN is NaN."""
    return x @ y if visible is None else torch.where(visible[..., None], x[..., None] * y, 0).sum(1)
