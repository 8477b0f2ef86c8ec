"""The devices to benchmark on, a GPU or a CPU, and how to measure time and memory there."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Target(NamedTuple):
    """A device, the backend that attnlib uses there (None: attnlib chooses), and how to measure.

    ``seconds(call)`` returns the time of one call, and ``peak(call)`` the peak memory in bytes that the call
    adds. ``capture(call, n)`` returns a function that runs ``n`` calls as one graph, without the host, and
    returns the result of the last call. Implementations take turns, for at least ``rounds`` rounds and
    ``budget`` seconds.
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
        """Free unused memory and the code that torch has compiled."""
        gc.collect()
        if self.device == "cuda":
            torch.compiler.reset()  # otherwise FlexAttention stops compiling after a few shapes
            torch.cuda.empty_cache()


def cpu() -> Target:
    """Return the target that measures on the CPU: single calls, no graphs, and no memory measurement."""
    return Target("cpu", None, wall_seconds, rounds=5, budget=6)


def cuda() -> Target:
    """Return the target that measures on the current CUDA device.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; `python -m attnlib bench` times the CPU tables")
    return Target("cuda", "triton", gpu_seconds, gpu_peak, gpu_capture, torch.cuda.synchronize)


def wall_seconds(call: Callable, synchronize: Callable[[], None] = lambda: None) -> float:
    """Return the seconds from the start of a call until the device has finished its work."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def gpu_seconds(call: Callable) -> float:
    """Return a call's median GPU time over 150 ms, with a cold L2 cache, after 25 ms of warm-up.

    This is long enough for the GPU to get as warm, and its clock as slow, as under sustained work.
    """
    from triton.testing import do_bench

    return do_bench(call, rep=150, return_mode="median") / 1e3


def gpu_peak(call: Callable) -> int:
    """Return the peak memory in bytes that a call adds to the memory already allocated by torch."""
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
    call()  # kernels compile, and one-time buffers are allocated, before the capture
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
    """Return the mean CPU seconds until a call returns, over so few calls that none waits for the device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize()
    return taken / calls
