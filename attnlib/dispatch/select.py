"""Which backend runs a spec: a walk over a preference list, and the text that explains it."""

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends import _reference, _torch, _triton, flops
from ..call.cache import PreparedCalls, Run
from ..call.call import Call, PieceGradients
from ..call.spec import AttentionSpec
from ..internal.probes import ANSWERS, NotNow, is_first
from ..internal.signatures import leading_to

INSIDE = ("attnlib.", "torch.")
FIRST_CALL = "the first call"
UNTRIED = "cannot be tried here"
REMEDY = (
    "to do: update attnlib, or install versions of torch and Triton that it is tested with "
    "(docs/versioning.md)"
)


class Backend(Protocol):
    """A way to run attention: a module or an object of this shape.

    ``unsupported`` lists why a spec cannot run, ``slow`` why it would copy K or V, materialise scores or wait
    for the device; both look at the spec alone. ``failures`` lists which private functions of torch and
    Triton do not work as expected, and what that costs. ``attention`` and ``cached_attention`` run a checked
    call to ``(out, lse)``; ``gradients`` are those of a piece of a larger call, from that one's dout, output
    and LSE at the queries of the piece; and ``prepare`` gives a quicker way to run a call again, or None.
    ``variant`` names the kernels that would run it, where there are several; else it is empty.
    ``cannot_store`` lists why tokens of a dtype cannot be stored on a device; the rest does what
    :mod:`attnlib.dispatch.storage` says of it, ``peer_memory`` for a group.
    """

    unsupported: Callable[[AttentionSpec], list[str]]
    slow: Callable[[AttentionSpec], list[str]]
    failures: Callable[[AttentionSpec], list[str]]
    attention: Callable[[Call], tuple[Tensor, Tensor]]
    cached_attention: Callable[[Call], tuple[Tensor, Tensor]]
    gradients: Callable[[Call, Tensor, Tensor, Tensor], PieceGradients]
    prepare: Callable[[Call], Run | None]
    variant: Callable[[Call], str]
    cannot_store: Callable[[torch.dtype, torch.device], list[str]]
    write_cache: Callable
    new_schedule: Callable
    update_schedule: Callable
    peer_memory: Callable


PREPARED = PreparedCalls(4096)  # the one store of calls that come again
PREFERENCE = ("triton", "torch", "reference")
NAMES = (*PREFERENCE, "triton:plain")  # the last by name alone
FLOP_FORMULAS = flops.formulas()


class SlowPathWarning(UserWarning):
    """The automatic choice copies K or V, materialises scores, or waits for the device; or a Hopper GPU runs
    without a fast path, since a private function of torch or Triton has changed. ``explain`` says why."""


@leading_to("explain(call, *args) makes it")
class Explanation(NamedTuple):
    """Which backend a call runs on and why; print it. ``variant`` names the kernels, if there are several.

    Over a view with shared prefixes two calls run, and are merged: ``shared`` explains the one over these
    prefixes, and all else is of the one over what each sequence has for itself. ``ranks`` says how ranks
    share a sequence. ``failures`` says which fast paths are off and why.
    """

    spec: AttentionSpec
    chosen: str | None
    rejected: dict[str, list[str]]
    slow: list[str]
    variant: str = ""
    shared: "Explanation | None" = None
    ranks: str = ""
    failures: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.shared is None:
            return "\n".join(self._lines())
        calls = {"of each sequence's own keys": self, "of shared prefixes, once for each group": self.shared}
        lines = ["two calls, whose results merge_states joins"]
        for keys, call in calls.items():
            lines += [f"{keys}:", *(f"  {line}" for line in call._lines())]
        return "\n".join(lines)

    def _lines(self) -> list[str]:
        spec = ", ".join(
            f"{name}={value}"
            for name, value in self.spec._asdict().items()
            if name != "functions" and value not in (None, False, (), 0)
        )
        variant = f", {self.variant} kernels" if self.variant else ""
        lines = [f"{self.spec.kind} attention: {spec}", f"runs on: {self.chosen or 'nothing'}{variant}"]
        lines += [] if self.chosen is None else [f"  {line}" for line in self._fast_paths()]
        lines += [f"  slow: {reason}" for reason in self.slow]
        lines += [] if self.spec.functions is None else [f"  {line}" for line in self.spec.functions.lines]
        lines += [f"  shared: {self.ranks}"] if self.ranks else []
        return lines + [
            f"  not on {name}: {reason}" for name, reasons in self.rejected.items() for reason in reasons
        ]

    def _fast_paths(self) -> list[str]:
        off = [f"fast path off: {failure}" for failure in self.failures]
        failed = [failure for failure in self.failures if not failure.startswith(UNTRIED)]
        return [*off, *([REMEDY] if failed else [])] if off else ["fast paths: on"]


