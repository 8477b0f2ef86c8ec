"""Calls that repeat: on a GPU, without gradients, the same shapes run again what the first call of them found."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .call import Call
from .mask import Mask

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
LIMIT = 4096  # calls remembered, before all are forgotten
FLOATS, NAMES = (float, type(None)), (str, type(None))

_runs: dict[tuple, Run] = {}


def unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody follows operators: no compiler, tracer, mode, transform, profiler or subclass of Tensor.

    Then a call may skip torch's dispatcher, which takes longer than all the rest of it.
    """
    return not (
        torch.compiler.is_compiling()
        or type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or _follows_functions()
    )


def _follows_functions() -> bool:
    """Whether a mode follows torch's functions; a default device is none that minds."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def _may_repeat(call: Call, name: str | None) -> bool:
    """Whether a call depends on no more than keys tell."""
    q, k, v = call.q, call.k, call.v
    if call.kv is not None:
        k = v = q
    if (
        torch.compiler.is_compiling()
        or not (isinstance(q, Tensor) and q.is_cuda)
        or type(call.mask) is not Mask
        or not unwatched(q, k, v)
        or not (q.layout is k.layout is v.layout is torch.strided)
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
        or q.is_nested
        or k.is_nested
        or v.is_nested
    ):
        return False
    score, dropout = call.score, call.dropout
    if not (score.alibi_slopes is score.sinks is call.key_starts is call.key_ends is dropout.seed is None):
        return False
    if dropout.p != 0 or type(dropout.p) is not float:
        return False
    # 1, 1.0 and True would be one key, and not all of them are what a call takes.
    return type(score.scale) in FLOATS and type(score.softcap) in FLOATS and type(name) in NAMES


def key(call: Call, name: str | None) -> tuple | None:
    """All that a dense call depends on but the tensors' values; None if it may not be remembered."""
    if call.packing is not None or not _may_repeat(call, name):
        return None
    q, k, v, score = call.q, call.k, call.v, call.score
    layouts = (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype)
    return (q.get_device(), k.get_device(), v.get_device(), *layouts, call.mask, score.scale, score.softcap, name)


def cached_key(call: Call, name: str | None) -> tuple | None:
    """The same for a call over a view, which remembers itself."""
    if not _may_repeat(call, name):
        return None
    q, score = call.q, call.score
    where = (q.get_device(), q.shape, q.stride(), q.dtype, q.data_ptr() & 15)
    return (*where, call.mask, score.scale, score.softcap, name)


def find(key: tuple | None) -> Run | None:
    """What ran the first call of this key."""
    return None if key is None else _runs.get(key)


def remember(key: tuple, run: Run | None) -> None:
    """Run calls of this key by ``run``, if there is one, from now on."""
    if run is not None:
        if len(_runs) >= LIMIT:
            _runs.clear()
        _runs[key] = run


def forget() -> None:
    """Forget all calls; for those who change what decides a call, such as the launch tables."""
    _runs.clear()
