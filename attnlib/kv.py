"""Stored keys and values: the layout of a token (KVLayout), a batch (KVView), and ways to read it (Route)."""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .internal.checks import came, check_count
from .internal.renamed import field_getattr
from .internal.signatures import kind
from .masks.band import AnyMask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STORES = (torch.int8, torch.float8_e4m3fn)
PLANES = ("k", "k_rope", "v", "k_scale", "v_scale", "index", "index_scale")
OF_VALUES = ("v", "v_scale")  # in latent storage, these are k and its scale
RunCall = Callable[[Any], tuple[Tensor, Tensor]]  # takes a Call, returns output and LSE


@kind
@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one token in a layer, made by :meth:`grouped`, :meth:`latent` or :meth:`index_only`.

    Attributes:
        heads: the number of KV heads, 1 for latent storage.
        dim: channels of a key, or the rank of a latent; 0 if only index keys are stored.
        value_dim: channels of a value, or the rank of a latent.
        rope_dim: channels of the shared rotary key of latent storage, 0 for grouped storage.
        is_latent: True for latent storage.
        window: how many keys a query sees, its own included; a paged cache drops older pages. None retains
            all keys.
        dtype: the dtype of computation.
        storage_dtype: torch.int8 or torch.float8_e4m3fn to store everything except rotary keys in one byte
            per value, with an fp32 scale per token and head. None stores values in ``dtype``.
        first_tokens: the number of first tokens that a window never drops.
        index_dim: channels of an index key, 0 for layers without index keys. Sparse attention scores index
            keys to choose the keys that a query sees.
        index_heads: the number of index keys per token: 1 if all heads share it, as in DeepSeek Sparse
            Attention, or one per KV head.
        index_dtype: torch.float8_e4m3fn to store index keys in one byte per channel, with an fp32 scale per
            token and index head. None stores them in ``dtype``, whatever ``storage_dtype`` is.
    """

    heads: int
    dim: int
    value_dim: int
    rope_dim: int
    is_latent: bool
    window: int | None
    dtype: torch.dtype
    storage_dtype: torch.dtype | None
    first_tokens: int = 0
    index_dim: int = 0
    index_heads: int = 1
    index_dtype: torch.dtype | None = None

    if not TYPE_CHECKING:  # type checkers would accept any attribute
        __getattr__ = field_getattr(
            {"store": "storage_dtype", "tail": "rope_dim", "keep_first": "first_tokens"}
        )

    @classmethod
    def grouped(
        cls,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        window: int | None = None,
        first_tokens: int = 0,
        dtype: torch.dtype = torch.float32,
        storage_dtype: torch.dtype | None = None,
        index_dim: int = 0,
        index_heads: int = 1,
        index_dtype: torch.dtype | None = None,
    ) -> "KVLayout":
        """Return the layout of a key ``[heads, dim]`` and a value ``[heads, value_dim]`` for each token.

        Raises:
            ValueError: a size is not positive.
            TypeError: a size is not an int; ``storage_dtype`` is not None, int8 or float8_e4m3fn;
                ``index_dtype`` is not None or float8_e4m3fn; or ``dtype`` is not fp16, bf16, fp32 or fp64.
        """
        check_count("dim", dim, least=1)
        value_dim = dim if value_dim is None else value_dim
        index = (index_dim, index_heads, index_dtype)
        return cls(heads, dim, value_dim, 0, False, window, dtype, storage_dtype, first_tokens, *index)

    @classmethod
    def latent(
        cls,
        rank: int,
        rope_dim: int,
        *,
        window: int | None = None,
        first_tokens: int = 0,
        dtype: torch.dtype = torch.float32,
        storage_dtype: torch.dtype | None = None,
        index_dim: int = 0,
        index_heads: int = 1,
        index_dtype: torch.dtype | None = None,
    ) -> "KVLayout":
        """Return the layout of MLA: a latent ``[1, rank]``, read as both key and value, and a rotary key.

        The rotary key has ``rope_dim`` channels, which may be 0, and is shared by all heads.

        Raises:
            ValueError, TypeError: as :meth:`grouped`.
        """
        index = (index_dim, index_heads, index_dtype)
        return cls(1, rank, rank, rope_dim, True, window, dtype, storage_dtype, first_tokens, *index)

    @classmethod
    def index_only(
        cls,
        index_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        index_heads: int = 1,
        index_dtype: torch.dtype | None = None,
    ) -> "KVLayout":
        """Return the layout of a layer that stores index keys, and reads the keys of another layer.

        Raises:
            ValueError, TypeError: as :meth:`grouped`; or ``index_dim`` is 0.
        """
        check_count("index_dim", index_dim, least=1)
        return cls(1, 0, 0, 0, False, None, dtype, None, 0, index_dim, index_heads, index_dtype)

    def __post_init__(self) -> None:
        arguments = {"dim": "rank", "value_dim": "rank"} if self.is_latent else {}
        sizes = (self.heads, self.dim, self.value_dim, self.rope_dim, self.is_latent)
        is_index_only = all(type(x) in (int, bool) for x in (*sizes, self.index_dim)) and self.index_dim > 0
        of_dim = 0 if is_index_only and sizes == (1, 0, 0, 0, False) else 1
        for name, least in (("heads", 1), ("dim", of_dim), ("value_dim", of_dim), ("rope_dim", 0)):
            check_count(arguments.get(name, name), getattr(self, name), least=least)
        check_count("first_tokens", self.first_tokens)
        if self.window is not None:
            check_count("window", self.window, least=1)
        elif self.first_tokens:
            raise ValueError(
                f"first_tokens: expected 0 without a window, since all is kept then, got {self.first_tokens}"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            raise TypeError(f"dtype: expected fp16, bf16, fp32 or fp64, got {self.dtype}")
        stored = self.storage_dtype
        if stored is not None and (not isinstance(stored, torch.dtype) or stored not in STORES):
            raise TypeError(f"storage_dtype: expected None, torch.int8 or torch.float8_e4m3fn, got {stored}")
        self._check_index()

    def _check_index(self) -> None:
        """Raise ValueError or TypeError if the index keys have no legal size or dtype."""
        check_count("index_dim", self.index_dim)
        check_count("index_heads", self.index_heads, least=1)
        stored = self.index_dtype
        if stored is not None and (not isinstance(stored, torch.dtype) or stored != torch.float8_e4m3fn):
            raise TypeError(
                f"index_dtype: expected None (the layout's dtype) or torch.float8_e4m3fn, got {stored}"
            )
        if not self.index_dim and (self.index_heads, stored) != (1, None):
            raise ValueError(
                f"index_dim: expected at least 1 with index_heads={self.index_heads} and "
                f"index_dtype={stored}, got 0"
            )

    @property
    def has_keys(self) -> bool:
        """False for a layer that stores index keys only."""
        return self.dim > 0

    @property
    def window_class(self) -> int | tuple[int, int] | None:
        """The window, or ``(window, first_tokens)``; layers with an equal result share pages."""
        return (self.window, self.first_tokens) if self.first_tokens else self.window

    def check_reach(self, mask: AnyMask) -> None:
        """Raise ValueError if a mask shows keys that a cache of this layout drops."""
        band, kept = mask.band, mask.kept
        if self.window is None or (band.reach is not None and band.reach < self.window):
            return
        if kept.window is None or kept.window > self.window:
            reach = "without bound" if kept.window is None else f"{kept.window - 1} keys"
            raise ValueError(
                f"mask: it reaches back {reach}, and the cache keeps a window of {self.window}; use sliding()"
            )
        if kept.first > self.first_tokens:
            raise ValueError(
                f"mask: it shows the first {kept.first} keys, and the cache keeps {self.first_tokens} of "
                f"them; make its layout with first_tokens={kept.first}"
            )

    @property
    def planes(self) -> dict[str, tuple[int, int, torch.dtype]]:
        """Stored tensors, ``name -> (heads, width, dtype)``; width 0 (of scales) means no last dimension."""
        main, planes = self.storage_dtype or self.dtype, {}
        if self.has_keys:
            planes["k"] = (self.heads, self.dim, main)
        if self.rope_dim:
            planes["k_rope"] = (self.heads, self.rope_dim, self.dtype)
        if self.has_keys and not self.is_latent:
            planes["v"] = (self.heads, self.value_dim, main)
        if self.has_keys and self.storage_dtype is not None:
            planes["k_scale"] = (self.heads, 0, torch.float32)
            if not self.is_latent:
                planes["v_scale"] = (self.heads, 0, torch.float32)
        if self.index_dim:
            planes["index"] = (self.index_heads, self.index_dim, self.index_dtype or self.dtype)
        if self.index_dtype is not None:
            planes["index_scale"] = (self.index_heads, 0, torch.float32)
        return planes

    @property
    def token_bytes(self) -> int:
        """The memory of one token in one layer, in bytes, scales included."""
        return sum(heads * max(width, 1) * dtype.itemsize for heads, width, dtype in self.planes.values())


@dataclass(slots=True, eq=False)
class StepInfo:
    """The facts of a cache's running step that the host knows; layers choose by them how they attend.

    All layers of a cache share one StepInfo, which each step changes. :class:`attnlib.LayerCache` explains
    the fields.
    """

    prefill: bool = False
    history: int = 0
    prompts: Sequence[Any] = ()
    padded: bool = False  # True if some sequence of the step has left padding
    replay: bool = False  # True if a captured CUDA graph appends for all layers


@kind
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class KVView:
    """The stored keys and values of a batch of sequences, in the form that kernels read.

    The tensors ``k``, ``k_rope``, ``v`` are ``[pages, page_size, g, *]``; only their last dimension must be
    contiguous. For latent storage ``g = 1``, ``v is k``, and a query is ``[latent | rope]``. ``index`` and
    ``index_scale`` have the index keys in the same pages; attention does not read them. If a layer stores
    nothing else, ``k`` and ``v`` are ``index``. ``table`` int32 ``[b, n]`` gives the page of each *absolute*
    page index; entries outside ``[starts, lengths)`` may hold garbage. Only keys in ``[starts[b],
    lengths[b])`` can be visible. The queries are the last tokens of each sequence: ``s`` of them in a dense
    call, ``cu_seqlens_q[b + 1] - cu_seqlens_q[b]`` in a packed call.
    ``schedule`` divides sequences into splits on a GPU. A ``split_size`` above 0 fixes the size of every
    split. Splits are then merged in order, so that no bit of a result depends on the rest of the batch.

    With shared prefixes, or in a cache that is sharded over ranks, a view has a ``route``: it splits an
    attention call into several calls and merges their results. ``dataclasses.replace`` drops the route over
    shared prefixes, and attention then reads all keys in one call. Attention raises an error for a changed
    view of a sharded cache.

    A view of a step also has the step's ``positions``, and ``step`` for layers that choose how they attend.

    Views are compared by identity. A cache makes its views with ``check=False``, since its tensors fit.

    Raises:
        TypeError: an argument is not a tensor of the expected dtype.
        ValueError: the shape, strides or device of a tensor do not fit the layout and the other tensors.
    """

    layout: KVLayout
    page_size: int
    k: Tensor
    v: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    k_rope: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    index: Tensor | None = None
    index_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    positions: Tensor | None = None
    schedule: Tensor | None = None
    split_size: int = 0
    rope: str | None = None
    step: StepInfo | None = None
    route: "Route | None" = None
    check: InitVar[bool] = True

    if not TYPE_CHECKING:
        __getattr__ = field_getattr({"k_tail": "k_rope"})

    def __post_init__(self, check: bool) -> None:
        if self.route is not None:
            object.__setattr__(self, "route", self.route.after_replace())
        if not check:
            return
        if not all(isinstance(x, Tensor) for x in (self.k, self.lengths, self.table)):
            raise TypeError(
                "k, lengths, table: expected tensors, as append() and view() of a cache give them"
            )
        (pages, *_), device, planes = self.k.shape or (0,), self.k.device, self.layout.planes
        if self.layout.is_latent and not (self.v is self.k and self.v_scale is self.k_scale):
            raise ValueError("v: expected k itself, and its scale, since a latent is key and value both")
        if not self.layout.has_keys and not (self.k is self.index and self.v is self.index):
            raise ValueError("k, v: expected the tensor index, since only index keys are stored, got others")
        same = OF_VALUES if self.layout.is_latent else () if self.layout.has_keys else ("k", "v")
        for name in PLANES:
            x = getattr(self, name)
            if name in same:
                continue
            if name in planes:
                heads, width, dtype = planes[name]
                shape = (pages, self.page_size, heads, width) if width else (pages, self.page_size, heads)
                _check_stored(name, x, dtype, shape, device)
            elif x is not None:
                raise ValueError(f"{name}: expected None, since the layout stores none, got a tensor")
        b, columns = self.lengths.numel(), self.table.shape[-1] if self.table.dim() else 0
        _check_numbers("lengths", self.lengths, (b,), device)
        _check_numbers("starts", self.starts, (b,), device)
        _check_numbers("table", self.table, (b, columns), device)
        if self.cu_seqlens_q is not None:
            _check_numbers("cu_seqlens_q", self.cu_seqlens_q, (b + 1,), device)

    def check_contents(self, queries: int) -> None:
        """Read the integers of the view to the host, and raise ValueError if one is out of range.

        Lengths and starts must fit the page table, the pages of visible tokens must exist, and the offsets of
        a packed call must not exceed the number of its ``queries``.
        """
        size, pages, capacity = self.page_size, self.k.shape[0], self.table.shape[1] * self.page_size
        table = self.table.tolist()
        for row, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            if not 0 <= length <= capacity:
                raise ValueError(
                    f"lengths[{row}]: expected 0 to {capacity}, the capacity of its table, got {length}"
                )
            if start < 0:
                raise ValueError(f"starts[{row}]: expected 0 or more, got {start}")
            for index in range(start // size, -(-length // size)):
                if not 0 <= (page := table[row][index]) < pages:
                    raise ValueError(f"table[{row}, {index}]: expected one of {pages} pages, got {page}")
        if self.cu_seqlens_q is not None:
            offsets = self.cu_seqlens_q.tolist()
            if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > queries:
                raise ValueError(
                    f"cu_seqlens_q: expected offsets from 0 that grow to {queries} at most, got {offsets}"
                )

    def index_keys(self, stop: int | None = None) -> Tensor:
        """Gather the index keys of storage indices below ``stop``, in the layout's dtype.

        Return ``[b, t, index_heads, index_dim]``, contiguous, with zeros outside ``[starts, lengths)``. ``t``
        is ``stop``, but at most the capacity of the page table, which is the default. Indices that a window
        with ``first_tokens`` has dropped have keys of other tokens of the sequence. The host reads nothing
        from the device.

        Raises:
            ValueError, TypeError: the layout has no index keys, or ``stop`` is not an int of at least 0.
        """
        size, t = self.page_size, self.table.shape[1] * self.page_size
        if self.index is None:
            raise ValueError("index_keys: expected a layout with index_dim > 0, got one without index keys")
        if stop is not None:
            check_count("stop", stop)
            t = min(stop, t)
        position = torch.arange(t, device=self.table.device)
        stored = (position >= self.starts[:, None]) & (position < self.lengths[:, None])
        page, slot = torch.where(stored, self.table[:, position // size], 0).long(), position % size
        keys = _take(self.index, page, slot)
        if self.index_scale is not None:
            keys = keys.float() * _take(self.index_scale, page, slot)[..., None]
            keys = keys.to(self.layout.dtype)
        return keys.masked_fill_(~stored[..., None, None], 0)

    def with_route(self, route: "Route") -> "KVView":
        """Return a view of the same tensors; attention reads the new view as ``route`` says."""
        view = replace(self, route=None, check=False)
        object.__setattr__(view, "route", route)
        return view

    def with_own_heads(self) -> "KVView":
        """Return a view for calls in which every rank has its own query heads.

        If ranks share the cache, the query heads of all ranks read the same KV heads. Without this method,
        all ranks must have the same queries.
        """
        return self.with_route(self.route.with_own_heads()) if self.is_partial else self

    @property
    def is_partial(self) -> bool:
        """True if this device stores only some of the tokens, and other ranks store the rest."""
        return self.route is not None and self.route.is_partial


class Route(Protocol):
    """The way attention reads a view that needs several kernel calls, such as one with shared prefixes.

    ``is_partial`` is True if this device stores only some of the tokens.
    """

    is_partial: bool

    def attend(self, call: Any, run: RunCall, *, dry: bool = False) -> tuple[Tensor, Tensor] | None:
        """Split a call into several calls, run them by ``run``, and return the merged output and LSE.

        Return None if one call must read the whole view. With ``dry``, ``run`` explains calls and returns
        zeros, and nothing may be sent to other ranks.
        """
        ...

    def explain(self, call: Any, parts: Sequence[Any]) -> Any:
        """Combine the explanations ``parts`` of the calls that :meth:`attend` ran, given in that order."""
        ...

    def after_replace(self) -> "Route | None":
        """Return the route to use after ``dataclasses.replace`` has changed a field of the view."""
        ...


def _take(plane: Tensor, page: Tensor, slot: Tensor) -> Tensor:
    """Gather the entries of a plane at slots of pages."""
    if plane.dtype == torch.float8_e4m3fn:  # torch 2.11 cannot index fp8 on a CPU
        return _take(plane.view(torch.uint8), page, slot).view(plane.dtype)
    return plane[page, slot]


def _check_stored(
    name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise TypeError or ValueError unless ``x`` has this dtype, shape, device and contiguous channels."""
    if not isinstance(x, Tensor) or x.dtype != dtype:
        raise TypeError(f"{name}: expected a {dtype} tensor like the layout, got {came(x)}")
    if x.shape != shape:
        dims = ", ".join(("pages", "page_size", "g", "width")[: len(shape)])
        raise ValueError(f"{name}: expected [{dims}] = {list(shape)} like the layout, got {tuple(x.shape)}")
    if len(shape) == 4 and x.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {x.stride()}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like k, got {x.device}")


def _check_numbers(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise TypeError or ValueError unless ``x`` is int32 of this shape with a contiguous last dimension."""
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name}: expected an int32 tensor, got {came(x)}; cast it with .int()")
    if x.shape != shape:
        raise ValueError(
            f"{name}: expected {list(shape)}, a row for each of the lengths, got {tuple(x.shape)}"
        )
    if x.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {x.stride()}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like k, got {x.device}")
