"""A CPU to run the GPU benchmark on: small cases in fp32, and a clock that always takes a millisecond."""

import torch

from attnlib import CAUSAL, Mask
from attnlib.bench.cases import Case, plain
from attnlib.bench.place import Target


def place(seconds=None, *, backend: str = "torch", peak=None) -> Target:
    """A CPU where each call runs once and takes ``seconds(call)``; a captured one is called once for all."""

    def clock(call) -> float:
        call()
        return 1e-3

    def count(call) -> int:
        call()
        return 1 << 20

    def capture(call, calls):
        return call

    return Target("cpu", backend, seconds or clock, peak or count, capture)


def tiny(tokens: int = 24, mask: Mask = CAUSAL, *, batch: int = 1, kv_heads: int = 4, **changes) -> Case:
    return plain(tokens, 4, 16, mask, batch=batch)._replace(kv_heads=kv_heads, dtype=torch.float32, **changes)
