"""The call cache: a repeated call skips validation, and replays what the first such call prepared.

On a GPU these are kernel launches, on a CPU torch's fused attention, or attention over a cache.
"""

from collections.abc import Callable
from weakref import finalize

import torch
from torch import Tensor

from ..fp8 import Descales
from ..internal.watched import are_watched, is_forward_mode
from ..kv import KVView
from ..masks.band import Mask
from .call import NO_ORIGIN, Call

# A cached call takes q, k, v and their descales. It returns the output, and the LSE if requested.
Run = Callable[[Tensor, Tensor | None, Tensor | None, Descales | None], tuple[Tensor, Tensor | None]]
# A cached write takes the k and v of a step and the rotary angles, then the index keys if the layout has any.
Write = Callable[..., None]
FLOATS, NAMES = frozenset((float, type(None))), (str, type(None))
COMPUTED = (type(None), torch.dtype)
Key = tuple[object, ...]  # equal keys mean that one cached call or write can serve both


def key_of(call: Call, name: str | None) -> Key | None:
    """Return the cache key of a call: everything it depends on except its view and its tensors' values.

    Return None if the call cannot be cached, for example under torch.compile or with optional tensors.
    """
    q, k, v, score, dropout = call.q, call.k, call.v, call.score, call.dropout
    if call.kv is not None:
        k = v = q
    if (
        not (isinstance(q, Tensor) and (q.is_cuda or q.is_cpu))
        or are_watched(q, k, v)  # torch.compile or a dispatch mode records the operations of the call
        or type(call.mask) is not Mask
        or call.packing is not None
        or call.origin is not NO_ORIGIN
        or not (call.key_starts is call.key_ends is dropout.seed is None)
        or dropout.p != 0
        or type(dropout.p) is not float
        # Only floats and None: tensors cannot be keys, and 1 and True equal 1.0, but may be invalid.
        or not FLOATS.issuperset(map(type, score))
        or type(name) not in NAMES
        or type(call.compute_dtype) not in COMPUTED
        or not (q.layout is k.layout is v.layout is torch.strided)
        or torch.is_autocast_enabled(q.device.type)
        or is_forward_mode(q, k, v)
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        return None
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    asked = (q.get_device(), q.shape, q.stride(), q.dtype, call.compute_dtype)
    asked += (call.mask, score, grad, name, call.lse)
    if call.descales is not None:
        if not all(x is None or _is_plain(x) for x in call.descales):
            return None
        asked += tuple(None if x is None else (x.get_device(), x.shape, x.dtype) for x in call.descales)
    if call.kv is not None:
        return *asked, q.data_ptr() & 15
    layouts = (k.get_device(), k.shape, k.stride(), k.dtype, v.get_device(), v.shape, v.stride(), v.dtype)
    return *asked, *layouts


def _is_plain(x: object) -> bool:
    """True for a contiguous tensor without a gradient."""
    is_strided = type(x) is Tensor and x.layout is torch.strided and not x.is_nested
    return is_strided and x.is_contiguous() and not x.requires_grad


class CallCache:
    """A bounded call cache: ``limit`` calls on tensors, and ``limit`` per view, freed with the view."""

    def __init__(self, limit: int):
        self.limit = limit
        self._over_tensors: dict[Key, Run | Write] = {}
        self._over_views: dict[int, dict[Key, Run | Write]] = {}  # by id(view), until a view is freed

    def find(self, view: KVView | None, key: Key) -> Run | Write | None:
        """Return the cached call of this key over a view, or over tensors if ``view`` is None."""
        runs = self._over_tensors if view is None else self._over_views.get(id(view))
        return None if runs is None else runs.get(key)

    def add(self, view: KVView | None, key: Key, run: Run | Write | None) -> None:
        """Cache ``run`` for calls of this key, unless it is None. A full cache is emptied first."""
        if run is None:
            return
        runs = self._over_tensors if view is None else self._over_views.get(id(view))
        if runs is None:
            runs = self._over_views[id(view)] = {}
            finalize(view, self._over_views.pop, id(view), None)
        if len(runs) >= self.limit:
            runs.clear()
        runs[key] = run

    def count(self, view: KVView | None = None) -> int:
        """Return the number of cached calls over a view, or over tensors if ``view`` is None."""
        return len(self._over_tensors if view is None else self._over_views.get(id(view), ()))

    def clear(self) -> None:
        """Empty the cache; needed after changes that are not part of the keys, such as new launch tables."""
        self._over_tensors.clear()
        self._over_views.clear()
