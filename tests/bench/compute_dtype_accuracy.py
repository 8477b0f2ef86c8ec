"""``python tests/bench/compute_dtype_accuracy.py [cuda]``: what a forward in e4m3 does to a call and its
gradients, as a Markdown table.

Errors are relative to the norm of the fp64 result for the same bf16 inputs; brackets give the errors of a
forward in bf16. 4 query heads, 2 KV heads, causal. Rotated: q and k are first multiplied by one orthogonal
matrix.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnlib import CAUSAL, attention
from attnlib.fp8 import rotation
from tests.bench.fp8_accuracy import normal, outliers

DIMS, TOKENS = (64, 128), (512, 1024, 2048, 4096)
E4M3 = torch.float8_e4m3fn


def solved(tensors: list[Tensor], dout: Tensor, *, turns: bool = False, **options) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v; with ``turns``, of q and k before a rotation."""
    leaves = q, k, v = [x.clone().requires_grad_() for x in tensors]
    if turns:
        turn = rotation(q.shape[-1], q.device)
        q, k = ((x.float() @ turn).to(x.dtype) for x in (q, k))
    out = attention(q, k, v, mask=CAUSAL, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def errors(
    d: int, tokens: int, draw: Callable[..., Tensor], device: str, *, turns: bool = False
) -> list[tuple[float, float]]:
    """Errors of the output, dq, dk and dv, each as a pair: forward in e4m3, forward in bf16."""
    torch.manual_seed(0)
    tensors = [draw(1, tokens, heads, d).to(device).bfloat16() for heads in (4, 2, 2)]
    dout = torch.randn(1, tokens, 4, d, device=device).bfloat16()
    exact = solved([x.double() for x in tensors], dout)
    found = [solved(tensors, dout, turns=turns, compute_dtype=dtype) for dtype in (E4M3, None)]
    return [
        tuple(float((x - y).norm() / y.norm()) for x in each) for y, *each in zip(exact, *found, strict=True)
    ]


def rows(device: str) -> Iterator[str]:
    """The lines of the table."""
    yield "| relative error, e4m3 (bf16) | tokens | output | dq | dk | dv |"
    yield "|---|---:|---:|---:|---:|---:|"
    for d in DIMS:
        for draw, turns in ((normal, False), (outliers, False), (outliers, True)):
            name = f"{draw.__name__}, rotated" if turns else draw.__name__
            for tokens in TOKENS:
                cells = [f"{x:.1e} ({y:.1e})" for x, y in errors(d, tokens, draw, device, turns=turns)]
                yield f"| d{d}, {name} | {tokens:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in rows(*sys.argv[1:] or ["cpu"]):
        print(line, flush=True)
