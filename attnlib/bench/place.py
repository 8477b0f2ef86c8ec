"""Where contenders run, and how their time and memory are taken: a GPU, or in tests a CPU."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

L2 = 256 << 20  # bytes that are written before every call, more than any GPU's L2 cache holds
MOST = 200  # calls in one turn


class Place(NamedTuple):
    """A device and the backend that ours runs on there.

    ``seconds(call)`` is the time of one call, ``peak(call)`` the most bytes that it held beyond those held before it,
    ``kernels(call)`` the time of its kernels without what lies between them. ``capture(call, n)`` makes of ``n`` calls
    one that the device repeats without the host, and that returns what the last of them made.
    """

    device: str
    backend: str
    seconds: Callable[[Callable], float]
    peak: Callable[[Callable], int]
    synchronize: Callable[[], None]
    capture: Callable[[Callable, int], Callable]
    kernels: Callable[[Callable], float]
    rounds: int = 3

    def tidy(self) -> None:
        """Give back the memory that nobody holds any more."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def cuda() -> Place:
    """The current CUDA device.

    Raises:
        RuntimeError: there is none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; `python -m attnlib bench` times the CPU cases")
    return Place("cuda", "triton", gpu_seconds, gpu_peak, torch.cuda.synchronize, gpu_capture, gpu_kernels)


def gpu_seconds(call: Callable, budget: float = 0.15) -> float:
    """Median seconds on the GPU of about ``budget`` seconds of calls, at least one, each with a cold L2 cache.

    So long that a GPU is as warm, and its clock as slow, as in work that lasts.
    """
    first = _events(call, 1)[0]
    return first if first > budget else median(_events(call, min(MOST, max(3, int(budget / first)))))


def _events(call: Callable, calls: int) -> list[float]:
    """Seconds between events before and after each call; writing over the cache gives the CPU time to run ahead."""
    cache = torch.empty(L2, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    torch.cuda.synchronize()
    for before, after in events:
        cache.zero_()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events]


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
    # The outer stream brings the present one back after a capture that fails, which the inner context does not.
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.graph(graph):
        for _ in range(calls):
            made = call()

    def replay():
        graph.replay()
        return made

    return replay


def gpu_kernels(call: Callable, calls: int = 10) -> float:
    """Seconds that the kernels, copies and fills of a call take together, as torch's profiler counts them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    taken = [event.time_range.elapsed_us() for event in seen.events() if event.device_type == DeviceType.CUDA]
    if not taken:
        raise RuntimeError("the profiler saw no kernels")
    return sum(taken) / calls / 1e6


def host_seconds(call: Callable, synchronize: Callable[[], None], *, calls: int = 50) -> float:
    """Seconds of CPU time that a call takes to come back; so few are queued that none waits for the device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize()
    return taken / calls
