"""How far a long phase is, on the terminal or as lines of a log."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def bar(title: str | None, total: int, unit: str, *, done: int = 0) -> "tqdm":
    """A bar that has ``done`` of ``total`` steps; without a title it is never seen."""
    from tqdm import tqdm  # not above: --help of all commands does without it

    quick = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        desc=title,
        unit=unit,
        disable=title is None,
        mininterval=0.2 if quick else 15,
    )


def steps(title: str | None, total: int, unit: str) -> Callable[[], None]:
    """What to call behind each step: the bar comes with the first one, as there may be none, and ends with
    the last.
    """
    shown: list[tqdm] = []

    def step() -> None:
        if not shown:
            shown.append(bar(title, total, unit))
        shown[0].update()
        if shown[0].n == total:
            shown[0].close()

    return step
