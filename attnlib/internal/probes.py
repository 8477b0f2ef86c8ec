"""Probes of torch's and Triton's private functions: each is tried once, and the answer is cached.

There is no list of versions. Code that uses a private function gives :func:`answer` a trial, which runs on
first use. If the trial fails, the code does without the function; results stay the same. Each trial is next
to the code that needs it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

ANSWERS: "dict[str, Answer]" = {}  # all cached answers, by the name of the trial


class Answer(Protocol):
    """The cached result of a trial; ``failures`` has a sentence for each part that failed."""

    failures: tuple[str, ...]


class NotNow(Exception):
    """Raised if a trial cannot run at the moment; the text names the reason.

    Reasons are a compiler, a mode, a transform, or the capture of a CUDA graph.
    """


def answer(name: str, attempt: Callable[[], Answer]) -> Answer | None:
    """Return the cached result of ``attempt``; None, without caching it, if it cannot run now."""
    return ANSWERS.get(name) or _first(name, attempt)


def failures(name: str, attempt: Callable[[], Answer]) -> list[str]:
    """Return the failures of the parts that ``attempt`` tries.

    Raises:
        NotNow: the trial cannot run now.
    """
    return [*(ANSWERS.get(name) or _find(name, attempt)).failures]


def is_first(event: str) -> bool:
    """True on the first call with this event."""
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
    except Exception as error:  # a private function may fail in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
