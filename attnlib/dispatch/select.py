"""Select the first backend of a preference list that can run a call, and explain the choice."""

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends import _reference, _torch, _triton, flops
from ..call.cache import CallCache, Run
from ..call.call import Call, PieceGradients
from ..call.spec import AttentionSpec
from ..call.statistic import Statistic
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
    """The interface of a backend: a module or an object with these functions.

    Attributes:
        unsupported: return the reasons why the backend cannot run a call with this spec.
        slow: return the reasons why a call would copy K or V, materialise scores or wait for the device.
        failures: return which private functions of torch and Triton did not work, and what that costs.
        attention, cached_attention: run a validated call and return ``(out, lse)``.
        statistic: compute a quantity from the scores of a validated call without a cache.
        gradients: return the gradients of a chunk of a larger call, from the larger call's dout, output and
            LSE at the chunk's queries.
        prepare: return a faster function that repeats a call, or None.
        variant: return the name of the kernels that would run a call, empty if there is only one kind.
        cannot_store: return the reasons why a device cannot store tokens of a dtype.
        write_index: write index keys to a cache, as ``write_cache`` writes keys.
        write_cache, new_schedule, update_schedule, peer_memory: as in :mod:`attnlib.dispatch.storage`.
    """

    unsupported: Callable[[AttentionSpec], list[str]]
    slow: Callable[[AttentionSpec], list[str]]
    failures: Callable[[AttentionSpec], list[str]]
    attention: Callable[[Call], tuple[Tensor, Tensor]]
    cached_attention: Callable[[Call], tuple[Tensor, Tensor]]
    statistic: Callable[[Call, Statistic], Tensor]
    gradients: Callable[[Call, Tensor, Tensor, Tensor], PieceGradients]
    prepare: Callable[[Call], Run | None]
    variant: Callable[[Call], str]
    cannot_store: Callable[[torch.dtype, torch.device], list[str]]
    write_cache: Callable
    write_index: Callable
    new_schedule: Callable
    update_schedule: Callable
    peer_memory: Callable


CALL_CACHE = CallCache(4096)  # the process has only this call cache
PREFERENCE = ("triton", "torch", "reference")
NAMES = (*PREFERENCE, "triton:generic")  # the last one is never selected automatically
FLOP_FORMULAS = flops.formulas()


class SlowPathWarning(UserWarning):
    """A warning that a call runs slowly: it copies K or V, materialises scores or waits for the device.

    The warning is also issued once if a Hopper GPU runs without a fast path because a private function of
    torch or Triton has changed. ``explain`` says why.
    """


@leading_to("explain(call, *args) makes it")
class Explanation(NamedTuple):
    """The backend that a call runs on, and the reasons; print it for a readable summary.

    Attributes:
        spec: the description of the call.
        chosen: the name of the backend, None if no backend can run the call.
        rejected: for each other backend, the reasons against it.
        slow: the reasons why the chosen backend is slow here.
        variant: the name of the chosen kernels, if there are several kinds.
        shared: with shared prefixes, the explanation of the call over the prefixes; the other attributes
            then explain the call over each sequence's own keys.
        ranks: how ranks share the call.
        failures: the fast paths that are switched off, and why.
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
        variant = f", {self.variant} kernels" if self.variant else ""
        lines = [
            f"{self.spec.kind} attention",
            *self._spec_lines(),
            f"runs on: {self.chosen or 'nothing'}{variant}",
        ]
        lines += [] if self.chosen is None else [f"  {line}" for line in self._fast_paths()]
        lines += [f"  slow: {reason}" for reason in self.slow]
        lines += [] if self.spec.functions is None else [f"  {line}" for line in self.spec.functions.lines]
        lines += [f"  shared: {self.ranks}"] if self.ranks else []
        return lines + [
            f"  not on {name}: {reason}" for name, reasons in self.rejected.items() for reason in reasons
        ]

    def _spec_lines(self) -> list[str]:
        """Return an aligned line for each field of the spec that says more than its default."""
        fields = {
            name: str(value).replace("torch.", "")
            for name, value in self.spec._asdict().items()
            if name not in ("kind", "functions") and value not in (None, False, (), 0, "")
        }
        width = max(map(len, fields))
        return [f"  {name:{width}}  {value}" for name, value in fields.items()]

    def _fast_paths(self) -> list[str]:
        off = [f"fast path off: {failure}" for failure in self.failures]
        failed = [failure for failure in self.failures if not failure.startswith(UNTRIED)]
        return [*off, *([REMEDY] if failed else [])] if off else ["fast paths: on"]


def select(spec: AttentionSpec, name: str | None = None) -> Backend:
    """Return the first backend that can run ``spec``, or the backend called ``name``, without a fallback.

    ``"strict"`` selects automatically but raises if the selected backend would be slow. Without a name, a
    slow backend on a GPU only causes a warning.

    Raises:
        ValueError, TypeError: no backend has this name.
        NotImplementedError: the named backend, or every backend, cannot run the call.
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
    raise NotImplementedError(f"no backend can run this call:\n{explanation(spec, None)}")


def backend_of(name: str) -> Backend:
    """Return the backend of a known name; Dynamo could not trace a lookup in a module-level mapping."""
    return (_triton.backend, _torch, _reference, _triton.plain)[NAMES.index(name)]


def storing(dtype: torch.dtype, device: torch.device) -> Backend:
    """Return the backend that writes tokens of this dtype to a cache on this device."""
    return next(backend for backend in (_triton.backend, _torch) if not backend.cannot_store(dtype, device))


def explanation(spec: AttentionSpec, name: str | None) -> Explanation:
    """Explain the choice of ``select(spec, name)``; raise an error only for an unknown name."""
    if name is not None:
        _check_name(name)
    names = PREFERENCE if name in (None, "strict") else (name,)
    reasons = {known: backend_of(known).unsupported(spec) for known in names}
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
    """Explain a validated call, including the kernels that would run it."""
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
    level = 4 if torch.compiler.is_compiling() else _level_of_caller()  # Dynamo cannot trace frames
    warnings.warn(f"attention runs on {name}: {'; '.join(reasons)}", SlowPathWarning, stacklevel=level)


def _warn_of_failures(spec: AttentionSpec, backend: Backend) -> None:
    """Warn once per process if a GPU that has fast paths runs without them."""
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
    """Return the ``stacklevel`` at which a warning points to the line that called this package.

    Frames of torch are skipped too, since layers run inside ``nn.Module.__call__``.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
