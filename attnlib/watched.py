"""Whether anybody follows operators, so that a call must go through torch's dispatcher to be seen."""

import sys

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def are_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a compiler, tracer, mode, transform or profiler follows operators, or these tensors are for such alone.

    If not, a call may go around torch's dispatcher, which takes longer than all the rest of it.

    Raises:
        RuntimeError: a FlopCounterMode would count attention as nothing.
    """
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        _refuse_counters()
        return True
    return (
        type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or q.is_meta
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
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
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def are_batched(*tensors: Tensor | None) -> bool:
    """Whether these are many gradients in one, as ``torch.autograd.grad(..., is_grads_batched=True)`` hands out."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)
