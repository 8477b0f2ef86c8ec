"""Detect modes, transforms and profilers that observe operators; calls then go through torch's dispatcher."""

import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import probes
from .probes import ANSWERS, NotNow, answer
from .torch_questions import BATCHED, find, find_batched, yes

SEEN = "calls that are followed"


def are_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if a compiler, tracer, mode, transform or profiler observes operators on q, k and v.

    The result is also True for tensor subclasses and meta tensors. If it is False, a call may bypass torch's
    dispatcher; dispatching takes longer than the rest of the call.

    Raises:
        RuntimeError: a FlopCounterMode would count attention as 0 FLOPs.
    """
    if torch.compiler.is_compiling():
        return True
    ask = ANSWERS.get(SEEN) or answer(SEEN, find)
    if ask is None or ask.dispatch_modes():
        _refuse_counters(_mode_stack() if ask is None else ask.mode_stack())
        return True
    return bool(
        type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or q.is_meta
        or ask.transforms()
        or ask.profiler()
        or ask.function_modes()
        or torch.jit.is_tracing()
    )


def is_transforming() -> bool:
    """True if a torch.func transform such as vmap is running, or if this version of torch cannot tell."""
    ask = None if torch.compiler.is_compiling() else answer(SEEN, find)
    if ask is not None:
        return bool(ask.transforms())
    return _peek is None or _peek() is not None


def are_batched(*tensors: Tensor | None) -> bool:
    """True if a tensor may hold many gradients, as with ``is_grads_batched=True`` in torch.autograd.grad."""
    ask = answer(BATCHED, find_batched)
    if ask is None:
        return True
    is_batched = ask.is_batched
    for x in tensors:  # noqa: SIM110 - any() takes three times as long
        if x is not None and is_batched(x):
            return True
    return False


def is_forward_mode(*arguments: object) -> bool:
    """True if a level of forward-mode autograd is open.

    If torch cannot tell, the result is True if any argument carries a forward-mode derivative.
    """
    ask = None if torch.compiler.is_compiling() else ANSWERS.get(SEEN) or answer(SEEN, find)
    if ask is None or not ask.has_forward_level:
        return have_tangents(*arguments)
    return forward_ad._current_level >= 0


def have_tangents(*arguments: object) -> bool:
    """True if any argument is a tensor that carries a forward-mode derivative."""
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)


def failures() -> list[str]:
    """Return which private functions of torch do not work as expected, and the consequence of each failure.

    Raises:
        NotNow: the trials cannot run now.
    """
    return [*probes.failures(SEEN, find), *probes.failures(BATCHED, find_batched)]


def refuse_trials() -> None:
    """Raise NotNow if a mode, transform or profiler would observe the calls of a trial."""
    ask = answer(SEEN, find)
    if ask is None or any(f() for f in (ask.dispatch_modes, ask.transforms, ask.profiler) if f is not yes):
        raise NotNow("since something follows this call")


def _refuse_counters(modes: list) -> None:
    """Raise RuntimeError under a FlopCounterMode that was created without attnlib's FLOP formulas."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for mode in modes:
        owner = getattr(mode, "counter", None)
        if (
            isinstance(owner, counter.FlopCounterMode)
            and torch.ops.attnlib.torch_forward not in owner.flop_registry
        ):
            raise RuntimeError(
                "FlopCounterMode would count attention as 0 FLOPs; give it "
                "custom_mapping=attnlib.FLOP_FORMULAS, or import torch.utils.flop_counter before attnlib"
            )


_peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)  # Dynamo needs it in a variable


def _mode_stack() -> list:
    """Return the active dispatch modes, without a trial; the list is empty if torch cannot list them."""
    ask = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", None)
    return [] if ask is None else ask() or []
