"""Timing two ways of computing the same thing, side by side, after checking that they agree."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple


class Row(NamedTuple):
    """Ours against a peer in the same run, in seconds; ``bound`` is what the ratio is to stay under."""

    name: str
    ours: float
    peer: float
    bound: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def race(name: str, ours: Callable, peer: Callable, *, bound: float, agree: Callable, seconds: float = 2.0) -> Row:
    """Time both in turns for about ``seconds``, so that drift of the machine hits both alike; medians.

    ``agree(ours(), peer())`` raises if the results differ: no timing without a correctness check of the same call.
    """
    agree(ours(), peer())
    times: tuple[list[float], list[float]] = ([], [])
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times[0]) < 5:
        for call, taken in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return Row(name, median(times[0]), median(times[1]), bound)


def per_call(call: Callable, *, calls: int = 2000) -> float:
    """Seconds of one call of something too short to time alone; the best of ten runs."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def table(rows: list[Row]) -> str:
    """The rows as aligned text; a ratio over its bound is marked."""
    lines = [f"{'case':46} {'ours':>12} {'peer':>12} {'ratio':>7} {'bound':>6}"]
    for row in rows:
        late = "" if row.ratio <= row.bound else "  over"
        lines.append(
            f"{row.name:46} {row.ours * 1e6:10.1f}us {row.peer * 1e6:10.1f}us {row.ratio:7.2f} {row.bound:6.2f}{late}"
        )
    return "\n".join(lines)
