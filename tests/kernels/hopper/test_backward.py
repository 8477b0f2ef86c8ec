"""Hopper's own backward, by the accuracy rule and against the two passes; nothing but an sm_90 runs it."""

import pytest
import torch
from helpers import assert_same_bits, make
from kernel_helpers import INTERPRETED, assert_both, wait_for

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    attention_with_lse,
    explain,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import hopper_tables

IS_HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an sm_90")

MASKS = (FULL, CAUSAL, sliding(100), Mask(150), Mask(None, 0, 40), CAUSAL.shift(-70))
HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (320, 264), (512, 512))
LENGTHS = ((1, 65), (65, 1), (129, 129), (129, 321), (320, 129), (63, 700))


@pytest.fixture(autouse=True, params=[False, True], ids=["any order", "in order"])
def in_order(request, monkeypatch):
    """Programs add to the gradient of queries as they come, or in a fixed order, for deterministic
    algorithms.
    """
    monkeypatch.setattr(hopper_tables, "FEW_KEYS", 0)
    torch.use_deterministic_algorithms(request.param)
    return request.param


def tokens(*shape: int) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def gradients(q, k, v, dout, call=attention_with_lse, **options) -> list[torch.Tensor]:
    """Those of q, k and v, for a gradient of the output alone."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = call(*leaves, **options)
    return list(torch.autograd.grad(out, leaves, dout))


def assert_alike(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Gradients of 16 bits, apart by what rounding does to them."""
    for x, y in zip(ours, others, strict=True):
        assert not x.isnan().any()
        assert (x.float() - y.float()).norm() <= 8e-3 * y.float().norm()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_any_lengths(d, e, mask):
    for s, t in LENGTHS:
        for h, g in ((6, 2), (3, 3)):  # whose programs take turns the other way around
            assert_both(make(2, s, t, h, g, d, e, mask=mask, dtype=torch.bfloat16))


@pytest.mark.parametrize("options", [("bounds",), ("softcap", "sinks"), ("scale",)], ids="+".join)
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_any_options(d, e, options):
    for dtype in (torch.bfloat16, torch.float16):
        assert_both(make(3, 200, 333, 4, 2, d, e, mask=CAUSAL, options=options, dtype=dtype))


def test_a_large_softcap_is_precise():
    """The short tanh has an absolute error, which the softcap multiplies, so these calls do not use it."""
    q, k, v, dout = (tokens(1, 300, 2, 128) for _ in range(4))
    options = {"mask": CAUSAL, "softcap": 1e6}
    exact = gradients(q.double(), k.double(), v.double(), dout.double(), backend="torch", **options)
    assert_alike(gradients(q, k, v, dout, backend="triton", **options), exact)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(90), Mask(20, 30)], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_slopes_without_a_gradient(d, e, softcap, mask):
    """Learned slopes take the generic passes, and these do not."""
    queries, keys = [130, 1, 570, 65, 200], [200, 30, 570, 65, 331]
    cu = [
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda() for n in (queries, keys)
    ]
    q, k, v = tokens(sum(queries), 4, d), tokens(sum(keys), 2, d), tokens(sum(keys), 2, e)
    options = {"alibi_slopes": torch.rand(5, 4, device="cuda"), "softcap": softcap, "mask": mask}
    options |= {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "call": varlen_attention_with_lse}
    dout = tokens(sum(queries), 4, e)
    found, expected = (
        gradients(q, k, v, dout, backend=backend, **options) for backend in ("triton", "triton:generic")
    )
    assert_alike(found, expected)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(90)], ids=str)
@pytest.mark.parametrize("h", [4, 2])
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_packed_sequences_do_not_meet(d, e, h, mask):
    queries, keys = [130, 1, 0, 570, 65, 200], [200, 1, 30, 570, 0, 131]
    cu = [
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda() for n in (queries, keys)
    ]
    of_q, of_k = (slice(offsets[3], offsets[4]) for offsets in cu)
    q, k = tokens(sum(queries) + 7, h, d), tokens(sum(keys) + 5, 2, d)
    v, dout = tokens(sum(keys) + 5, 2, e), tokens(sum(queries) + 7, h, e)
    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "mask": mask}
    clean = [x.clone() for x in (q, k, v, dout)]
    ends = (sum(queries), sum(keys), sum(keys), sum(queries))
    for x, end in zip(
        clean, ends, strict=True
    ):  # what follows the last sequence has no gradient, whatever it holds
        x[end:] = 0
    expected = gradients(*clean, varlen_attention_with_lse, backend="triton:generic", **options)
    for x, part, end in zip((q, k, v, dout), (of_q, of_k, of_k, of_q), ends, strict=True):
        x[part], x[end:] = torch.nan, torch.nan
    found = gradients(q, k, v, dout, varlen_attention_with_lse, backend="triton", **options)
    for x, y, part in zip(found, expected, (of_q, of_k, of_k), strict=True):
        x[part] = y[part] = 0
    assert_alike(found, expected)


