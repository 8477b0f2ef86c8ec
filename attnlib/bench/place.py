"""The devices to benchmark on, a GPU or a CPU, and how to measure time and memory there."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """A device, the backend that attnlib uses there (None: attnlib chooses), and how to measure.

    ``seconds(call)`` returns the time of one call, and ``peak(call)`` the most bytes that it held beyond
    those held before it. ``capture(call, n)`` captures ``n`` calls as one that the device repeats without the
    host, and that returns the result of the last one. Implementations take turns: ``rounds`` of them, and
    more to fill ``budget`` seconds.
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
        """Free memory that is no longer used, and compiled code."""
        gc.collect()
        if self.device == "cuda":
            torch.compiler.reset()  # otherwise FlexAttention stops compiling after a few shapes
            torch.cuda.empty_cache()


def cpu() -> Target:
    """Return the CPU target: one call per turn, without graphs and without measuring memory."""
    return Target("cpu", None, wall_seconds, rounds=5, budget=6)


def cuda() -> Target:
    """Return the target of the current CUDA device.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; `python -m attnlib bench` times the CPU tables")
    return Target("cuda", "triton", gpu_seconds, gpu_peak, gpu_capture, torch.cuda.synchronize)


def wall_seconds(call: Callable, synchronize: Callable[[], None] = lambda: None) -> float:
    """Return the wall time of a call, until the device has finished it."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def gpu_seconds(call: Callable) -> float:
    """Return the median GPU time of calls over 150 ms, each with a cold L2 cache, after 25 ms of warm-up.

    Over that long, the GPU gets as warm, and its clock as slow, as under sustained work.
    """
    from triton.testing import do_bench

    return do_bench(call, rep=150, return_mode="median") / 1e3


def gpu_peak(call: Callable) -> int:
    """Return the most bytes a call held beyond those held before, as counted by torch's allocator."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - held


def gpu_capture(call: Callable, calls: int) -> Callable:
    """Capture ``calls`` calls as a CUDA graph; return a function that replays it.

    The function returns the result of the last call.
    """
    call()  # compile, and allocate what is allocated once, before the capture
    graph = torch.cuda.CUDAGraph()
    # If the capture fails, torch.cuda.graph does not restore the current stream; torch.cuda.stream does.
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
        for _ in range(calls):
            made = call()

    def replay():
        graph.replay()
        return made

    return replay


def host_seconds(call: Callable, synchronize: Callable[[], None], *, calls: int = 50) -> float:
    """Return the mean CPU time until a call returns; calls are too few to wait for the device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize()
    return taken / calls
