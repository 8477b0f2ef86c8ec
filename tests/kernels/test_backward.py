"""Training on the Triton backend, by the accuracy rule; test_backward_kernel.py has the kernels alone."""

import pytest
import torch
from helpers import OPTIONS, assert_same_bits, make
from kernel_helpers import DEVICE, INTERPRETED, assert_both

from attnlib import CAUSAL, FULL, Mask, attention, explain, sliding, varlen_attention
from attnlib.backends._triton.dense import tables

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))
SMALL = tables.LaunchConfig(16, 32, 1, 4)
SETS = (
    (),
    ("bounds", "sinks"),
    ("softcap",),
    ("alibi_slopes", "scale"),
    ("per_sequence_slopes", "dropout"),
    OPTIONS,
)


@pytest.fixture
def _small_tiles(monkeypatch):
    for name in ("backward_keys", "backward_queries"):
        monkeypatch.setattr(tables, name, lambda case, *, keys: SMALL)
    monkeypatch.setattr(tables, "forward", lambda case, *, keys: tables.LaunchConfig(32, 16, 1, 4))


@pytest.mark.covering(1)
@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("options", SETS, ids="+".join)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(9), Mask(None, -3, 11)], ids=str)
def test_any_options(mask, options, dtype):
    assert_both(make(2, 33, 50, 3, 1, 16, 24, mask=mask, options=options, dtype=dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES[INTERPRETED:], ids=str)  # fp32 has tiles of its own
@pytest.mark.parametrize("d", [40, 64, 80, 96, 128, 160, 192, 256, 264, 320, 333, 512, 576])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_the_tables_own_tiles(d, mask, dtype):
    if dtype == torch.float32 and d > tables.WIDE:
        pytest.skip("no backward in fp32")
    e = {192: 128, 576: 512}.get(d, d)
    tokens = 150 if d <= 256 or not INTERPRETED else 70
    assert_both(make(1, tokens, tokens, 2, 1, d, e, mask=mask, dtype=dtype))


@pytest.mark.skipif(INTERPRETED, reason="takes minutes when interpreted")
@pytest.mark.parametrize("options", [*SETS, ("softcap", "sinks")], ids="+".join)
@pytest.mark.parametrize("mask", [CAUSAL, sliding(100)], ids=str)
@pytest.mark.parametrize(("d", "e"), [(512, 512), (320, 320), (576, 512)])
def test_options_of_wide_heads(d, e, mask, options):
    """1,100 keys are enough for descriptors and for loops without a mask."""
    assert_both(make(2, 1001, 1100, 4, 2, d, e, mask=mask, options=options, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_what_rounding_the_output_does_to_gradients(dtype):
    """With one key and dropout, all that is left of dq is a difference of delta, in which eager makes no
    error.
    """
    assert_both(make(1, 239, 1, 1, 1, 111, mask=FULL, options=("dropout",), dtype=dtype))


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("per_sequence", [False, True])
def test_packed_gradients_are_those_of_the_torch_backend(per_sequence):
    cu = torch.tensor([0, 3, 3, 40, 61], dtype=torch.int32, device=DEVICE)
    slopes = torch.rand(*((4, 4) if per_sequence else (4,)), device=DEVICE)
    results = []
    for backend in ("triton", "torch"):
        torch.manual_seed(1)
        q, k, v = (torch.randn(64, h, 16).to(DEVICE).requires_grad_() for h in (4, 2, 2))
        ours = slopes.clone().requires_grad_()
        out = varlen_attention(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=CAUSAL, alibi_slopes=ours, backend=backend
        )
        results.append(torch.autograd.grad(out.sin().sum(), (q, k, v, ours)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see_gives_zero_gradients(lengths):
    q, k, v = (torch.randn(2, n, 2, 16, device=DEVICE, requires_grad=True) for n in (*lengths, lengths[1]))
    grads = torch.autograd.grad(attention(q, k, v, mask=CAUSAL, backend="triton").sum(), (q, k, v))
    assert not any(grad.any() for grad in grads)


def test_gradients_repeat_to_the_bit():
    q, k, v = (torch.randn(1, 65, h, 16, device=DEVICE, requires_grad=True) for h in (4, 2, 2))
    first = torch.autograd.grad(attention(q, k, v, mask=CAUSAL, backend="triton").sin().sum(), (q, k, v))
    for _ in range(2 if INTERPRETED else 250):
        again = torch.autograd.grad(attention(q, k, v, mask=CAUSAL, backend="triton").sin().sum(), (q, k, v))
        assert_same_bits(*zip(first, again, strict=True))


def test_heads_beyond_the_widest_are_refused():
    q = torch.randn(1, 3, 1, 580, device=DEVICE, requires_grad=True)
    assert "has kernels for heads of up to 576, got 580" in str(explain(attention, q, q, q, mask=CAUSAL))