def select(spec: AttentionSpec, name: str | None = None) -> Backend:
    """The first backend that can run ``spec``; a named one runs it or raises, and never falls back.

    ``"strict"`` is the automatic choice that raises where it would be slow; on a GPU the automatic choice
    warns.

    Raises:
        ValueError, TypeError: no backend has this name.
        NotImplementedError: the named backend, or every backend, has reasons against the spec.
    """
    if name is not None:
        _check_name(name)
    backend = _preferred(spec, name) if name in (None, "strict") else _named(spec, name)
    if spec.arch == 90:
        _warn_of_failures(spec, backend)
    return backend


def _preferred(spec: AttentionSpec, name: str | None) -> Backend:
    for known in PREFERENCE:
        if not backend_of(known).unsupported(spec):
            if name == "strict" or spec.device == "cuda":
                _refuse_or_warn(known, spec, strict=name == "strict")
            return backend_of(known)
    raise NotImplementedError(f"no backend can run this call\n{explanation(spec, None)}")


def backend_of(name: str) -> Backend:
    """The backend of a known name. (No mapping of the module's, which Dynamo may lose sight of.)"""
    return (_triton.backend, _torch, _reference, _triton.plain)[NAMES.index(name)]


def storing(dtype: torch.dtype, device: torch.device) -> Backend:
    """The backend that stores tokens of this dtype on this device, and shares a step's sequences out."""
    return next(backend for backend in (_triton.backend, _torch) if not backend.cannot_store(dtype, device))


def explanation(spec: AttentionSpec, name: str | None) -> Explanation:
    """Why ``select(spec, name)`` chooses what it does; raises for an unknown name alone."""
    if name is not None:
        _check_name(name)
    asked = PREFERENCE if name in (None, "strict") else (name,)
    reasons = {known: backend_of(known).unsupported(spec) for known in asked}
    able = [known for known, why in reasons.items() if not why]
    slow = backend_of(able[0]).slow(spec) if able else []
    chosen = able[0] if able and not (name == "strict" and slow) else None
    failures = _failures(spec, backend_of(able[0])) if able else ()
    return Explanation(
        spec, chosen, {key: why for key, why in reasons.items() if why}, slow, failures=failures
    )


def _failures(spec: AttentionSpec, backend: Backend) -> tuple[str, ...]:
    try:
        return (*backend.failures(spec),)
    except NotNow as error:
        return (f"{UNTRIED}, {error}",)


def explained(call: Call, name: str | None) -> Explanation:
    """The explanation of a checked call, with the kernels that would run it."""
    found = explanation(call.spec, name)
    return found if found.chosen is None else found._replace(variant=backend_of(found.chosen).variant(call))


def _check_name(name: str) -> None:
    known = ("strict", *NAMES)
    if not isinstance(name, str):
        raise TypeError(f"backend: expected None or a name, got {type(name).__name__}")
    if name not in known:
        raise ValueError(f"backend: expected None, {', '.join(map(repr, known))}, got {name!r}")


def _named(spec: AttentionSpec, name: str) -> Backend:
    backend = backend_of(name)
    if reasons := backend.unsupported(spec):
        raise NotImplementedError(f"{name}: {'; '.join(reasons)}")
    return backend


def _refuse_or_warn(name: str, spec: AttentionSpec, *, strict: bool) -> None:
    if not (reasons := backend_of(name).slow(spec)):
        return
    if strict:
        raise NotImplementedError(f"strict: {name} would be slow: {'; '.join(reasons)}")
    level = 4 if torch.compiler.is_compiling() else _level_of_caller()  # the compiler traces no frames
    warnings.warn(f"attention runs on {name}: {'; '.join(reasons)}", SlowPathWarning, stacklevel=level)


def _warn_of_failures(spec: AttentionSpec, backend: Backend) -> None:
    """Warn, once in a process, if a GPU that has fast paths runs without them."""
    if torch.compiler.is_compiling() or FIRST_CALL in ANSWERS:
        return
    try:
        found = backend.failures(spec)
    except NotNow:
        return
    if is_first(FIRST_CALL) and found:
        text = "; ".join(found)
        warnings.warn(f"fast path off: {text}. {REMEDY}", SlowPathWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """The ``stacklevel`` with which a warning of the function that asks names the line of who called this
    package.

    Layers call it through torch's modules, so that those are passed over too.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
