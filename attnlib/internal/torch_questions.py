"""Functions that tell if a torch mode, transform or profiler observes operators, with a trial for each.

Most of them are private functions of torch. A trial calls such a function once inside a mode, transform or
profiler, where it must return true, and once outside. If a trial fails, a public function replaces the
private one. If torch has no public one, we assume that something always observes operators, which is correct
but slower.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.overrides import TorchFunctionMode, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from .probes import NotNow, failure_of

BATCHED = "batched gradients"


class TorchAnswers(NamedTuple):
    """The functions that detect observers: private functions of torch, or replacements if a trial failed."""

    dispatch_modes: Callable[[], object]
    mode_stack: Callable[[], list]
    transforms: Callable[[], object]
    profiler: Callable[[], bool]
    function_modes: Callable[[], bool]
    has_forward_level: bool
    failures: tuple[str, ...] = ()


class Question(NamedTuple):
    """A private function of torch that tells if something observes operators, and its trial.

    Attributes:
        name: what the function detects.
        find: looks up the private function.
        inside: calls the function in a context where it must return true.
        public: a public function of torch with the same result, if there is one.
        instead: the function to call instead if the trial fails.
        cost: the consequence of a failed trial.
    """

    name: str
    find: Callable[[], Callable[[], object]]
    inside: Callable[[Callable], object]
    public: Callable[[], object] | None
    instead: Callable[[], object]
    cost: str


def find() -> TorchAnswers:
    """Try each private function; raise NotNow inside a mode, transform or profiler that it detects."""
    looked = [
        (question, failure_of(lambda question=question: _refuse_inside(question))) for question in QUESTIONS
    ]
    found = [
        (question, why or failure_of(lambda question=question: _try(question))) for question, why in looked
    ]
    functions = [question.instead if why else question.find() for question, why in found]
    failed = [f"{question.name}: {why}; {question.cost}" for question, why in found if why]
    return TorchAnswers(*functions[:-1], not found[-1][1], tuple(failed))


def _refuse_inside(question: Question) -> None:
    """Raise NotNow if the function rightly returns true before its trial, and RuntimeError if wrongly."""
    ask = question.find()
    if ask():
        if question.public() if question.public else not _in_another_thread(ask):
            raise NotNow(f"since torch says yes to {question.name}")
        raise RuntimeError("it says yes where it must say no")


def _in_another_thread(ask: Callable) -> object:
    """Call a function in a new thread, which no mode, transform or profiler observes."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def _try(question: Question) -> None:
    """Call the function inside the context and again outside; raise RuntimeError if a result is wrong."""
    ask = question.find()
    if not question.inside(ask):
        raise RuntimeError("it says no where it must say yes")
    if ask():
        raise RuntimeError("it says yes where it must say no")


def yes() -> bool:
    """Return True: if torch cannot tell, we assume that something observes every call."""
    return True


def _inside_dispatch_mode(ask: Callable) -> object:
    with _Mode():
        return ask()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _inside_transform(ask: Callable) -> object:
    found = []
    torch.vmap(lambda x: found.append(ask()) or x)(torch.zeros(1, device="cpu"))
    return found[0]


def _inside_profiler(ask: Callable) -> object:
    """Call a function inside the fastest profiler available.

    The ITT profiler takes 0.1 ms. The other one takes 1 ms and may print messages.
    """
    with profiler.emit_itt() if torch.profiler.itt.is_available() else profiler.profile(use_kineto=False):
        return ask()


def _inside_function_mode(ask: Callable) -> object:
    with torch.device("cpu"):
        if ask():
            raise RuntimeError("it takes a default device for somebody who follows calls")
    with TorchFunctionMode():
        return ask()


def _has_function_mode() -> bool:
    """True inside any torch function mode, including the mode of a default device."""
    return has_torch_function((None,))


def _refuses_forward_mode() -> bool:
    """True if a level of forward-mode autograd is open; torch then refuses to open another one."""
    try:
        with forward_ad.dual_level():
            return False
    except RuntimeError:
        return True


def _inside_forward_mode(ask: Callable) -> object:
    with forward_ad.dual_level():
        return ask()


def _find_function_modes() -> Callable[[], bool]:
    """Return a test for torch function modes that ignores default devices, since they observe no calls."""
    from torch.utils._device import DeviceContext

    count, modes = torch._C._len_torch_function_stack, torch.overrides._get_current_function_mode_stack

    def ask() -> bool:
        return bool(count()) and any(type(mode) is not DeviceContext for mode in modes())

    return ask


def _find_forward_level() -> Callable[[], bool]:
    """Return a test for an open level of forward-mode autograd, based on a private variable of torch."""
    forward_ad._current_level  # noqa: B018 - raises if torch has no such variable
    return lambda: forward_ad._current_level >= 0


_SLOWER = "every call goes through torch's dispatcher, which is correct but slower"
QUESTIONS = (  # the order must be the same as in TorchAnswers
    Question(
        "dispatch modes",
        lambda: torch._C._len_torch_dispatch_stack,
        _inside_dispatch_mode,
        None,
        yes,
        _SLOWER,
    ),
    Question(
        "the stack of dispatch modes",
        lambda: torch.utils._python_dispatch._get_current_dispatch_mode_stack,
        _inside_dispatch_mode,
        None,
        list,
        "a FlopCounterMode without attnlib.FLOP_FORMULAS counts attention as 0 FLOPs",
    ),
    Question(
        "transforms",
        lambda: torch._C._functorch.peek_interpreter_stack,
        _inside_transform,
        None,
        yes,
        _SLOWER,
    ),
    Question("profilers", lambda: torch.autograd._profiler_enabled, _inside_profiler, None, yes, _SLOWER),
    Question(
        "function modes",
        _find_function_modes,
        _inside_function_mode,
        _has_function_mode,
        _has_function_mode,
        "calls under a default device go through torch's dispatcher",
    ),
    Question(
        "forward mode",
        _find_forward_level,
        _inside_forward_mode,
        _refuses_forward_mode,
        yes,
        "every call inspects each of its tensors",
    ),
)


class Batched(NamedTuple):
    """The function that recognizes batched gradients, or one that always returns True."""

    is_batched: Callable[[Tensor], bool]
    failures: tuple[str, ...] = ()


def find_batched() -> Batched:
    """Find the function that recognizes batched gradients (many gradients in one tensor).

    Its trial is separate from the others, since only a backward needs it, and torch's first backward loads a
    lot of code.
    """
    if why := failure_of(_try_batched):
        return Batched(lambda x: True, (f"{BATCHED}: {why}; every backward goes through torch's dispatcher",))
    return Batched(torch._C._functorch.is_legacy_batchedtensor)


def _try_batched() -> None:
    is_batched, found = torch._C._functorch.is_legacy_batchedtensor, []
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False):
        x = torch.zeros(1, device="cpu", requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: found.append(is_batched(grad)))
        torch.autograd.grad(y, x, torch.ones(2, 1, device="cpu"), is_grads_batched=True)
    if found != [True] or is_batched(x):
        raise RuntimeError(f"it says {found} of batched gradients and {is_batched(x)} of others")
