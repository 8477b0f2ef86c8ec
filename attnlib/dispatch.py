"""Which backend runs a spec: a walk over a preference list, and the text that explains it."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from .backends import _cached, _reference, _torch, _triton, _writes
from .spec import AttentionSpec


class Backend(NamedTuple):
    """A way to run attention.

    ``unsupported`` lists why a spec cannot run, ``slow`` why it would copy K or V, materialise scores or wait for
    the device; both look at the spec alone. The rest run ``(q, k, v, spec, terms)`` or ``(q, kv, spec, terms)`` to
    ``(out, lse)``. ``repeated`` and ``repeated_cached`` give a quicker way to run such a call again, or None.
    """

    name: str
    unsupported: Callable[[AttentionSpec], list[str]]
    slow: Callable[[AttentionSpec], list[str]]
    attention: Callable
    cached_attention: Callable
    repeated: Callable = lambda *call: None
    repeated_cached: Callable = lambda *call: None


PREFERENCE = (
    Backend(
        "triton",
        _triton.unsupported,
        _triton.slow,
        _triton.attention,
        _cached.attention,
        _triton.repeated,
        _cached.repeated,
    ),
    Backend("torch", _torch.unsupported, _torch.slow, _torch.attention, _torch.cached_attention),
    Backend("reference", _reference.unsupported, _reference.slow, _reference.attention, _reference.cached_attention),
)


class SlowPathWarning(UserWarning):
    """The automatic choice copies K or V, materialises scores, or waits for the device; ``explain`` says why."""


class Explanation(NamedTuple):
    """Which backend a call runs on and why; print it."""

    spec: AttentionSpec
    chosen: str | None
    rejected: dict[str, list[str]]
    slow: list[str]

    def __str__(self) -> str:
        spec = ", ".join(
            f"{name}={value}" for name, value in self.spec._asdict().items() if value not in (None, False, (), 0)
        )
        lines = [f"{self.spec.kind} attention: {spec}", f"runs on: {self.chosen or 'nothing'}"]
        lines += [f"  slow: {reason}" for reason in self.slow]
        lines += [f"  not on {name}: {reason}" for name, reasons in self.rejected.items() for reason in reasons]
        return "\n".join(lines)


def select(spec: AttentionSpec, name: str | None = None) -> Backend:
    """The first backend that can run ``spec``; a named one runs it or raises, and never falls back.

    ``"strict"`` is the automatic choice that raises where it would be slow; on a GPU the automatic choice warns.

    Raises:
        ValueError, TypeError: no backend has this name.
        NotImplementedError: the named backend, or every backend, has reasons against the spec.
    """
    if name is not None:
        _check_name(name)
        if name != "strict":
            return _named(spec, name)
    for backend in PREFERENCE:
        if not backend.unsupported(spec):
            if name == "strict" or spec.device == "cuda":
                _refuse_or_warn(backend, spec, strict=name == "strict")
            return backend
    raise NotImplementedError(f"no backend can run this call\n{explanation(spec, None)}")


def cache_writer(dtype: torch.dtype, device: torch.device) -> Callable:
    """The function ``(kv, k, v, slots, angles)`` that stores tokens of this dtype on this device."""
    return _torch.write_cache if _writes.unsupported(dtype, device) else _writes.write_cache


def scheduler(dtype: torch.dtype, device: torch.device):
    """What makes and updates the schedules of caches of this dtype on this device, or None."""
    return None if _writes.unsupported(dtype, device) else _cached


def explanation(spec: AttentionSpec, name: str | None) -> Explanation:
    """Why ``select(spec, name)`` chooses what it does; raises for an unknown name alone."""
    if name is not None:
        _check_name(name)
    backends = [backend for backend in PREFERENCE if name in (None, "strict", backend.name)]
    reasons = {backend.name: backend.unsupported(spec) for backend in backends}
    able = [backend for backend in backends if not reasons[backend.name]]
    slow = able[0].slow(spec) if able else []
    chosen = able[0].name if able and not (name == "strict" and slow) else None
    return Explanation(spec, chosen, {key: why for key, why in reasons.items() if why}, slow)


def _check_name(name: str) -> None:
    known = ("strict", *(backend.name for backend in PREFERENCE))
    if not isinstance(name, str):
        raise TypeError(f"backend: expected None or a name, got {type(name).__name__}")
    if name not in known:
        raise ValueError(f"backend: expected None, {', '.join(map(repr, known))}, got {name!r}")


def _named(spec: AttentionSpec, name: str) -> Backend:
    backend = next(backend for backend in PREFERENCE if backend.name == name)
    if reasons := backend.unsupported(spec):
        raise NotImplementedError(f"{name}: {'; '.join(reasons)}")
    return backend


def _refuse_or_warn(backend: Backend, spec: AttentionSpec, *, strict: bool) -> None:
    if not (reasons := backend.slow(spec)):
        return
    if strict:
        raise NotImplementedError(f"strict: {backend.name} would be slow: {'; '.join(reasons)}")
    warnings.warn(f"attention runs on {backend.name}: {'; '.join(reasons)}", SlowPathWarning, stacklevel=4)
