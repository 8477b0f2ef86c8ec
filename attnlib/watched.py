"""Whether anybody follows operators, so that a call must go through torch's dispatcher to be seen.

Much of it is torch's private state, which this file alone reads, and only of versions that are known. Of every other
version it asks what is public, and otherwise takes every call for followed: slower by the dispatcher, and as right,
but for a FlopCounterMode without formulas, which nobody then notices.
"""

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

KNOWN = ("2.11", "2.12", "2.13")  # the versions on which the tests have passed
try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
    from torch.autograd import _profiler_enabled
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
except ImportError:
    IS_KNOWN = False
else:
    IS_KNOWN = ".".join(torch.__version__.split(".")[:2]) in KNOWN and hasattr(forward_ad, "_current_level")


def are_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a compiler, tracer, mode, transform or profiler follows operators, or these tensors are for such alone.

    If not, a call may go around torch's dispatcher, which takes longer than all the rest of it.

    Raises:
        RuntimeError: a FlopCounterMode would count attention as nothing.
    """
    if not IS_KNOWN or torch.compiler.is_compiling():
        return True
    if _len_torch_dispatch_stack() > 0:
        _refuse_counters()
        return True
    return (
        type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or q.is_meta
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or _follows_functions()
    )


def _refuse_counters() -> None:
    """Raise RuntimeError under a FlopCounterMode that was made without the formulas of attention."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        owner = getattr(mode, "counter", None)
        if isinstance(owner, counter.FlopCounterMode) and torch.ops.attnlib.torch_forward not in owner.flop_registry:
            raise RuntimeError(
                "FlopCounterMode would count attention as 0 FLOPs; give it custom_mapping=attnlib.FLOP_FORMULAS, "
                "or import torch.utils.flop_counter before attnlib"
            )


def _follows_functions() -> bool:
    """Whether a mode follows torch's functions; a default device is none that minds."""
    if not _len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def is_transforming() -> bool:
    """Whether a transform of torch.func, such as vmap, runs; not known of an unknown torch."""
    return IS_KNOWN and peek_interpreter_stack() is not None


def are_batched(*tensors: Tensor | None) -> bool:
    """Whether these may be many gradients in one, as ``torch.autograd.grad(..., is_grads_batched=True)`` hands out."""
    if not IS_KNOWN:
        return True
    for x in tensors:  # noqa: SIM110 - any() takes three times as long
        if x is not None and is_legacy_batchedtensor(x):
            return True
    return False


def is_forward_mode(*arguments: object) -> bool:
    """Whether a level of forward-mode derivatives is open; of an unknown torch, whether a tensor here carries one."""
    if IS_KNOWN:
        return forward_ad._current_level >= 0
    return have_tangents(*arguments)


def have_tangents(*arguments: object) -> bool:
    """Whether a tensor among these carries a forward-mode derivative."""
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)
