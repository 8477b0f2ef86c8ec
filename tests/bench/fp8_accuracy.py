"""``python tests/bench/fp8_accuracy.py [cuda]``: what fp8 inputs do to attention, as a Markdown table.

Root mean square errors against fp64, of 1,024 queries over 8,192 keys, 4 heads, nothing hidden; as in
FlashAttention-3.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from attnlib import FULL, attention, explain, quantize_fp8

QUERIES, KEYS, HEADS = 1024, 8192, 4
DIMS = (64, 128, 256)


def normal(*shape: int) -> Tensor:
    """N(0, 1)."""
    return torch.randn(shape)


def outliers(*shape: int) -> Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


def errors(d: int, draw, device: str) -> list[float]:
    """Of bf16, of fp8, and of fp8 after a rotation of q and k."""
    torch.manual_seed(0)
    q, k, v = (draw(1, n, HEADS, d).to(device) for n in (QUERIES, KEYS, KEYS))
    exact = attention(q.double(), k.double(), v.double(), mask=FULL, backend="torch")
    calls = [dict(zip("qkv", (x.bfloat16() for x in (q, k, v)), strict=True))]
    calls += [quantize_fp8(q, k, v, incoherent=on)._asdict() for on in (False, True)]
    return [float((attention(**x, mask=FULL) - exact).square().mean().sqrt()) for x in calls]


def rows(device: str) -> Iterator[str]:
    """The lines of the table."""
    yield "| root mean square error | kernels | bf16 | fp8 | fp8, rotated |"
    yield "|---|---|---:|---:|---:|"
    for d in DIMS:
        told = explain(
            attention, **quantize_fp8(*[torch.zeros(1, KEYS, 1, d, device=device)] * 3)._asdict(), mask=FULL
        )
        kernels = ", ".join(name for name in (told.chosen, told.variant) if name)
        for draw in (normal, outliers):
            cells = " | ".join(f"{x:.1e}" for x in errors(d, draw, device))
            yield f"| d{d}, {draw.__name__} | {kernels} | {cells} |"


if __name__ == "__main__":
    print(*rows(*sys.argv[1:] or ["cpu"]), sep="\n")
