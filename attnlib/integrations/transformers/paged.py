"""A paged KV cache for transformers models: attnlib's KVCache behind the interface of transformers' Cache."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin

from ...cache.kv_cache import KVCache, LayerCache
from ...cache.pages import SequenceHandle, Window
from ...indexing import AnyKeys, Indexer, StoredKeys, reads_stored
from ...internal.signatures import kind
from .layouts import check_shapes, layouts_of, state_layers
from .pages import BeginOfForward, EndOfForward, HandedPages, placeholder
from .states import StatefulCache, state_counts

NAME = "attnlib"  # must not contain "flash": transformers would look for a flash-attention package


@kind
class PagedCache(StatefulCache):
    """A paged KV cache for a transformers model; use it as ``model.generate(..., **cache.as_argument)``.

    ``model`` is the model that will use the cache. Every row of a batch is a sequence of an
    :class:`attnlib.KVCache`. Beam search forks rows, which then share pages; cropping truncates rows, and
    ``reset`` frees them. Layers with a sliding window free the pages behind it, but retain ``rollback`` more
    tokens, which assisted generation needs to take back rejected drafts. ``pages``, ``page_size``,
    ``max_sequences``, ``max_length`` and ``storage_dtype`` (int8 or fp8) are as in
    :meth:`attnlib.KVCache.paged`. Once rows hold tokens, ``update`` returns placeholders that only attnlib's
    attention can read. Any other attention sees NaN.

    Recurrent layers of a hybrid model, such as convolutions, keep transformers' own states. These follow
    their rows, but cannot take back tokens: such a model has no assisted generation, cropping and rollback,
    and the cache must be reset after a step that failed.

    Raises:
        ValueError: a size is invalid, or the model uses another attention implementation or expands its
            latents.
        NotImplementedError: a layer keeps neither keys and values, nor latents, nor a recurrent state; or
            there are recurrent states and a ``rollback``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int | Mapping[Window, int],
        page_size: int = 64,
        max_sequences: int,
        max_length: int | None = None,
        rollback: int = 0,
        storage_dtype: torch.dtype | None = None,
    ):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            raise ValueError(
                f"model: expected attn_implementation={NAME!r}, the only one that reads pages, got "
                f"{config._attn_implementation!r}; call model.set_attn_implementation({NAME!r}) after "
                "hf.register()"
            )
        layouts = layouts_of(model, config, storage_dtype)
        paged = {number: layout for number, layout in enumerate(layouts) if layout is not None}
        self._counts = state_counts(config, state_layers(config))
        if rollback:
            self.refuse_states("rollback")
        self._numbers = tuple(paged)  # the numbers of layers that have pages
        self._kv = KVCache.paged(
            list(paged.values()),
            pages=pages,
            page_size=page_size,
            max_sequences=max_sequences,
            max_length=max_length,
            rollback=rollback,
            device=model.device,
        )
        self._rollback, self._max_length = rollback, max_length
        self.handles: list[SequenceHandle] = []  # one handle per row
        self._length = 0  # tokens per row before the open step
        self._step: Any = None  # context manager of the open cache step, None if no step is open
        self._open: Mapping[int, LayerCache] = {}  # the layers of the open step
        self._tokens = 0  # new tokens per row in the open step
        self._handed: dict[int, HandedPages] = {}  # pages of the open step, by layer
        self._index: dict[int, Tensor] = {}  # index keys of the open step until append(), by layer
        # Keys and values that wait for index keys, which transformers' own layers pass later.
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        self._running: list[int] = []  # ids of the modules that are in a forward, outermost first
        for part in model.modules():
            if part is model or isinstance(part, PreTrainedModel):  # users may call each of these parts
                finalize(self, part.register_forward_pre_hook(BeginOfForward(self)).remove)
                finalize(self, part.register_forward_hook(EndOfForward(self), always_call=True).remove)
        super().__init__(
            layers=[
                PagedLayer(self, number) if number in paged else cache_utils.DummyLayer()
                for number in range(len(layouts))
            ]
        )
        self.renew_states()

    @property
    def as_argument(self) -> dict[str, "PagedCache"]:
        """The cache as a keyword argument: ``cache``, or ``past_key_values`` before transformers 5.24."""
        return {"cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values": self}

    @property
    def kv(self) -> KVCache:
        """The underlying KVCache, e.g. to read its lengths; reading this property closes an open step."""
        self._close_step()
        return self._kv

    @property
    def length(self) -> int:
        """The number of tokens per row, padding included."""
        return self.length_of(self._numbers[0])

    def append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values ``[b, g, s, d]`` of a layer, and return all its keys and values.

        The first step returns the arguments themselves; later steps return placeholders for pages.
        """
        b, s = key.shape[0], key.shape[2]
        if index == self._numbers[0] and index not in self._index:
            self._begin(b, s)
        self._check_step(index, b, s)
        layer = self._open[index]
        is_latent = layer.layout.is_latent
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise NotImplementedError(
                "hf.PagedCache: expected no gradients, which pages cannot carry, got keys or values that "
                "require them; call the model under torch.no_grad(), or with use_cache=False"
            )
        if not is_latent:
            check_shapes(index, layer.layout, key, value)
        k, v = (x[:, 0].flatten(0, 1) if is_latent else x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        if layer.layout.index_dim and index not in self._index:
            self._waiting[index], view = (k, v), layer.step_view
        else:
            view = layer.append(k, v if v.shape[-1] else None, index=self._index.pop(index, None))
        if not self._length:
            return key, value
        pages = self._handed[index] = HandedPages(index, view, s)
        return tuple(placeholder(x, self._length + s, pages) for x in (key, value))

    def append_index(self, index: int, keys: Tensor, select: Indexer | None = None) -> AnyKeys:
        """Return all index keys ``[b, t, d]`` of a layer, whose new ones are ``keys`` ``[b, s, d]``.

        They are stored with the layer's keys and values: either those that wait for them, or those of the
        call of :meth:`append` that follows. For an index branch ``select`` of attnlib, the result names their
        pages if a kernel reads them there.
        """
        b, s, _ = keys.shape
        if index == self._numbers[0] and index not in self._waiting:
            self._begin(b, s)
        self._check_step(index, b, s)
        layer, new, t = self._open[index], keys.flatten(0, 1)[:, None], self._length + s
        if self._length and select is not None and _read_in_place(keys, layer, select):
            keys = StoredKeys.of(layer.store_index(new), t)
        elif self._length:
            keys = layer.index_keys(new, t)[:, :, 0]
        if not layer.layout.has_keys:
            layer.append(None, index=new)
            return keys
        if index not in self._waiting:
            self._index[index] = new
            return keys
        k, v = self._waiting.pop(index)
        view = layer.append(k, v if v.shape[-1] else None, index=new)
        if index in self._handed:
            self._handed[index].view = view
        return keys

    def _check_step(self, index: int, b: int, s: int) -> None:
        """Raise RuntimeError if a layer stores other tokens than the first layer in this step."""
        if self._step is None or (b, s) != (len(self.handles), self._tokens):
            raise RuntimeError(
                f"update: layer {index}: expected {self._tokens} tokens in each of {len(self.handles)} rows, "
                f"as layer {self._numbers[0]} had in this step, got {s} tokens in each of {b}"
            )

    def length_of(self, index: int) -> int:
        """Return the number of tokens per row that a layer has stored."""
        return self._length + (self._tokens if self._step is not None and self._open[index].appended else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys a step of ``query_length`` tokens sees, and the index of the first key, 0."""
        self._close_step()
        return self._length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows after a step of beam search: row i then continues the old row ``beam_idx[i]``."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows at ``indices``, in this order; a bool mask of the rows to keep works, too."""
        self._select(torch.arange(len(self.handles), device=indices.device)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row with ``repeats`` adjacent forks of it."""
        self._select([row for row in range(len(self.handles)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of each row.

        Raises:
            NotImplementedError: there are recurrent states.
        """
        self.refuse_states("crop")
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected at most 0, as in every cache, got {tokens_to_remove}"
            )
        self._close_step()
        for handle in self.handles:
            self._kv.truncate(handle, self._length + tokens_to_remove)
        self._length += tokens_to_remove if self.handles else 0

    def activate_past_recording(self) -> None:
        """Check that rows can be cropped later, as assisted generation does; nothing else needs preparation.

        Raises:
            ValueError: cropping would fail, because a layer has a window and ``rollback`` is 0.
            NotImplementedError: there are recurrent states.
        """
        self.refuse_states("activate_past_recording")
        if not self._rollback and any(layout.window is not None for layout in self._kv.layouts):
            raise ValueError("rollback: expected as many tokens as assisted generation may reject, got 0")

    def reset(self) -> None:
        """Free all rows, and undo the open step."""
        self._undo()
        self.renew_states()
        self._kv.release(*self.handles)
        self.handles, self._length = [], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the maximum length of a row, or -1 if only the number of pages limits it."""
        return -1 if self._max_length is None else self._max_length

    def _begin(self, rows: int, tokens: int) -> None:
        self._close_step()
        if not self.handles:
            self.handles = self._kv.admit(rows)
        if rows != len(self.handles):
            raise ValueError(
                f"update: expected {len(self.handles)} rows as before, got {rows}; call reset() first"
            )
        step = self._kv.step(dict.fromkeys(self.handles, tokens))
        self._open = dict(zip(self._numbers, step.__enter__(), strict=True))
        self._step, self._tokens = step, tokens

    def begin_of_forward(self, model: nn.Module) -> None:
        """Record that a forward of ``model`` has begun.

        Raises:
            RuntimeError: a step that used recurrent states has failed.
        """
        self._running.append(id(model))
        self.check_states()

    def end_of_forward(self, model: nn.Module, output: Any) -> None:
        """Close the open step when the outermost forward ends, or undo it if the forward raised (no output).

        Raises:
            RuntimeError: a layer stored nothing, or attention did not read its pages.
        """
        at = self._running.index(id(model)) if id(model) in self._running else 0
        del self._running[at:]
        if at:
            return
        self.end_of_states(failed=output is None)
        if output is None:
            self._undo()
        elif self._step is not None and not all(layer.appended for layer in self._open.values()):
            missing = next(index for index, layer in self._open.items() if not layer.appended)
            self._undo()
            raise RuntimeError(
                f"layer {missing}: expected keys and values in every step, got none; the step was undone"
            )
        else:
            self._close_step()

    def _close_step(self) -> None:
        """Close the open step; it was open until now because attention reads pages after the last append.

        If some layers stored nothing, the model raised in the middle of its forward, and the step is undone.

        Raises:
            RuntimeError: attention did not read the pages of a layer.
        """
        if self._step is None:
            return
        unread = [index for index, pages in self._handed.items() if not pages.was_read]
        if not all(layer.appended for layer in self._open.values()):
            self._undo()
        elif unread:
            self._undo()
            raise RuntimeError(
                f"layer {unread[0]}: expected attention to the pages that update() returned, got none; the "
                "model changes what update() returned, or calls another attention implementation. The step "
                "was undone; use a DynamicCache for this model"
            )
        else:
            step, self._step = self._step, None
            self._handed.clear()
            step.__exit__(None, None, None)
            self._length += self._tokens

    def _undo(self) -> None:
        """Abort the open step, and free the rows that it created."""
        if self._step is None:
            return
        self._is_torn = bool(self._counts)
        step, self._step = self._step, None
        self._handed.clear()
        self._index.clear()
        self._waiting.clear()
        with suppress(_Aborted):
            step.__exit__(_Aborted, _Aborted(), None)
        if not self._length:
            self._kv.release(*self.handles)
            self.handles = []

    def _select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of the old row ``rows[i]``; copies share pages, and unused old rows are freed."""
        self._close_step()
        self.select_states(rows)
        for number in self._numbers:
            self.layers[number].select_positions(rows)
        self._kv.release(*(handle for row, handle in enumerate(self.handles) if row not in rows))
        used: set[int] = set()
        chosen = []
        for row in rows:
            chosen.append(self._kv.fork(self.handles[row])[0] if row in used else self.handles[row])
            used.add(row)
        self.handles = chosen


