"""One layer of a cache: the tensors of its pages, and ``append``, which writes a step's tokens to them."""

from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..dispatch.storage import cached_write, write_cache, write_index
from ..internal.checks import came
from ..internal.signatures import leading_to
from ..kv import KVLayout, KVView, StepInfo
from ..rope.rope import Angles
from .routes import StepRoute
from .sequences import Prompt
from .step import PerStep, PerWindow

AS_GIVEN = "as given"  # the rotary convention that is recorded for keys appended without angles


@leading_to("`with cache.step(...) as layers` gives them")
class LayerCache:
    """One layer of a cache, which an attention layer appends to and reads.

    Every step yields the same object, so that torch.compile compiles a model only once.

    Attributes:
        layout: the layout of the keys and values of one token.
        prefill: True if some sequence gets more than 16 tokens in this step.
        history: the longest length before the step, rounded up to a power of two, 0 if all are empty. Read it
            only if ``prefill`` is True, or a compiled model recompiles as sequences grow.
        prompts: in a packed step, the sequences with more than 16 new tokens. Compiled layers must not read
            it.
        positions: rotary positions of the step's tokens, int32 ``[b, s]`` or packed ``[t]``: the index in the
            sequence minus left padding, 0 for padding itself. None outside a step.
        cu_seqlens: offsets of the sequences in a packed step, int32 ``[b + 1]``; None in a dense one.
        planes: the stored tensors by name, ``[pages, page_size, g, *]``.
    """

    def __init__(self, layout: KVLayout, pages: int, page_size: int, device: torch.device, info: StepInfo):
        self.layout = layout
        self.info = info
        self.positions: Tensor | None = None
        self.planes: dict[str, Tensor] = {
            name: torch.empty(
                pages, page_size, heads, *((width,) if width else ()), dtype=dtype, device=device
            )
            for name, (heads, width, dtype) in layout.planes.items()
        }
        # The rotary convention of the stored keys is None before the first append.
        self.convention: str | None = None
        self.appended: bool = False  # True after append
        self._prepared: tuple = ()  # positions, slots to write to, and view, for steps of the present shape
        self._slots: Tensor | None = None  # where append writes; None if nothing may be appended
        self._view: KVView | None = None  # None outside a step and a read
        self._appended_view: KVView | None = None  # what append returned in this step
        self._route: StepRoute | None = None

    def append(
        self,
        k: Tensor | None,
        v: Tensor | None = None,
        *,
        angles: Angles | None = None,
        index: Tensor | None = None,
    ) -> KVView:
        """Write this step's keys and values and return the view that includes them.

        ``k`` is ``[b, s, g, d]`` or packed ``[t, g, d]``. If ``angles`` are given, they rotate ``k``. For
        latent storage, ``append(latent, k_rope)`` takes ``[..., r]`` and ``[..., p]``, and ``angles`` rotate
        ``k_rope``, which is None if the layout has ``rope_dim=0``. ``index`` has the index keys ``[b, s,
        index_heads, index_dim]`` or packed, already rotated. A layout with ``index_dim`` needs them, and any
        other refuses them. For a layout of index keys only, k is None. A second call in the same step
        overwrites the tokens. Under ``torch.autocast``, k, v and index keys are cast to the layout's dtype.

        Raises:
            RuntimeError: outside a step, in a ``read``, or with another rotary convention than in the first
                append (no angles counts as a convention).
            ValueError, TypeError: shapes, dtype or device do not fit the layout.
            NotImplementedError: k, v or index requires a gradient, which a cache does not have.
        """
        if not self.layout.has_keys:
            return self._append_index(k, v, index)
        key = self._key(k, v, angles, index)
        if key is None or (write := cached_write(self._view, self._slots, key)) is None:
            self._write(k, v, angles, index)
        elif index is None:
            write(k, v, angles)
        else:
            write(k, v, angles, index)
        self.appended = True
        if self._route is None:
            self._appended_view = self._view
        else:
            self._appended_view = self._route.appended(self._view, k, v, angles, history=self.history)
        return self._appended_view

    def index_keys(self, new: Tensor, stop: int | None = None) -> Tensor:
        """Return all index keys of the step's sequences, if those of its tokens are ``new``; store nothing.

        ``new`` is ``[b, s, index_heads, index_dim]`` or packed, as for :meth:`append`. ``stop`` and the
        result are those of :meth:`attnlib.KVView.index_keys`; no sequence may be longer than ``stop``.

        Raises:
            RuntimeError: outside a step.
            ValueError, TypeError, NotImplementedError: as :meth:`append`; or the layout has no index keys.
        """
        view, new = self._view, self._new_index(new)
        keys = view.index_keys(stop)
        token = torch.arange(new.shape[-3], device=keys.device)
        if (offsets := view.cu_seqlens_q) is None:
            row = torch.arange(new.shape[0], device=keys.device)[:, None]
            at = (view.lengths - new.shape[1])[:, None] + token
        else:
            row = torch.bucketize(token, offsets[1:], right=True)
            at = view.lengths[row] - offsets[row + 1] + token
        keys[row, at] = new.where((at >= view.starts[row])[..., None, None], 0)
        return keys

    def store_index(self, new: Tensor | None) -> KVView:
        """Write only this step's index keys, and return the view with them.

        ``append`` still needs them, and writes them once more. ``new`` and errors are those of
        :meth:`index_keys`.
        """
        write_index(self._view, self._new_index(new), self._slots)
        return self._view

    def _append_index(self, k: Tensor | None, v: Tensor | None, index: Tensor | None) -> KVView:
        """Append to a layer that stores index keys only."""
        if k is not None or v is not None:
            got = came(v if k is None else k)
            raise ValueError(f"k, v: expected None, since the layout stores index keys only, got {got}")
        self._appended_view = self.store_index(index)
        self.appended = True
        return self._appended_view

    def _new_index(self, new: Tensor | None) -> Tensor:
        """Validate the index keys of this step's tokens."""
        if self._slots is None:
            self._refuse_append()
        if "index" not in self.planes:
            raise ValueError(_index_error(self.layout, new))
        return self._fit("index", new, (self.layout.index_heads, self.layout.index_dim))

    @property
    def step_view(self) -> KVView | None:
        """The view of this step or read, also before :meth:`append`; None outside."""
        return self._view

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have; 0 outside a step."""
        return 0 if self._view is None else self._view.table.shape[1] * self._view.page_size

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self._view is None else self._view.cu_seqlens_q

    @property
    def prefill(self) -> bool:
        return self.info.prefill

    @property
    def history(self) -> int:
        return self.info.history

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self.info.prompts

    def _write(self, k: Tensor, v: Tensor | None, angles: Angles | None, index: Tensor | None) -> None:
        """Validate and write the tokens, and cache the launch for later appends with the same key."""
        if self._slots is None:
            self._refuse_append()
        layout = self.layout
        if layout.is_latent:
            new_k = self._fit("latent", k, (layout.dim,))
            if (v is None) == ("k_rope" in self.planes):
                raise ValueError(_rope_key_error(layout, v))
            new_v = None if v is None else self._fit("k_rope", v, (layout.rope_dim,))
        else:
            new_k = self._fit("k", k, (layout.heads, layout.dim))
            new_v = self._fit("v", v, (layout.heads, layout.value_dim))
        if (index is None) == ("index" in self.planes):
            raise ValueError(_index_error(layout, index))
        new_index = None
        if index is not None:
            new_index = self._fit("index", index, (layout.index_heads, layout.index_dim))
        if angles is not None and not isinstance(angles, Angles):
            raise TypeError(
                f"angles: expected Angles as rope.angles(positions) gives, got {type(angles).__name__}"
            )
        self._record(AS_GIVEN if angles is None else angles.convention)
        is_as_given = new_k is k and new_v is v and new_index is index
        key = self._key(k, v, angles, index) if is_as_given else None
        write_cache(self._view, new_k, new_v, self._slots, angles=angles, index=new_index, key=key)

    def _key(self, k: Tensor, v: Tensor | None, angles: Angles | None, index: Tensor | None) -> tuple | None:
        """Return the cache key of an append, or None if it must be validated every time."""
        if torch.compiler.is_compiling() or self._slots is None:
            return None
        key = ()
        for x in (k, v, index):
            if x is None:
                key += (None,)
            elif type(x) is not Tensor or x.requires_grad or x.is_nested or x.layout is not torch.strided:
                return None
            else:
                key += (x.shape, x.stride(), x.dtype, x.device)
        if angles is not None:
            if type(angles) is not Angles or angles.convention != self.convention:
                return None
            cos, sin = angles.cos, angles.sin
            key += (cos.shape, cos.stride(), sin.stride(), cos.device, angles.interleaved)
        elif self.convention != AS_GIVEN:
            return None
        return key

    def view(self) -> KVView:
        """Return a view of the stored tokens, with this step's query counts.

        In a step, this is the view that ``append`` returned. Other layers may read it: cross-attention, and
        layers that have no keys of their own. In a read, queries are those of cross-attention.

        Raises:
            RuntimeError: outside a step and a read, or before ``append`` in a step without ``replay=True``.
        """
        if self._view is None:
            raise RuntimeError("view: only within `with cache.step(...)` or `with cache.read(...)`")
        if self._slots is not None and not (self.appended or self.info.replay):
            raise RuntimeError(
                "view: this layer has not appended in this step; call the layer that owns the keys before "
                "the layers that read them"
            )
        return self._view if self._appended_view is None else self._appended_view

    def _refuse_append(self) -> NoReturn:
        if self._view is None:
            raise RuntimeError("append: only within `with cache.step(...) as layers`; this step has ended")
        raise RuntimeError("append: a read() stores nothing; use `with cache.step(...) as layers`")

    def _fit(self, name: str, x: Tensor | None, last: tuple[int, ...]) -> Tensor:
        """Validate ``x`` against the step and the layout, and return it in the layout's dtype."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name}: expected a strided tensor, got a nested or sparse one")
        if x.shape != (*self.positions.shape, *last):
            raise ValueError(_shape_error(name, x, self.positions, last))
        if x.device != self._slots.device:
            raise ValueError(f"{name}: expected device {self._slots.device} like the cache, got {x.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: a cache has no backward; wrap the call in torch.no_grad()")
        dtype = self.layout.dtype
        if x.dtype == dtype:
            return x
        if x.dtype.is_floating_point and torch.is_autocast_enabled(x.device.type):
            return x.to(dtype)
        raise TypeError(
            f"{name}: expected {dtype} like the cache, got {x.dtype}; cast it, or make the cache in {x.dtype}"
        )

    def _put(self, rows: dict[str, Tensor], convention: str | None) -> None:
        """Write this step's tokens from stored tensors, bit for bit; ``convention`` tells how keys rotate.

        Raises:
            RuntimeError: the cache stores keys of another rotary convention.
        """
        if convention is not None:
            self._record(convention)
        for name, plane in self.planes.items():
            # Write the tensors as bytes, since some devices cannot index fp8 tensors.
            plane.view(torch.uint8).flatten(0, 1)[self._slots] = rows[name].to(plane.device).view(torch.uint8)
        self.appended = True

    def _record(self, convention: str) -> None:
        if self.convention is None:
            self.convention = convention
        elif self.convention != convention:
            raise RuntimeError(
                f"angles: this cache stores keys rotated as {self.convention!r}, got {convention!r}; "
                "use one rotary convention, or another cache"
            )

    def _prepare(self, page_size: int, step: PerStep, window: PerWindow) -> None:
        """Build the view for steps of one shape. The cache calls this method when the shape changes."""
        planes = dict(self.planes)
        if not self.layout.has_keys:
            planes["k"] = planes["v"] = planes["index"]
        if self.layout.is_latent:
            planes["v"] = planes["k"]
            if "k_scale" in planes:
                planes["v_scale"] = planes["k_scale"]
        rope = None if self.convention == AS_GIVEN else self.convention
        buffers = {**step._asdict(), "table": window.table, "starts": window.starts}
        buffers["schedule"] = window.schedules.get(self.layout.heads)
        view = KVView(self.layout, page_size, **planes, **buffers, rope=rope, step=self.info, check=False)
        self._route = window.route
        if window.route is not None:
            view = window.route.routed(view)
        self._prepared = (step.positions, window.slots, view)

    def _open(self) -> None:
        """Enter a step or read with the prepared view. The cache calls this method."""
        self.positions, self._slots, self._view = self._prepared
        self._appended_view, self.appended = None, False

    def _close(self) -> None:
        """Leave the step or read. The cache calls this method."""
        self.positions = self._slots = self._view = self._appended_view = None

    def _poison(self, pages: Sequence[int]) -> None:
        """Fill freed pages with NaN (-128 in an int8 cache). The cache calls this method."""
        for plane in self.planes.values():
            byte = {torch.int8: 0x80, torch.float8_e4m3fn: 0x7F}.get(plane.dtype)  # 0x7F is the NaN of e4m3fn
            for page in pages:
                plane[page].fill_(torch.nan) if byte is None else plane[page].view(torch.uint8).fill_(byte)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a LayerCache cannot be copied or pickled: it is part of a KVCache")


def _shape_error(name: str, x: Tensor, positions: Tensor, last: tuple[int, ...]) -> str:
    step = zip("bs" if positions.dim() == 2 else "t", positions.shape, strict=True)
    width = {"latent": "r", "k_rope": "p", "k": "gd", "v": "ge", "index": ("index_heads", "index_dim")}[name]
    expected = ", ".join(f"{dim}={size}" for dim, size in (*step, *zip(width, last, strict=True)))
    return f"{name}: expected [{expected}] in this step, got {tuple(x.shape)}"


def _rope_key_error(layout: KVLayout, k_rope: Tensor | None) -> str:
    if k_rope is None:
        return f"k_rope: expected the shared rotary key [..., p={layout.rope_dim}], got None"
    return f"k_rope: expected None, since the layout has rope_dim=0, got {tuple(k_rope.shape)}"


def _index_error(layout: KVLayout, index: Tensor | None) -> str:
    if index is None:
        sizes = f"index_heads={layout.index_heads}, index_dim={layout.index_dim}"
        return f"index: expected the index keys [..., {sizes}] that the layout stores, got None"
    return f"index: expected None, got {came(index)}; make the layout with index_dim= to store index keys"
