"""Whether anybody follows operators, so that a call must go through torch's dispatcher to be seen."""

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


def are_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a compiler, tracer, mode, transform or profiler follows operators, or these tensors are for such alone.

    If not, a call may go around torch's dispatcher, which takes longer than all the rest of it.
    """
    return (
        torch.compiler.is_compiling()
        or type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or q.is_meta
        or torch._C._len_torch_dispatch_stack() > 0
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


def are_batched(*tensors: Tensor | None) -> bool:
    """Whether these are many gradients in one, as ``torch.autograd.grad(..., is_grads_batched=True)`` hands out."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in tensors)