def test_bounds_hide_whatever_is_beyond():
    q, k, v, dout = (
        tokens(3, 300, 4, 128),
        tokens(3, 500, 2, 128),
        tokens(3, 500, 2, 128),
        tokens(3, 300, 4, 128),
    )
    bounds = {"key_starts": torch.tensor([0, 130, 37], dtype=torch.int32).cuda()}
    bounds["key_ends"] = torch.tensor([500, 400, 40], dtype=torch.int32).cuda()
    before = gradients(q, k, v, dout, mask=CAUSAL, backend="triton", **bounds)
    for n, (start, end) in enumerate(((0, 500), (130, 400), (37, 40))):
        for x in (k, v):
            x[n, :start], x[n, end:] = torch.nan, torch.inf
    after = gradients(q, k, v, dout, mask=CAUSAL, backend="triton", **bounds)
    assert_alike(after, before)
    assert_same_bits(*zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(700)], ids=str)
@pytest.mark.parametrize("g", [2, 4])
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_calls_repeat(d, e, g, mask, in_order):
    """To the bit, but for dq that is added up in any order; few heads, so that all programs meet at its
    tiles.
    """
    q, k, v, dout = tokens(2, 4100, 4, d), tokens(2, 4100, g, d), tokens(2, 4100, g, e), tokens(2, 4100, 4, e)
    first, same = gradients(q, k, v, dout, mask=mask, backend="triton"), 0 if in_order else 1
    for _ in range(1000):
        again = gradients(q, k, v, dout, mask=mask, backend="triton")
        wait_for()
        assert_same_bits(*zip(first[same:], again[same:], strict=True))
    assert_alike(again, first)
    assert_alike(first, gradients(q, k, v, dout, mask=mask, backend="triton:generic"))


def test_streams_take_turns_of_their_own(in_order):
    """Programs of each stream wait for their own alone, and begin as those of others end."""
    q, k, v, dout = (
        tokens(2, 4100, 8, 128),
        tokens(2, 4100, 2, 128),
        tokens(2, 4100, 2, 128),
        tokens(2, 4100, 8, 128),
    )
    expected, streams = gradients(q, k, v, dout, mask=CAUSAL), [torch.cuda.Stream() for _ in "123"]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(gradients(q, k, v, dout, mask=CAUSAL))
    wait_for()
    torch.cuda.synchronize()
    for result in results:
        assert_alike(result, expected)
        same = 0 if in_order else 1
        assert_same_bits(*zip(result[same:], expected[same:], strict=True))


@pytest.mark.parametrize(("d", "e"), HEADS)
def test_memory_of_long_sequences(d, e):
    """At most 1.3 times what two passes take: the sums of dq in fp32 are all that comes beside gradients.

    Sums of 96 channels have room for 128, and take 1.34 times as much.
    """
    q, k, v, dout = (
        tokens(1, 65536, 4, d),
        tokens(1, 65536, 4, d),
        tokens(1, 65536, 4, e),
        tokens(1, 65536, 4, e),
    )
    most = []
    for backend in ("triton", "triton:generic"):
        torch.cuda.reset_peak_memory_stats()
        gradients(q, k, v, dout, mask=sliding(100), backend=backend)
        most.append(torch.cuda.max_memory_allocated())
    assert most[0] <= (1.34 if d == 96 else 1.3) * most[1]


@pytest.mark.parametrize(("d", "e"), HEADS)
def test_which_backward_runs_is_told(d, e, in_order):
    q, k, v = tokens(1, 700, 2, d).requires_grad_(), tokens(1, 700, 2, d), tokens(1, 700, 2, e)
    told = explain(attention, q, k, v, mask=CAUSAL).variant
    backward = {192: "plain", 320: "Hopper", 512: "Hopper"}.get(d, "ordered Hopper")
    alike = not in_order or backward == "Hopper"
    assert told == ("Hopper" if alike else f"Hopper forward, {backward} backward")
