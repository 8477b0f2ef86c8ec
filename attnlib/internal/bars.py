"""Progress bars for long phases: live on a terminal, occasional lines in a log file."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


SHORT = 5  # seconds; a command that may be shorter shows its bar only after this time


def bar(
    title: str | None, total: int, unit: str, *, done: int = 0, stays: bool = True, delay: float = 0
) -> "tqdm":
    """Return a progress bar that starts at ``done`` of ``total`` steps; it is hidden without a title.

    Bytes (``unit="B"``) are shown as kB, MB or GB. Unless it ``stays``, the bar disappears when it is closed.
    It appears only after ``delay`` seconds.
    """
    from tqdm import tqdm  # imported late, so that --help of any command stays fast

    return tqdm(
        total=total,
        initial=done,
        desc=title,
        unit=unit,
        unit_scale=unit == "B",
        leave=stays,
        disable=title is None,
        delay=delay,
        mininterval=0.2 if sys.stderr.isatty() else 15,
    )


def steps(title: str | None, total: int, unit: str, *, delay: float = 0) -> Callable[[], None]:
    """Return a function to call after each step of a phase, to advance a progress bar.

    The first call shows the bar, if ``delay`` is 0, and the last one closes it. A phase without steps shows
    no bar.
    """
    shown: list[tqdm] = []

    def step() -> None:
        if not shown:
            shown.append(bar(title, total, unit, delay=delay))
        shown[0].update()
        if shown[0].n == total:
            shown[0].close()

    return step