def _read_in_place(keys: Tensor, layer: LayerCache, select: Indexer) -> bool:
    """True if a kernel reads index keys in pages for queries like ``keys`` ``[b, s, d]``."""
    queries = keys[:, :, None].expand(-1, -1, select.heads, -1)
    return reads_stored(queries, layer.step_view, select)


class _Aborted(Exception):
    """An exception that makes the context manager of an open step undo the step."""


class PagedLayer(CacheLayerMixin):
    """One layer of a :class:`PagedCache`, as transformers expects it."""

    def __init__(self, cache: PagedCache, index: int):
        self._cache, self._index = cache, index
        self._positions: Tensor | None = None
        super().__init__()
        self.is_initialized: bool = True
        self.is_croppable: bool = True

    @property
    def keys(self) -> NoReturn:
        """Always raise NotImplementedError, because keys and values are in pages, not in one tensor."""
        raise NotImplementedError(
            f"layer {self._index}: expected no direct access to cached keys or values, which hf.PagedCache "
            "stores in pages; use a DynamicCache for this model"
        )

    @keys.setter
    def keys(self, x: Tensor | None) -> None:
        """Ignore the None that transformers assigns to a layer without tokens."""

    values = keys

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions ``[axes, b, t]`` of stored tokens, which Qwen 4 keeps here; None without tokens."""
        stored = self.get_seq_length()
        return self._positions[..., :stored] if stored and self._positions is not None else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        self._positions = positions

    def select_positions(self, rows: Sequence[int]) -> None:
        """Make row i of the positions the old row ``rows[i]``."""
        if self._positions is not None:
            self._positions = self._positions[:, rows]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, because the pages of the cache are allocated in advance."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; see :meth:`PagedCache.append`."""
        return self._cache.append(self._index, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Return all index keys of the layer; see :meth:`PagedCache.append_index`."""
        return self._cache.append_index(self._index, indexer_key_states)

    def append_index(self, keys: Tensor, select: Indexer) -> AnyKeys:
        """Return all index keys for an index branch of attnlib; see :meth:`PagedCache.append_index`."""
        return self._cache.append_index(self._index, keys, select)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Return all index keys ``[b, 1, t, d]`` of a layer of MiniMax-M3; the new ones are ``idx_k``."""
        return self._cache.append_index(self._index, idx_k[:, 0])[:, None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the first key's index; see :meth:`PagedCache.get_mask_sizes`."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_seq_length(self) -> int:
        """Return the number of tokens per row; see :meth:`PagedCache.length_of`."""
        return self._cache.length_of(self._index)

    def get_max_length(self) -> int:
        """Return the maximum length of a row; see :meth:`PagedCache.get_max_length`."""
        return self._cache.get_max_length()
