"""attnlib's paged cache where transformers expects a cache of its own, in ``generate`` and around it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ...cache.kv_cache import KVCache, LayerCache
from ...cache.pages import Handle, Window
from ...internal.signatures import kind
from .layouts import check_shapes, layouts_of
from .pages import BeginOfForward, EndOfForward, HandedPages, stand_in

NAME = "attnlib"  # without "flash", by which transformers would take it for a package of that kind


@kind
class PagedCache(Cache):
    """A :class:`attnlib.KVCache` for ``model.generate(..., **cache.as_argument)``; its own argument is the
    model.

    Rows of a batch are sequences of it: beams fork them, so that they share pages, cropping truncates them,
    and ``reset`` frees them. Layers with a window drop the pages behind it, but for ``rollback`` tokens,
    which an assistant needs. ``pages``, ``page_size``, ``max_sequences`` and ``max_length`` are as in
    :meth:`attnlib.KVCache.paged`; ``store`` keeps it in bytes, as :class:`attnlib.KVLayout` says. What it
    hands to attention stands for keys and values that no other attention can read, and is NaN to it.

    Raises:
        ValueError: a size that is not one, a model whose attention is another's, or whose latents are
        expanded. NotImplementedError: layers that keep no keys and values of tokens.
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
        store: torch.dtype | None = None,
    ):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            raise ValueError(
                f"model: expected attn_implementation={NAME!r}, which alone reads pages, got "
                f"{config._attn_implementation!r}; call model.set_attn_implementation({NAME!r}) after "
                "hf.register()"
            )
        layouts = layouts_of(model, config, store)
        options = {"page_size": page_size, "max_sequences": max_sequences, "max_length": max_length}
        self._kv = KVCache.paged(layouts, pages=pages, rollback=rollback, device=model.device, **options)
        self._rollback, self._max_length = rollback, max_length
        self.handles: list[Handle] = []  # of the rows
        self._length = 0  # of each row, before the step that is open
        self._step: Any = None  # the context of a step that is open, its layers, and its tokens for each row
        self._open: Sequence[LayerCache] = ()
        self._tokens = 0
        self._handed: dict[int, HandedPages] = {}  # by layer, of the step that is open
        self._running: list[int] = []  # ids of the models whose forwards run, the outermost first
        for part in model.modules():
            if part is model or isinstance(part, PreTrainedModel):  # any of these may be called by itself
                finalize(self, part.register_forward_pre_hook(BeginOfForward(self)).remove)
                finalize(self, part.register_forward_hook(EndOfForward(self), always_call=True).remove)
        super().__init__(layers=[PagedLayer(self, index) for index in range(len(layouts))])

    @property
    def as_argument(self) -> dict[str, "PagedCache"]:
        """The cache by its argument's name in this transformers: ``cache``, or ``past_key_values`` before
        5.24.
        """
        return {"cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values": self}

    @property
    def kv(self) -> KVCache:
        """The cache itself, between steps: its lengths and bytes."""
        self._settle()
        return self._kv

    @property
    def length(self) -> int:
        """The tokens of each row, padding included."""
        return self.length_of(0)

    def append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``key`` and ``value`` ``[b, g, s, d]`` of a layer, and give what stands for all that is
        stored.
        """
        b, s = key.shape[0], key.shape[2]
        if index == 0:
            self._begin(b, s)
        if self._step is None or (b, s) != (len(self.handles), self._tokens):
            raise RuntimeError(
                f"update: expected layer {index} in the step of {self._tokens} tokens for each of "
                f"{len(self.handles)} rows that layer 0 began, got {s} for each of {b}"
            )
        layer = self._open[index]
        is_latent = layer.layout.is_latent
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise NotImplementedError(
                "hf.PagedCache: expected no gradients, which pages do not carry, got keys that require them; "
                "call the model under torch.no_grad(), or with use_cache=False"
            )
        if not is_latent:
            check_shapes(index, layer.layout, key, value)
        k, v = (x[:, 0].flatten(0, 1) if is_latent else x.transpose(1, 2).flatten(0, 1) for x in (key, value))
        view = layer.append(k, v if v.shape[-1] else None)
        if not self._length:
            return key, value
        pages = self._handed[index] = HandedPages(index, view)
        return tuple(stand_in(x, self._length + s, pages) for x in (key, value))

    def length_of(self, index: int) -> int:
        """The tokens of each row that the layer has stored."""
        return self._length + (self._tokens if self._step is not None and self._open[index].appended else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys by the end of a step of ``query_length``, which all layers count from 0, and that 0."""
        self._settle()
        return self._length + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from row ``beam_idx[i]``."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a mask of rows keeps those that it shows."""
        self._select(torch.arange(len(self.handles), device=indices.device)[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork each row into as many neighbours."""
        self._select([row for row in range(len(self.handles)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of each row."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove: expected at most 0, as of every cache, got {tokens_to_remove}"
            )
        self._settle()
        for handle in self.handles:
            self._kv.truncate(handle, self._length + tokens_to_remove)
        self._length += tokens_to_remove if self.handles else 0

    def activate_past_recording(self) -> None:
        """Nothing, where tokens behind a window are kept.

        Raises:
            ValueError: they are not, so that cropping would fail later.
        """
        if not self._rollback and any(layout.window is not None for layout in self._kv.layouts):
            raise ValueError("rollback: expected as many tokens as an assistant may take back, got 0")

    def reset(self) -> None:
        """Free all rows."""
        self._undo()
        self._kv.release(*self.handles)
        self.handles, self._length = [], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest that a row may become; -1 where the pages alone say it."""
        return -1 if self._max_length is None else self._max_length

    def _begin(self, rows: int, tokens: int) -> None:
        self._settle()
        if not self.handles:
            self.handles = self._kv.admit(rows)
        if rows != len(self.handles):
            raise ValueError(
                f"update: expected {len(self.handles)} rows as before, got {rows}; call reset() first"
            )
        step = self._kv.step(dict.fromkeys(self.handles, tokens))
        self._open = step.__enter__()
        self._step, self._tokens = step, tokens

    def begin_of_forward(self, model: nn.Module) -> None:
        """Count the forward among those that run."""
        self._running.append(id(model))

    def end_of_forward(self, model: nn.Module, output: Any) -> None:
        """Keep the step of the outermost forward when it ends; undo it if the forward raised, and gave None.

        Raises:
            RuntimeError: some layer stored nothing, or nobody attended to its pages.
        """
        at = self._running.index(id(model)) if id(model) in self._running else 0
        del self._running[at:]
        if at:
            return
        if output is None:
            self._undo()
        elif self._step is not None and not all(layer.appended for layer in self._open):
            missing = next(index for index, layer in enumerate(self._open) if not layer.appended)
            self._undo()
            raise RuntimeError(
                f"layer {missing}: expected keys and values in every step, got none; the step is undone"
            )
        else:
            self._settle()

    def _settle(self) -> None:
        """End the step that is open, as late as this, since its views are read after its last append.

        A step of which some layers have nothing is one whose model raised midway: it is undone.

        Raises:
            RuntimeError: nobody attended to the pages of some layer.
        """
        if self._step is None:
            return
        unread = [index for index, pages in self._handed.items() if not pages.was_read]
        if not all(layer.appended for layer in self._open):
            self._undo()
        elif unread:
            self._undo()
            raise RuntimeError(
                f"layer {unread[0]}: expected attention to the pages that update() handed out, got none; the "
                "model computes with them, or calls another attention. The step is undone; use a "
                "DynamicCache for this model"
            )
        else:
            step, self._step = self._step, None
            self._handed.clear()
            step.__exit__(None, None, None)
            self._length += self._tokens

    def _undo(self) -> None:
        """Take back the step that is open, and the rows that it began."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self._handed.clear()
        with suppress(_Aborted):
            step.__exit__(_Aborted, _Aborted(), None)
        if not self._length:
            self._kv.release(*self.handles)
            self.handles = []

    def _select(self, rows: Sequence[int]) -> None:
        """Let the rows be copies of these, which share what is stored."""
        self._settle()
        self._kv.release(*(handle for row, handle in enumerate(self.handles) if row not in rows))
        used: set[int] = set()
        chosen = []
        for row in rows:
            chosen.append(self._kv.fork(self.handles[row])[0] if row in used else self.handles[row])
            used.add(row)
        self.handles = chosen


class _Aborted(Exception):
    """What undoes a step."""


class PagedLayer(CacheLayerMixin):
    """A layer of a :class:`PagedCache`."""

    def __init__(self, cache: PagedCache, index: int):
        self._cache, self._index = cache, index
        super().__init__()
        self.is_initialized: bool = True
        self.is_croppable: bool = True

    @property
    def keys(self) -> NoReturn:
        """Refuse: keys and values lie in pages.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"layer {self._index}: expected no reading of cached keys or values, which hf.PagedCache stores "
            "in pages; use a DynamicCache for this model"
        )

    @keys.setter
    def keys(self, x: Tensor | None) -> None:
        """Ignore what transformers sets for a layer without tokens."""

    values = keys

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: pages are there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`PagedCache.append`."""
        return self._cache.append(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As :meth:`PagedCache.get_mask_sizes`."""
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_seq_length(self) -> int:
        """As :meth:`PagedCache.length_of`."""
        return self._cache.length_of(self._index)

    def get_max_length(self) -> int:
        """As :meth:`PagedCache.get_max_length`."""
        return self._cache.get_max_length()
