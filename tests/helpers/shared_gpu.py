"""One call over and over, in a process of its own: whether it always gives the same bits. What
test_shared_gpu.py runs.

A fault of the GPU ends the process, and so no other test.
"""

import sys
import time
from collections.abc import Callable
from types import MappingProxyType

import torch
from decode_helpers import Sizes, store
from function_cases import same_document
from torch import Tensor

from attnlib import CAUSAL, KVLayout, attention, cached_attention, mask_mod, quantize_fp8, score_mod

BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
SECONDS = 4.0
Results = tuple[Tensor, ...]


def tensors(*widths: int, tokens: int = 8192) -> list[Tensor]:
    """Random heads of these widths."""
    return [
        torch.randn(2, tokens, 16, width, device="cuda", dtype=BF16, requires_grad=True) for width in widths
    ]


def forward(head_dim: int, *, fp8: bool = False) -> Callable[[], Results]:
    """A causal forward."""
    given = dict(zip("qkv", (x.detach() for x in tensors(head_dim, head_dim, head_dim)), strict=True))
    given = quantize_fp8(**given)._asdict() if fp8 else given
    return lambda: (attention(**given, mask=CAUSAL),)


def backward(
    head_dim: int, value_dim: int | None = None, *, functions: bool = False
) -> Callable[[], Results]:
    """The gradients of keys and values. That of queries is added up in any order."""
    q, k, v = tensors(head_dim, head_dim, value_dim or head_dim)
    mask, score = CAUSAL, None
    if functions:
        document = (torch.arange(8192, device="cuda", dtype=torch.int32) // 700).expand(2, -1).contiguous()
        bias = torch.randn(16, 257, device="cuda")
        mask &= mask_mod(same_document, document)
        score = score_mod(lambda s, b, h, i, j, x: s + x[h, (i - j).clamp(0, 256)], bias)
    out = attention(q, k, v, mask=mask, score=score)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)[1:]


def in_order() -> Callable[[], Results]:
    """All gradients, where they are added up in a fixed order."""
    torch.use_deterministic_algorithms(True)
    q, k, v = tensors(128, 128, 128)
    out = attention(q, k, v, mask=CAUSAL)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def decode(layout: KVLayout, heads: int) -> Callable[[], Results]:
    """One token of each of a few sequences over pages."""
    call = store(layout, Sizes([4096, 1, 3000, 2048, 777, 4095, 64, 2900], page_size=64)).call(1, heads)
    q, view = call.q.cuda(), call.stored.view
    return lambda: tuple(cached_attention(q, view, mask=CAUSAL) for _ in range(10))


LATENT, GROUPED = KVLayout.latent(512, 64, dtype=BF16), KVLayout.grouped(8, 128, dtype=BF16)
CASES = MappingProxyType(
    {
        "forward d64": lambda: forward(64),
        "forward d128": lambda: forward(128),
        "forward d256": lambda: forward(256),
        "forward fp8": lambda: forward(128, fp8=True),
        "backward d64": lambda: backward(64),
        "backward d128": lambda: backward(128),
        "backward d192": lambda: backward(192),
        "backward d256": lambda: backward(256),
        "backward d192/128": lambda: backward(192, 128),
        "backward d64 functions": lambda: backward(64, functions=True),
        "backward d128 functions": lambda: backward(128, functions=True),
        "backward in order": in_order,
        "decode GQA": lambda: decode(GROUPED, 32),
        "decode GQA int8": lambda: decode(KVLayout.grouped(8, 128, dtype=BF16, storage_dtype=INT8), 32),
        "decode latents, few heads": lambda: decode(LATENT, 16),
        "decode latents, many heads": lambda: decode(LATENT, 128),
        "decode latents fp8": lambda: decode(KVLayout.latent(512, 64, dtype=BF16, storage_dtype=FP8), 128),
    }
)


def main(case: str) -> None:
    """Repeat a case, and say when it begins and how often it came out otherwise than most of the first
    five.
    """
    torch.manual_seed(0)
    run = CASES[case]()
    first = [run() for _ in range(5)]
    votes = [sum(alike(x, y) for y in first) for x in first]
    expected = first[votes.index(max(votes))]
    torch.cuda.synchronize()
    print("ready", flush=True)
    calls, wrong, end = 0, 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        wrong += not alike(run(), expected)
        calls += 1
    print(f"{wrong} of {calls} calls differ")
    sys.exit(wrong > 0)


def alike(x: Results, y: Results) -> bool:
    """Whether results are the same, bit by bit but for the sign of 0."""
    return all(a.equal(b) for a, b in zip(x, y, strict=True))


if __name__ == "__main__":
    main(sys.argv[1])
