"""The KV cache of a model: planes of pages per layer, and steps that append to them as transactions."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, SupportsIndex

import torch

from ..internal.signatures import kind, leading_to
from ..kv import KVLayout
from . import saved
from .buffer import split_size_of
from .layer_cache import LayerCache as LayerCache
from .layers import check_appended, copy_shared, make_layers, open_layers, poison, prepare_layers
from .options import (
    ReadOptions,
    check_options,
    contiguous_sequences,
    paged_sequences,
    pages_for,
    stored_as,
)
from .pages import Handle, StepPlan, Window
from .prefixes.buffers import SharedPrefixes
from .sequences import Freed, Request, Sequences
from .sharded.buffers import Sharding
from .step import StepBuffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@leading_to("make a cache by KVCache.paged(...) or KVCache.contiguous(...)")
class KVCache:
    """Keys and values of many sequences over many layers, contiguous or paged; made by one of these two
    methods.

    A contiguous cache is a paged cache with one page per sequence. Layers with equal window share one
    allocator and one page table. It is for one thread and one CUDA stream; nothing is locked. With
    ``ATTNLIB_CHECK=1`` in the environment when it is made, free pages are filled with NaN (int8: -128), so
    that a stale read shows, and an append to a slot outside the cache, or to one slot twice, raises.

    >>> cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=64, page_size=16, max_sequences=4)
    >>> first, second = cache.admit(2)
    >>> with cache.step({first: 5, second: 3}) as layers:
    ...     view = layers[0].append(torch.randn(8, 2, 8), torch.randn(8, 2, 8))
    >>> cache.length(first), cache.length(second), cache.used_bytes == 2 * 16 * (2 * 8 + 2 * 8) * 4
    (5, 3, True)
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        sequences: Sequences,
        page_size: int,
        device: torch.device | str | None,
        options: ReadOptions,
    ):
        self.layouts: tuple[KVLayout, ...] = tuple(layouts)
        self.page_size = page_size
        self._sequences, self._route = sequences, options.route
        self._poisons = os.environ.get("ATTNLIB_CHECK") == "1"
        self._open: str | None = None  # "step" or "read", while inside one
        self._prepared: tuple | None = None  # the shape of step that the layers are prepared for
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # what inference mode makes cannot be written outside it
            device = torch.empty(0, device=device).device
            self._buffers = StepBuffers(sequences, options, device)
            self._buffers.schedule(self.layouts)
            self._layers = make_layers(self.layouts, sequences, page_size, device)
        self._poison([(window, range(allocator.total)) for window, allocator in sequences.allocators.items()])

    pages_for: Final = staticmethod(pages_for)

    @classmethod
    def contiguous(
        cls,
        layouts: Sequence[KVLayout],
        *,
        max_sequences: int,
        max_length: int,
        storage_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """A cache with one row of ``max_length`` tokens per sequence; the other arguments are those of
        :meth:`paged`.

        Raises:
            ValueError, TypeError: as :meth:`paged`.
        """
        layouts = stored_as(layouts, storage_dtype)
        sequences = contiguous_sequences(layouts, max_sequences, max_length)
        check_options(layouts, batch_invariant=batch_invariant)
        options = ReadOptions(split_size_of(max_length) if batch_invariant else 0)
        return cls(layouts, sequences, max_length, device, options)

    @classmethod
    def paged(
        cls,
        layouts: Sequence[KVLayout],
        *,
        pages: int | Mapping[Window, int],
        page_size: int = 64,
        max_sequences: int,
        max_length: int | None = None,
        storage_dtype: torch.dtype | None = None,
        rollback: int = 0,
        shared_prefixes: int = 0,
        batch_invariant: bool = False,
        mesh: "DeviceMesh | None" = None,
        device: torch.device | str | None = None,
    ) -> "KVCache":
        """A cache whose sequences take pages of ``page_size`` tokens, any number of them, as they grow.

        ``pages`` counts the pages of each window class (a mapping from window to count sets them apart; from
        ``(window, keep_first)`` for layouts that keep first tokens). ``max_length`` bounds one sequence and
        so the table's width; None means as long as all pages. ``storage_dtype``, int8 or float8_e4m3fn, is
        the ``store`` of layouts that have none. ``rollback`` tokens stay reachable for ``truncate`` and
        ``read`` behind a window. With ``shared_prefixes``, layers without a window read pages that neighbours
        in a step share once for all of them, at the price of a second attention and a merge in every step. It
        counts the groups of such neighbours, from the first row on; one between them that shares nothing
        counts too. Rows beyond the last are read alone. With ``batch_invariant``, attention over this cache
        gives a sequence the same bits whatever shares its steps, and however its tokens come, many at once or
        one by one; on one kind of GPU, one version of this package and of Triton, and for one ``max_length``
        (up to powers of two). MLA is absorbed then. The ranks of a one-dimensional ``mesh`` share what layers
        without a window store: each token is with one of them. ``pages`` and ``page_size`` are those of each
        rank, and a page of all together holds as many tokens from each. Every rank makes the same calls with
        the same numbers, since nobody compares them.

        Raises:
            ValueError, TypeError: a size is not a positive int, there is no layout, or one of another
            ``store`` than
                ``storage_dtype``; ``pages`` has other windows than the layouts; two of ``shared_prefixes``,
                ``batch_invariant`` and ``mesh`` are given, or the mesh has several dimensions or nothing to
                share.
        """
        layouts = stored_as(layouts, storage_dtype)
        given = {"shared_prefixes": shared_prefixes, "batch_invariant": batch_invariant, "mesh": mesh}
        check_options(layouts, **given)
        options = ReadOptions(route=SharedPrefixes(shared_prefixes) if shared_prefixes else None)
        if mesh is not None:
            options = ReadOptions(route=Sharding.of(mesh, device))
        sizes = {"max_sequences": max_sequences, "max_length": max_length, "shards": options.shards}
        sequences = paged_sequences(layouts, pages, page_size, **sizes, rollback=rollback)
        if batch_invariant:
            options = options._replace(split_size=split_size_of(sequences.max_length))
        return cls(layouts, sequences, page_size, device, options)

    def admit(self, n: int = 1, *, left_padding: Sequence[int] | None = None) -> list[Handle]:
        """Start ``n`` empty sequences. ``left_padding[i]`` tokens at the start of the i-th are stored and
        never seen, and its rotary positions count after them; they must arrive in dense steps.

        Raises:
            CacheFullError: there would be more than ``max_sequences``.
            ValueError, TypeError: a count is not an int of at least 0.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("admit")
        return self._sequences.admit(n, left_padding)

    @contextmanager
    @kind
    def step(
        self, tokens: int | Mapping[Handle, int], *, replay: bool = False
    ) -> Iterator[Sequence[LayerCache]]:
        """Append ``tokens`` to every live sequence (int: dense, in admission order) or to those named
        (mapping: packed, in its order), as a transaction: committed on clean exit, else restored.

        With ``replay`` a captured CUDA graph appends for all layers, unseen. Errors come before a write or on
        exit.

        Raises:
            CacheFullError: pages are missing, or a sequence would grow past ``max_length``. ValueError,
            TypeError: a count is not an int of at least 0, a handle is not live here, or left padding
                would arrive packed.
            RuntimeError: inside another step or read; on exit, when a layer has not appended.
        """
        self._refuse_inside("step")
        request = self._sequences.request(tokens)
        if not isinstance(replay, bool):
            raise TypeError(f"replay: expected a bool, got {type(replay).__name__}")
        if replay and self._route is not None:
            self._route.check_replay(request)
        conventions = [layer.convention for layer in self._layers]
        plans = self._sequences.reserve(request)
        try:
            self._show("step", request, plans)
            copy_shared(self._layers, dict(zip(self._sequences.allocators, plans, strict=True)))
            yield self._layers
            check_appended(self._layers, sum(request.tokens.values()), replay=replay)
        except BaseException:
            self._restore(request, plans, conventions)
            raise
        self._close()
        if conventions != [layer.convention for layer in self._layers]:
            self._prepared = None  # the next views are to name it
        self._poison(self._sequences.commit(plans))

    @contextmanager
    @kind
    def read(self, tokens: int | Mapping[Handle, int]) -> Iterator[Sequence[LayerCache]]:
        """Let ``tokens`` queries (as in ``step``) attend to what is stored, changing no length:
        cross-attention.

        The queries are the last ones of each sequence. What ``step`` raises on entry is raised, but for
        missing space.

        Raises:
            RuntimeError: a window has dropped keys that these queries could see (see ``rollback``).
        """
        self._refuse_inside("read")
        request = self._sequences.request(tokens)
        self._sequences.check_read(request)
        try:
            self._show("read", request, [])
            yield self._layers
        finally:
            self._close()

    def fork(self, handle: Handle, n: int = 1) -> list[Handle]:
        """Start ``n`` sequences that share everything ``handle`` has stored; copied on the first write.

        Raises:
            CacheFullError: there would be more than ``max_sequences``.
            ValueError, TypeError: the handle is not live here.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("fork")
        return self._sequences.fork(handle, n)

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget all tokens from ``length`` on (speculative rollback).

        Raises:
            ValueError, TypeError: the handle is not live here, or ``length`` is not an int from 0 to what is
            stored. RuntimeError: inside a step or read, or a window has dropped keys that this length needs
            (see ``rollback``).
        """
        self._refuse_inside("truncate")
        self._poison(self._sequences.truncate(handle, length))

    def release(self, *handles: Handle) -> None:
        """End sequences and free what only they used.

        Raises:
            ValueError, TypeError: a handle is not live here or comes twice; then none is released.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("release")
        self._poison(self._sequences.release(handles))

    def save(self, handle: Handle, path: str | os.PathLike[str]) -> None:
        """Write what a sequence has stored, without its left padding, to a file of safetensors, whole or not
        at all.

        Raises:
            ValueError, TypeError, RuntimeError: the handle is not live here; inside a step or read.
            OSError, NotImplementedError: the file cannot be written; ranks share the cache.
        """
        self._refuse_inside("save")
        self._check_whole("save")
        saved.save(Path(path), self._layers, self._sequences, handle)

    def load(self, path: str | os.PathLike[str]) -> Handle:
        """Start a sequence with what :meth:`save` wrote, bit for bit; other pages and sizes of a cache may
        hold it.

        Raises:
            ValueError: the file is none that ``save`` wrote, or of other layouts, or lacks what this cache
            would keep. CacheFullError: pages or rows are missing. RuntimeError: inside a step or read, or the
            cache stores keys of another rotary convention. OSError, NotImplementedError: the file cannot be
            read; ranks share the cache.
        """
        self._check_whole("load")
        return saved.load(Path(path), self, self._sequences)

    def length(self, handle: Handle) -> int:
        """How many tokens the sequence has stored, left padding included."""
        return self._sequences.holding(handle).length

    @property
    def nbytes(self) -> int:
        """Bytes of all planes and scales, on this rank."""
        return sum(plane.nbytes for layer in self._layers for plane in layer.planes.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, a shared page once, on this rank."""
        allocators = self._sequences.allocators
        return sum(allocators[x.window_class].used * self.page_size * x.token_bytes for x in self.layouts)

    def __repr__(self) -> str:
        return f"KVCache({len(self.layouts)} layers, pages of {self.page_size} tokens; {self._sequences})"

    def _check_whole(self, name: str) -> None:
        if self._route is not None:
            self._route.check_whole(name)

    def _refuse_inside(self, what: str) -> None:
        if (block := self._open) is not None:
            raise RuntimeError(
                f"{what}: not inside a {block}; leave the `with cache.{block}(...)` block first"
            )

    def _show(self, what: str, request: Request, plans: Sequence[StepPlan]) -> None:
        """Bring the buffers up to this step or read, and open the layers for it."""
        self._open = what
        self._buffers.update(request, plans)
        key = (what, len(request.tokens), request.shape, self._route is not None and request.is_single)
        if key != self._prepared:  # the next step of the same shape need not prepare the layers
            per_step, windows = self._buffers.slices(request, writing=what == "step")
            by_window = dict(zip(self._sequences.allocators, windows, strict=True))
            prepare_layers(self._layers, self.page_size, per_step, by_window)
            self._prepared = key
        open_layers(self._layers, request)

    def _restore(
        self, request: Request, plans: Sequence[StepPlan], conventions: Sequence[str | None]
    ) -> None:
        """Undo a step: on the host first, then on the device."""
        self._close()
        for layer, convention in zip(self._layers, conventions, strict=True):
            layer.convention = convention
        freed = self._sequences.restore(plans)
        self._buffers.forget()
        self._buffers.update(request, [])
        self._poison(freed)

    def _close(self) -> None:
        self._open = None
        for layer in self._layers:
            layer._close()

    def _poison(self, freed: Freed) -> None:
        if self._poisons:
            poison(self._layers, freed)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a KVCache cannot be copied or pickled; fork() or save() a sequence, or make another cache"
        )
