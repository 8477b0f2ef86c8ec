"""Answers about this torch and this Triton: which of their private functions work, tried once and remembered.

Versions are not listed. Whoever uses a private function gives :func:`answer` a trial of it, which runs on
first use; a trial that fails costs what depends on it, never the result. The trials stand beside the code
that they are for.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

ANSWERS: "dict[str, Answer]" = {}  # the one store of answers, by the name of what was tried


class Answer(Protocol):
    """The result of a trial, used from now on; ``failures`` has a sentence for each part that failed."""

    failures: tuple[str, ...]


class NotNow(Exception):
    """A trial cannot run here, and its text says why: a compiler, a mode, a transform or the capture of a
    graph.
    """


def answer(name: str, attempt: Callable[[], Answer]) -> Answer | None:
    """Return what ``attempt`` found the first time; None, and remember nothing, where it cannot run now."""
    return ANSWERS.get(name) or _first(name, attempt)


def failures(name: str, attempt: Callable[[], Answer]) -> list[str]:
    """Return what failed of what ``attempt`` tries.

    Raises:
        NotNow: it cannot be tried here.
    """
    return [*(ANSWERS.get(name) or _find(name, attempt)).failures]


def is_first(event: str) -> bool:
    """True the first time that it is asked about this event."""
    happened = _Event()
    return ANSWERS.setdefault(event, happened) is happened


class _Event(NamedTuple):
    failures: tuple[str, ...] = ()


def _first(name: str, attempt: Callable[[], Answer]) -> Answer | None:
    try:
        return _find(name, attempt)
    except NotNow:
        return None


def _find(name: str, attempt: Callable[[], Answer]) -> Answer:
    if torch.compiler.is_compiling():
        raise NotNow("inside a compiled function")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise NotNow("while a CUDA graph is captured")
    found = ANSWERS[name] = attempt()
    return found


def failure_of(trial: Callable[[], object]) -> str:
    """Run a trial; return what went wrong, whatever it is, or an empty text."""
    try:
        trial()
    except NotNow:
        raise
    except Exception as error:  # a private function may fail in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
