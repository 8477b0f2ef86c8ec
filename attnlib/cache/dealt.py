"""What a rank has of sequences that ranks share: every token is with one of them, in turn.

A page of the allocator holds ``page_size`` tokens on each rank, at the same place on all. So what the
allocator decides is right on every rank, and every rank decides it alike.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.storage import write_cache
from ..kv import Fresh, Held, KVLayout, KVView
from ..ranks import Ranks
from ..rope.rope import Angles, rotate
from .buffer import Buffer, Schedules
from .sequences import Request


class Dealt(NamedTuple):
    """What the layers of a step read of this rank's tokens: row ``i`` is the step's i-th sequence.

    ``lengths`` count the tokens of the step where no sequence gets more than one; else these are read by
    themselves, and ``fresh_starts`` says how many of them are left padding, where they are dense.
    """

    ranks: Ranks
    starts: Tensor
    lengths: Tensor
    schedules: Schedules
    is_single: bool
    is_before: bool
    fresh_starts: Tensor | None

    def show(self, view: KVView) -> tuple[KVView, Held | None]:
        """The view with what is held of it; and apart where the step's tokens are to be added to that."""
        view = replace(view, ranks=self.ranks, check=False)
        bounds = {
            "starts": self.starts,
            "lengths": self.lengths,
            "schedule": self.schedules.get(view.layout.heads),
        }
        held = Held(replace(view, **bounds, ranks=None, positions=None, check=False), self.is_single)
        return (view, held) if self.is_before else (view.with_held(held), None)


class DealtBuffers:
    """The buffers of this rank's tokens, beside those of the allocator without a window.

    Which of two ways a step is read depends on its shape and on whether any sequence gets more than one
    token. Lengths are kept for both, each with a schedule, since a captured graph of one way may be replayed
    where the cache would take the other: with several tokens of a sequence it never may, which
    :func:`check_replay` sees to.
    """

    def __init__(self, ranks: Ranks, rows: int, limit: int, device: torch.device):
        self.ranks = ranks
        self._starts, self._lengths, self._before, self._fresh_starts = (
            Buffer("i", rows, device) for _ in range(4)
        )
        self._schedules, self._before_schedules = (Schedules(rows, limit, 0, device) for _ in range(2))
        self._shown_starts: array | None = None
        self._is_before = False  # whether the present step may be read beside its own tokens

    def add(self, layout: KVLayout) -> None:
        """Keep schedules for this layout too."""
        self._schedules.add(layout)
        self._before_schedules.add(layout)

    def update(
        self, request: Request, starts: Sequence[int], slots: "array[int] | None"
    ) -> "array[int] | None":
        """Show sequences that begin at these tokens, and return where this rank stores those of a step.

        All ranks together have ``slots`` for them; the others' are -1.
        """
        rank, count, held = self.ranks.rank, self.ranks.count, self.ranks.held
        lengths = [holding.length for holding in request.holdings]
        after = (
            lengths
            if slots is None
            else [n + new for n, new in zip(lengths, request.tokens.values(), strict=True)]
        )
        self._lengths.show(array("i", map(held, after)))
        if (first := array("i", map(held, starts))) != self._shown_starts:
            self._shown_starts = None
            self._starts.show(first)
            self._shown_starts = first
        self._is_before = slots is not None and not (request.is_single and not request.packed)
        if self._is_before:
            self._before.show(array("i", map(held, lengths)))
            self._fresh_starts.show(array("i", [max(0, x - n) for x, n in zip(starts, lengths, strict=True)]))
        return slots and array("q", [x // count if x % count == rank else -1 for x in slots])

    def update_schedules(self, rows: int) -> None:
        """Schedule this rank's tokens of the sequences that are shown."""
        starts = self._starts.tensor[:rows]
        self._schedules.update(starts, self._lengths.tensor[:rows])
        if self._is_before:
            self._before_schedules.update(starts, self._before.tensor[:rows])

    def slices(self, request: Request, *, writing: bool) -> Dealt:
        """The slices that steps of this shape use."""
        rows, is_single = len(request.tokens), request.is_single
        is_before = writing and not is_single
        return Dealt(
            self.ranks,
            self._starts.tensor[:rows],
            (self._before if is_before else self._lengths).tensor[:rows],
            self._before_schedules if is_before else self._schedules,
            is_single,
            is_before,
            self._fresh_starts.tensor[:rows] if is_before and not request.packed else None,
        )


def check_replay(request: Request, ranks: Ranks | None, *, replay: bool) -> None:
    """Refuse a replay that may be of a graph which takes every sequence to get one token at most.

    Raises:
        TypeError: ``replay`` is no bool.
        RuntimeError: some sequence gets more, in a packed step whose shape does not tell.
    """
    if not isinstance(replay, bool):
        raise TypeError(f"replay: expected a bool, got {type(replay).__name__}")
    is_shared = replay and ranks is not None
    if is_shared and request.packed and not request.is_single and request.shape[0] <= len(request.tokens):
        raise RuntimeError(
            "replay: over a cache that ranks share, a graph of no more tokens than sequences was captured "
            f"for at most one of each, got {list(request.tokens.values())}; leave sequences without tokens "
            "out of the step"
        )


def fresh(view: KVView, starts: Tensor | None, k: Tensor, v: Tensor | None, angles: Angles | None) -> Fresh:
    """A step's own tokens, given as to :meth:`LayerCache.append`, as they are read back from the cache."""
    layout = view.layout
    k, v = (
        k.to(layout.dtype),
        None if v is None else v.to(layout.dtype),
    )  # what torch.autocast left in another
    if layout.store is not None:
        return Fresh(*_read_back(view, k, v, angles), starts)
    if layout.is_latent:
        k, v = k.unsqueeze(-2), None if v is None else v.unsqueeze(-2)
        v = v if v is None or angles is None else rotate(v, angles)
        k = k if v is None else torch.cat((k, v), -1)
        return Fresh(k, k[..., : layout.dim], starts)
    return Fresh(k if angles is None else rotate(k, angles), v, starts)


def _read_back(view: KVView, k: Tensor, v: Tensor | None, angles: Angles | None) -> tuple[Tensor, Tensor]:
    """Keys and values after they were stored in one byte a value, on a page of their own."""
    layout, shape = view.layout, k.shape[:-1] if view.layout.is_latent else k.shape[:-2]
    tokens = shape.numel()
    planes = {
        name: torch.empty(1, tokens, heads, *((width,) if width else ()), dtype=dtype, device=k.device)
        for name, (heads, width, dtype) in layout.planes.items()
    }
    if layout.is_latent:
        planes |= {"v": planes["k"], "v_scale": planes["k_scale"]}
    page = replace(view, **planes, page_size=tokens, ranks=None, check=False)
    write_cache(page, k, v, torch.arange(tokens, device=k.device), angles=angles)

    def read(plane: Tensor, scale: Tensor) -> Tensor:
        return (plane[0].float() * scale[0][..., None]).to(layout.dtype).unflatten(0, shape)

    k, v = read(page.k, page.k_scale), read(page.v, page.v_scale)
    return (k if page.k_tail is None else torch.cat((k, page.k_tail[0].unflatten(0, shape)), -1)), v
