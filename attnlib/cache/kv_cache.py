"""The KV cache of a model: pages for every layer; a step appends tokens as a transaction."""

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
from .memory import check_pages_or_memory, pages_in
from .options import (
    ReadOptions,
    check_options,
    contiguous_sequences,
    paged_sequences,
    pages_for,
    stored_as,
)
from .pages import SequenceHandle, StepPlan, Window
from .prefixes.buffers import SharedPrefixes
from .sequences import Freed, Request, Sequences
from .sharded.buffers import Sharding
from .step import StepBuffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@leading_to("make a cache by KVCache.paged(...) or KVCache.contiguous(...)")
class KVCache:
    """A KV cache of many sequences over many layers; create one by :meth:`contiguous` or :meth:`paged`.

    A contiguous cache is a paged cache with one page per sequence. Layers with the same window share one page
    allocator and one page table. A cache belongs to one thread and one CUDA stream; there are no locks. If
    ``ATTNLIB_CHECK=1`` is set when the cache is made, free pages are filled with NaN (int8: -128), so that
    stale reads show, and an append to a slot outside the cache, or twice to one slot, raises.

    >>> layout = KVLayout.grouped(2, 8)
    >>> cache = KVCache.paged([layout], pages=64, page_size=16, max_sequences=4)
    >>> first, second = cache.admit(2)
    >>> with cache.step({first: 5, second: 3}) as layers:
    ...     view = layers[0].append(torch.randn(8, 2, 8), torch.randn(8, 2, 8))
    >>> cache.length(first), cache.length(second)
    (5, 3)
    >>> cache.used_bytes == 2 * 16 * layout.token_bytes
    True
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
        self._prepared: tuple | None = None  # the step shape that the layers are prepared for
        # Tensors created in inference mode could not be written to outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
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
        """Make a cache with one row of ``max_length`` tokens per sequence.

        The other arguments are those of :meth:`paged`.

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
        pages: int | Mapping[Window, int] | None = None,
        memory: int | str | None = None,
        max_step_tokens: int | None = None,
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
        """Make a cache whose sequences take pages of ``page_size`` tokens as they grow.

        Args:
            layouts: for each layer, the layout of the keys and values of one token.
            pages: the page count of every window class, or a mapping from window class to count. The class of
                a layout is None, its window, or ``(window, first_tokens)``.
            memory: in place of ``pages``, the bytes of all stored keys and values, as an int or such as
                ``"40GiB"``. Pages are counted for ``max_sequences`` sequences of equal length, as long as
                fits.
            max_step_tokens: with ``memory``, the most tokens of a sequence in one step. Layers with a window
                then need fewer pages; None means that a whole prompt arrives in one step.
            page_size: tokens per page.
            max_sequences: the largest number of live sequences at a time.
            max_length: the largest length of a sequence, which sets the width of the page table. With None,
                one sequence may take all pages.
            storage_dtype: int8 or float8_e4m3fn, for keys and values in all layers whose layout has no
                ``storage_dtype`` itself.
            rollback: how many tokens behind a window to retain, for ``truncate`` and ``read``.
            shared_prefixes: the most prefix groups per step. The sequences of a group are neighbours
                in the step, and attention reads the pages that they share once for the whole group. A run of
                sequences that share nothing counts as a group too. Sequences after the last group are read
                as usual, and so are layers with a window. Every step costs a second attention call and a
                merge.
            batch_invariant: make the results of a sequence independent, to the bit, of the other sequences
                in its steps, and of whether its tokens arrive together or one by one. This holds on one GPU
                model, for one version of attnlib and of Triton, and for one ``max_length`` (rounded up to a
                power of two). MLA layers then use the absorbed form.
            mesh: a one-dimensional mesh over which layers without a window are sharded: each token lives
                on one rank. ``pages`` and ``page_size`` are then per rank. Every rank must make the
                same calls with the same numbers; nothing checks that.
            device: the device of all tensors; None means torch's default device.

        Raises:
            ValueError, TypeError: a size is not a positive int; ``layouts`` is empty, or one has another
                ``storage_dtype``; not one of ``pages`` and ``memory`` is given, or ``memory`` has no room for
                a page per sequence; ``pages`` has other windows than the layouts; two of
                ``shared_prefixes``, ``batch_invariant`` and ``mesh`` are given; or the mesh has several
                dimensions, or no layer that its ranks can share.
        """
        layouts = stored_as(layouts, storage_dtype)
        given = {"shared_prefixes": shared_prefixes, "batch_invariant": batch_invariant, "mesh": mesh}
        check_options(layouts, **given)
        options = ReadOptions(route=SharedPrefixes(shared_prefixes) if shared_prefixes else None)
        if mesh is not None:
            options = ReadOptions(route=Sharding.of(mesh, device))
        sizes = {"max_sequences": max_sequences, "max_length": max_length, "shards": options.shards}
        check_pages_or_memory(pages, memory, max_step_tokens)
        if memory is not None:
            limits = {"max_sequences": max_sequences, "max_length": max_length, "ranks": options.shards}
            limits |= {"max_step_tokens": max_step_tokens, "rollback": rollback}
            pages = pages_in(memory, layouts, page_size=page_size, **limits)
        sequences = paged_sequences(layouts, pages, page_size, **sizes, rollback=rollback)
        if batch_invariant:
            options = options._replace(split_size=split_size_of(sequences.max_length))
        return cls(layouts, sequences, page_size, device, options)

    def admit(self, n: int = 1, *, left_padding: Sequence[int] | None = None) -> list[SequenceHandle]:
        """Start ``n`` empty sequences, and return their handles.

        ``left_padding[i]`` is the number of padding tokens at the start of the i-th sequence. Padding is
        stored but never visible, and must arrive in dense steps. Rotary positions start after the padding.

        Raises:
            CacheFullError: there would be more than ``max_sequences`` sequences.
            ValueError, TypeError: a count is not an int of at least 0.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("admit")
        return self._sequences.admit(n, left_padding)

    @contextmanager
    @kind
    def step(
        self, tokens: int | Mapping[SequenceHandle, int], *, replay: bool = False
    ) -> Iterator[Sequence[LayerCache]]:
        """Append tokens as a transaction: commit it on clean exit, undo it on an exception.

        An int appends that many tokens to every live sequence, in admission order, and layers take dense
        tensors ``[b, s, m]``. A mapping from handles to counts appends to these sequences, in its order, and
        layers take packed tensors ``[t, m]``. Pass ``replay=True`` if a captured CUDA graph appends for all
        layers. Errors are raised before anything is written, or on exit.

        Raises:
            CacheFullError: too few pages are free, or a sequence would exceed ``max_length``.
            ValueError, TypeError: a count is not an int of at least 0, a handle is not of a live sequence of
                this cache, or left padding would arrive in packed form.
            RuntimeError: inside another step or read; or, on exit, a layer has not appended.
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
            self._show("step", request, plans, replay=replay)
            copy_shared(self._layers, dict(zip(self._sequences.allocators, plans, strict=True)))
            yield self._layers
            check_appended(self._layers, sum(request.tokens.values()), replay=replay)
        except BaseException:
            self._restore(request, plans, conventions)
            raise
        self._close()
        if conventions != [layer.convention for layer in self._layers]:
            self._prepared = None  # the next views must have the new rotary convention
        self._poison(self._sequences.commit(plans))

    @contextmanager
    @kind
    def read(self, tokens: int | Mapping[SequenceHandle, int]) -> Iterator[Sequence[LayerCache]]:
        """Attend to the stored tokens without appending, as cross-attention does.

        ``tokens`` is given as in :meth:`step`, but counts queries. The queries get the positions of the last
        tokens of each sequence; no length changes.

        Raises:
            ValueError, TypeError: as :meth:`step`.
            RuntimeError: inside another step or read; or a window has dropped keys that the queries could see
                (see ``rollback``).
        """
        self._refuse_inside("read")
        request = self._sequences.request(tokens)
        self._sequences.check_read(request)
        try:
            self._show("read", request, [])
            yield self._layers
        finally:
            self._close()

    def fork(self, handle: SequenceHandle, n: int = 1) -> list[SequenceHandle]:
        """Start ``n`` sequences that share all tokens of ``handle``; a shared page is copied before a write.

        Raises:
            CacheFullError: there would be more than ``max_sequences`` sequences.
            ValueError, TypeError: the handle is not of a live sequence of this cache.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("fork")
        return self._sequences.fork(handle, n)

    def truncate(self, handle: SequenceHandle, length: int) -> None:
        """Forget all tokens from ``length`` on (speculative rollback).

        Raises:
            ValueError, TypeError: the handle is not of a live sequence of this cache, or ``length`` is not an
                int from 0 to the sequence's length.
            RuntimeError: inside a step or read, or a window has dropped keys that this length needs (see
                ``rollback``).
        """
        self._refuse_inside("truncate")
        self._poison(self._sequences.truncate(handle, length))

    def release(self, *handles: SequenceHandle) -> None:
        """End sequences, and free the pages that only they used.

        Raises:
            ValueError, TypeError: a handle is not of a live sequence of this cache, or is given twice; then
                no sequence is released.
            RuntimeError: inside a step or read.
        """
        self._refuse_inside("release")
        self._poison(self._sequences.release(handles))

    def save(self, handle: SequenceHandle, path: str | os.PathLike[str]) -> None:
        """Save the tokens of a sequence, without left padding, to a safetensors file, atomically.

        Raises:
            ValueError, TypeError: the handle is not of a live sequence of this cache.
            RuntimeError: inside a step or read.
            OSError: the file cannot be written.
            NotImplementedError: the cache is sharded over ranks.
        """
        self._refuse_inside("save")
        self._check_whole("save")
        saved.save(Path(path), self._layers, self._sequences, handle)

    def load(self, path: str | os.PathLike[str]) -> SequenceHandle:
        """Start a sequence with the tokens that :meth:`save` wrote, bit for bit.

        The cache may have another page size and capacity than the one that saved the file.

        Raises:
            ValueError: ``save`` did not write the file, its layouts differ, or it lacks tokens that this
                cache would have retained.
            CacheFullError: too few pages or rows are free.
            RuntimeError: inside a step or read, or the cache stores keys of another rotary convention.
            OSError: the file cannot be read.
            NotImplementedError: the cache is sharded over ranks.
        """
        self._check_whole("load")
        return saved.load(Path(path), self, self._sequences)

    def length(self, handle: SequenceHandle) -> int:
        """Return the number of stored tokens of a sequence, left padding included."""
        return self._sequences.holding(handle).length

    @property
    def nbytes(self) -> int:
        """The memory of all keys, values and scales on this rank, in bytes."""
        return sum(plane.nbytes for layer in self._layers for plane in layer.planes.values())

    @property
    def used_bytes(self) -> int:
        """The memory of the pages in use on this rank, in bytes; a shared page counts once."""
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

    def _show(self, what: str, request: Request, plans: Sequence[StepPlan], *, replay: bool = False) -> None:
        """Update the buffers for a step or read, and let every layer enter it."""
        self._open = what
        self._buffers.update(request, plans)
        key = (what, len(request.tokens), request.shape, self._route is not None and request.is_single)
        if key != self._prepared:  # steps of the same shape share the prepared layers
            per_step, windows = self._buffers.slices(request, writing=what == "step")
            by_window = dict(zip(self._sequences.allocators, windows, strict=True))
            prepare_layers(self._layers, self.page_size, per_step, by_window)
            self._prepared = key
        open_layers(self._layers, request, replay=replay)

    def _restore(
        self, request: Request, plans: Sequence[StepPlan], conventions: Sequence[str | None]
    ) -> None:
        """Undo a failed step, on the host first and then on the device."""
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
