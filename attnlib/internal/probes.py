"""Probes of torch's and Triton's private functions: try each function once, and cache the result.

There is no list of supported versions. Code that needs a private function passes a trial of it to
:func:`answer`, which runs the trial on first use. If the trial fails, the code computes the same results
without the function. Each trial is next to the code that needs it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

ANSWERS: "dict[str, Answer]" = {}  # cached results of trials, by name


class Answer(Protocol):
    """The cached result of a trial; ``failures`` has one sentence for each part of the trial that failed."""

    failures: tuple[str, ...]


class NotNow(Exception):
    """Raised if a trial of a private function cannot run at the moment; the text names the reason.

    Possible reasons are a compiler, a torch mode or transform, or the capture of a CUDA graph.
    """


def answer(name: str, attempt: Callable[[], Answer]) -> Answer | None:
    """Return the result of a trial, which runs only once; None if the trial cannot run at the moment."""
    return ANSWERS.get(name) or _first(name, attempt)


def failures(name: str, attempt: Callable[[], Answer]) -> list[str]:
    """Return one sentence for each part of a trial that failed.

    Raises:
        NotNow: the trial cannot run now.
    """
    return [*(ANSWERS.get(name) or _find(name, attempt)).failures]


def is_first(event: str) -> bool:
    """True in the first call with this ``event``, and False in later calls."""
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
    """Run a trial; return its error as text, or an empty string if it succeeds."""
    try:
        trial()
    except NotNow:
        raise
    except Exception as error:  # a private function may raise any exception
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
