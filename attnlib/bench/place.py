"""Where implementations run, and how their time and memory are taken: a GPU, or a CPU."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """A device and the backend that ours runs on there; None is attnlib's choice.

    ``seconds(call)`` is the time of one call, ``peak(call)`` the most bytes that it held beyond those held
    before it. ``capture(call, n)`` makes of ``n`` calls one that the device repeats without the host, and
    that returns what the last of them made. What is compared takes turns: ``rounds`` of them, and more to
    fill ``budget`` seconds.
    """

    device: str
    backend: str | None
    seconds: Callable[[Callable], float]
    peak: Callable[[Callable], int] | None = None
    capture: Callable[[Callable, int], Callable] | None = None
    synchronize: Callable[[], None] = lambda: None
    rounds: int = 3
    budget: float = 0.0

    def tidy(self) -> None:
        """Give back the memory that nobody holds any more, and what was compiled."""
        gc.collect()
        if self.device == "cuda":
            torch.compiler.reset()  # else FlexAttention stops compiling after a few shapes
            torch.cuda.empty_cache()


def cpu() -> Target:
    """The CPU, where a call is timed once a turn; there are no graphs, and nobody counts memory."""
    return Target("cpu", None, cpu_seconds, rounds=5, budget=6)


def cuda() -> Target:
    """The current CUDA device.

    Raises:
        RuntimeError: there is none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; `python -m attnlib bench` times the CPU's cases")
    return Target("cuda", "triton", gpu_seconds, gpu_peak, gpu_capture, torch.cuda.synchronize)


def cpu_seconds(call: Callable) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def gpu_seconds(call: Callable) -> float:
    """Median seconds on the GPU of 150 ms of calls, each with a cold L2 cache, after 25 ms that warm it up.

    So long that a GPU is as warm, and its clock as slow, as in work that lasts.
    """
    from triton.testing import do_bench

    return do_bench(call, rep=150, return_mode="median") / 1e3


def gpu_peak(call: Callable) -> int:
    """The most bytes that a call held beyond those held before it, as torch's allocator counts."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - held


def gpu_capture(call: Callable, calls: int) -> Callable:
    """A CUDA graph of so many calls, as a function that replays it and returns what the last of them made."""
    call()  # what is compiled or allocated once, is so before
    graph = torch.cuda.CUDAGraph()
    # The outer stream brings the present one back after a capture that fails, which the inner context does
    # not.
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
        for _ in range(calls):
            made = call()

    def replay():
        graph.replay()
        return made

    return replay


def host_seconds(call: Callable, synchronize: Callable[[], None], *, calls: int = 50) -> float:
    """Seconds of CPU time that a call takes to come back; so few are queued that none waits for the
    device.
    """
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize()
    return taken / calls
