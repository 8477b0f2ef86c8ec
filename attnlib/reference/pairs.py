"""The query-key pairs of one head, tile by tile: visibility, scores and dropout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .traffic import tiles


class Visibility(Protocol):
    """The interface that the algorithms need of a mask; :class:`attnlib.Mask` documents it."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor: ...
    def keys(self, first: int, last: int, total: int) -> tuple[int, int]: ...
    def covers(self, first: int, last: int, start: int, stop: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """The ``queries`` x ``keys`` pairs of one head under a mask; the queries are the last of the keys.

    A tile is two slices, ``i`` of queries and ``j`` of keys, both counted from 0. ``kept(i, j)`` returns a
    bool tensor, True where dropout keeps the probability. It is a function of position, so a backward pass
    computes the bits again and nothing is stored. Probabilities that are kept are divided by
    ``1 - dropout_p`` (the product with Z_ij in Dao et al., 2022).
    """

    mask: Visibility
    queries: int
    keys: int
    scale: float
    dropout_p: float = 0.0
    kept: Callable[[slice, slice], Tensor] | None = None

    @property
    def whole(self) -> tuple[slice, slice]:
        """The single tile that holds all pairs."""
        return slice(0, self.queries), slice(0, self.keys)

    def seen_by(self, i: slice, size: int) -> list[slice]:
        """Return the tiles of ``size`` keys of which queries ``i`` see any; others need not be read."""
        return [j for j in tiles(self.keys, size) if self._meet(i, j)]

    def seeing(self, j: slice, size: int) -> list[slice]:
        """Return the tiles of ``size`` queries that see any of the keys ``j``."""
        return [i for i in tiles(self.queries, size) if self._meet(i, j)]

    def scores(self, q_i: Tensor, k_j: Tensor, i: slice, j: slice) -> Tensor:
        """Return S_ij = scale * q_i k_j', -inf where hidden; a fully visible tile is not masked."""
        s_ij, visible = self.scale * q_i @ k_j.T, self._visible(i, j, q_i.device)
        return s_ij if visible is None else torch.where(visible, s_ij, -torch.inf)

    def drop(self, p_ij: Tensor, i: slice, j: slice) -> Tensor:
        """Return P_ij * Z_ij, the probabilities after dropout."""
        return p_ij if self.kept is None else p_ij * self.kept(i, j) / (1 - self.dropout_p)

    def hide(self, x_ij: Tensor, i: slice, j: slice) -> Tensor:
        """Return x_ij, with 0 where hidden."""
        visible = self._visible(i, j, x_ij.device)
        return x_ij if visible is None else torch.where(visible, x_ij, 0)

    def sum_keys(self, x_ij: Tensor, v_j: Tensor, i: slice, j: slice) -> Tensor:
        """Return x_ij v_j over the visible pairs: for each query, a sum over keys."""
        return _product(x_ij, v_j, self._visible(i, j, v_j.device))

    def sum_queries(self, x_ij: Tensor, q_i: Tensor, i: slice, j: slice) -> Tensor:
        """Return x_ij' q_i over the visible pairs: for each key, a sum over queries."""
        visible = self._visible(i, j, q_i.device)
        return _product(x_ij.T, q_i, None if visible is None else visible.T)

    def _meet(self, i: slice, j: slice) -> bool:
        start, stop = self.mask.keys(*self._storage(i), self.keys)
        return start < j.stop and j.start < stop  # the range of visible keys has no hole

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
    """Return ``x @ y`` without the hidden terms; torch.where drops them, since 0 * NaN would be NaN."""
    return x @ y if visible is None else torch.where(visible[..., None], x[..., None] * y, 0).sum(1)
