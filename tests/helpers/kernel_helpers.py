"""Attention on the Triton backend, held against eager torch."""

import os
import time

import pytest
import torch
from helpers import Problem, assert_close, assert_lse, eager
from torch import Tensor

from attnlib import attention_with_lse

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def moved(options: dict) -> dict:
    """Options whose tensors are on the device of the kernels."""
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def solve(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and LSE from the kernels, back on the CPU."""
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in problem.options.items()}
    tensors = (x.to(DEVICE) for x in problem.tensors)
    out, lse = attention_with_lse(*tensors, mask=problem.mask, backend="triton", **options)
    return out.cpu(), lse.cpu()


def assert_both(problem: Problem) -> None:
    """assert_forward, and gradients within three times eager's error (of slopes and sinks, six times).

    Or within three times what rounding the output does to them: FlashAttention's delta is made of what was
    stored.
    """
    dtype = problem.q.dtype
    dout, dlse = problem.directions()
    problem = problem.to(dtype)
    moved = problem.change(
        **{name: getattr(problem, name).to(DEVICE) for name in "qkv"},
        options={name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in problem.options.items()},
    )
    ours = moved.with_gradients(attention_with_lse, dout.to(DEVICE), dlse.to(DEVICE), backend="triton")
    naive = [problem.to(dtype).with_gradients(eager, dout, dlse, order=order) for order in (0, 1)]
    golden = problem.to(torch.float64).with_gradients(eager, dout.double(), dlse.double(), order=2)
    # That is what another gradient of the LSE does: delta is rowsum(out * dout) - dlse.
    lost = ((golden["out"].to(dtype).double() - golden["out"]) * dout).sum(-1).transpose(1, 2)
    stored = problem.to(torch.float64).with_gradients(eager, dout.double(), dlse.double() - lost, order=2)
    naive.append({name: x.to(dtype) for name, x in stored.items()})
    largest = max(problem.largest_score(), float(golden["lse"].nan_to_num(0, 0, 0).abs().amax()))
    noise = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
    for name, x in ours.items():
        if name == "lse":
            assert_lse(problem, x.cpu(), golden[name])
            continue
        few = name in ("dsinks", "dalibi_slopes")
        factor = 6 if few else 2 if name == "out" else 3
        assert_close(
            name, x.cpu(), [n[name] for n in naive], golden[name], factor, 32 * noise if few else noise
        )


def assert_forward(problem: Problem) -> None:
    """Our error against fp64 is at most twice that of eager torch at the same dtype."""
    dtype = problem.q.dtype
    out, lse = solve(problem)
    naive = [problem.solve(eager, order=order)[0] for order in (0, 1)]
    golden = problem.to(torch.float64).solve(eager, order=2)
    largest = max(
        problem.largest_score(), float(golden[1].nan_to_num(0, 0, 0).abs().max()) if lse.numel() else 0
    )
    noise = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
    assert_close("out", out, naive, golden[0], 2, noise)
    assert_lse(problem, lse, golden[1])


def wait_for(seconds: float = 30) -> None:
    """Wait for the GPU; a kernel that hangs ends the session instead of keeping it."""
    event, until = torch.cuda.Event(), time.monotonic() + seconds
    event.record()
    while not event.query():
        if time.monotonic() > until:
            pytest.exit(f"a kernel still runs after {seconds} s", returncode=3)
        time.sleep(0.001)
