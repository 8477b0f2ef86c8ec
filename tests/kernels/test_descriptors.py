"""Loads by descriptors: the same bits as loads by pointers, and only where addresses allow them."""

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import DEVICE

from attnlib import CAUSAL, FULL, attention_with_lse, sliding, varlen_attention_with_lse
from attnlib.backends._triton.dense import shapes as triton_plans
from attnlib.backends._triton.dense import tables
from attnlib.backends._triton.launching.launch import plan_cache


def gradients(tensors, tma, monkeypatch, mask, cu=None):
    """Output, LSE and gradients with small tiles, which descriptors load or not."""
    tiles = tables.LaunchConfig(32, 16, 1, 4, tma)
    monkeypatch.setattr(tables, "forward", lambda case, *, keys: tiles._replace(tma=tma and case.aligned))
    for name in ("backward_keys", "backward_queries"):
        monkeypatch.setattr(tables, name, lambda case, *, keys: tiles._replace(tma=tma and case.aligned))
    plan_cache.cache_clear()
    leaves = [x.detach().requires_grad_() for x in tensors]
    if cu is None:
        out, lse = attention_with_lse(*leaves, mask=mask, backend="triton")
    else:
        offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        out, lse = varlen_attention_with_lse(*leaves, **offsets, mask=mask, backend="triton")
    return out.detach(), lse.detach(), *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), leaves)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(40)], ids=str)
@pytest.mark.parametrize(("h", "g", "d", "e"), [(2, 2, 16, 16), (4, 1, 136, 32), (2, 1, 40, 24)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_bits_are_those_of_pointers(packed, h, g, d, e, mask, monkeypatch):
    tensors = [torch.randn(2, 90, n, width, device=DEVICE).half() for n, width in ((h, d), (g, d), (g, e))]
    cu = torch.tensor([0, 37, 90], dtype=torch.int32, device=DEVICE) if packed else None
    tensors = [x[0] for x in tensors] if packed else tensors
    results = [gradients(tensors, tma, monkeypatch, mask, cu) for tma in (False, True)]
    assert_same_bits(*zip(*results, strict=True))


@pytest.mark.parametrize(
    "how", ["a fused projection", "heads first", "an odd address", "odd rows", "expanded heads"]
)
def test_any_strides_and_addresses(how, monkeypatch):
    """Where rows do not begin at multiples of 16 bytes, or do not advance, pointers load them."""
    b, s, h, d = 2, 70, 2, 16
    x = {
        "a fused projection": torch.randn(b, s, 3 * h, d)[:, :, h : 2 * h],
        "heads first": torch.randn(b, h, s, d).transpose(1, 2),
        "an odd address": torch.randn(b * s * h * d + 1)[1:].view(b, s, h, d),
        "odd rows": torch.randn(b, s, h, d + 1)[..., :d],
        "expanded heads": torch.randn(b, s, 1, d).expand(b, s, h, d),
    }[how]
    moved = torch.empty_strided(x.shape, x.stride(), device=DEVICE) if how != "an odd address" else None
    if moved is None:
        moved = torch.empty(x.numel() + 1, device=DEVICE)[1:].view(x.shape)
    (moved[:, :, :1] if how == "expanded heads" else moved).copy_(
        x[:, :, :1] if how == "expanded heads" else x
    )
    seen = []
    monkeypatch.setattr(
        triton_plans, "Launch", lambda *args, **early: seen.append(args) or LAUNCH(*args, **early)
    )
    ours = gradients((moved, moved, moved), True, monkeypatch, CAUSAL)
    described = [bool(args[4]) for args in seen if args[4] is not None]
    assert all(described) == (how in ("a fused projection", "heads first"))
    assert len(set(described)) == 1
    assert_same_bits(
        *zip(ours, gradients((moved.contiguous(),) * 3, False, monkeypatch, CAUSAL), strict=True)
    )


def test_values_cut_from_wider_rows(monkeypatch):
    """The rows of their output's gradient are not, and may begin anywhere."""
    x = torch.randn(2, 70, 2, 20, device=DEVICE)[..., :18]
    results = [gradients((x, x, x), tma, monkeypatch, CAUSAL) for tma in (True, False)]
    assert_same_bits(*zip(*results, strict=True))


LAUNCH = triton_plans.Launch
