"""The KV cache of a model: planes of pages per layer, and steps that append to them as transactions."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..rope import Angles
from .layout import KVLayout, KVView
from .pages import Handle


class LayerCache:
    """One layer's part of a cache: what an attention layer appends to and reads.

    The same object is handed out at every step, so that a model compiles once. ``prefill`` says whether some
    sequence gets more than 16 tokens in this step; ``history`` is the longest length before the step rounded up
    to a power of two (0 if none), to be read only when ``prefill``; ``positions`` are the rotary positions of the
    step's tokens, int32 ``[b, s]`` dense or ``[t]`` packed.
    """

    layout: KVLayout
    prefill: bool
    history: int
    positions: Tensor

    def append(self, k: Tensor, v: Tensor | None = None, *, angles: Angles | None = None) -> KVView:
        """Write this step's keys and values and return the view that includes them.

        ``k`` is ``[b, s, g, d]`` or packed ``[t, g, d]``, unrotated when ``angles`` are given; for latent storage
        ``append(latent, k_rope)`` takes ``[..., r]`` and ``[..., p]`` (``k_rope`` None when the layout has no tail) and ``angles`` rotate
        ``k_rope``. Writes the planes in place; calling twice in a step overwrites the same slots.

        Raises:
            RuntimeError: outside a step, in a ``read``, or with another rotary convention than the first append.
            ValueError, TypeError: shapes, dtype or device differ from the layout's.
            NotImplementedError: a gradient would have to flow through the cache.
        """
        raise NotImplementedError

    def view(self) -> KVView:
        """What is stored now, with this step's query counts: for cross-attention in a ``read``."""
        raise NotImplementedError


class KVCache:
    """Keys and values of many sequences over many layers, contiguous or paged.

    A contiguous cache is a paged cache with one page per sequence. Layers with equal window share one ledger and table.

    >>> cache = KVCache.paged([layer.kv_layout], pages=64, page_size=16, max_sequences=4)
    >>> first, second = cache.admit(2)
    >>> with cache.step({first: 5, second: 3}) as layers: out = layer(x, kv=layers[0])  # x: [8, m]
    """

    @classmethod
    def contiguous(
        cls,
        layouts: Sequence[KVLayout],
        *,
        max_sequences: int,
        max_length: int,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """A cache with one row of ``max_length`` tokens per sequence."""
        raise NotImplementedError

    @classmethod
    def paged(
        cls,
        layouts: Sequence[KVLayout],
        *,
        pages: int | Mapping[int | None, int],
        page_size: int = 64,
        max_sequences: int,
        max_length: int | None = None,
        rollback: int = 0,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """A cache whose sequences take pages of ``page_size`` (a power of two) tokens as they grow.

        ``pages`` counts the pages of each window class (a mapping from window to count sets them apart).
        ``max_length`` bounds one sequence and so the table's width; None means as long as all pages.
        ``rollback`` tokens stay reachable for ``truncate`` behind a window.
        """
        raise NotImplementedError

    def admit(self, n: int = 1, *, left_padding: Sequence[int] | None = None) -> list[Handle]:
        """Start ``n`` empty sequences. ``left_padding[i]`` tokens at the start of the i-th are stored and never seen,
        and its rotary positions count after them; they must arrive in dense steps."""
        raise NotImplementedError

    def step(self, tokens: int | Mapping[Handle, int]) -> AbstractContextManager[Sequence[LayerCache]]:
        """Append ``tokens`` to every live sequence (int: dense, in admission order) or to those named (mapping: packed,
        in its order), as a transaction: committed on clean exit, else restored."""
        raise NotImplementedError

    def read(self, tokens: int | Mapping[Handle, int]) -> AbstractContextManager[Sequence[LayerCache]]:
        """Let ``tokens`` queries (as in ``step``) attend to what is stored, changing no length: cross-attention."""
        raise NotImplementedError

    def fork(self, handle: Handle, n: int = 1) -> list[Handle]:
        """Start ``n`` sequences that share everything ``handle`` has stored; copied on the first write."""
        raise NotImplementedError

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget all tokens from ``length`` on (speculative rollback)."""
        raise NotImplementedError

    def release(self, *handles: Handle) -> None:
        """End sequences and free what only they used."""
        raise NotImplementedError

    def length(self, handle: Handle) -> int:
        """How many tokens the sequence has stored, left padding included."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all planes and scales."""
        raise NotImplementedError

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, a shared page once."""
        raise NotImplementedError
