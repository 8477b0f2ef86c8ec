"""Hopper's own forward, by the accuracy rule and against the plain kernels; nothing but an sm_90 runs it."""

import pytest
import torch
from helpers import assert_same_bits, make
from kernel_helpers import INTERPRETED, assert_forward, wait_for

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

MASKS = (FULL, CAUSAL, sliding(100), Mask(150), Mask(None, 0, 40), CAUSAL.shift(-70), CAUSAL.shift(30))
HEADS = ((64, 64), (40, 64), (96, 96), (128, 128), (128, 64), (192, 128), (256, 256), (320, 264), (512, 512))
# Scores by key, added to random ones. Blocks of keys are walked down.
RISES = {
    "slow": lambda j: -0.1 * j,
    "steep": lambda j: -2.0 * j,
    "falling": lambda j: 2.0 * j,
    "beyond fp32's exponents at once": lambda j: 300.0 * (j < 500),
    "at one key": lambda j: 40.0 * (j == 3),
}
LENGTHS = ((1, 1), (1, 65), (65, 1), (129, 129), (129, 321), (320, 129), (63, 700))


@pytest.fixture(autouse=True)
def _however_few_keys(monkeypatch):
    monkeypatch.setattr(hopper_tables, "FEW_KEYS", 0)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("d", "e"), HEADS)
def test_any_lengths(d, e, mask):
    for s, t in LENGTHS:
        for h, g in ((6, 2), (3, 3)):
            assert_forward(make(2, s, t, h, g, d, e, mask=mask, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [("bounds",), ("softcap", "sinks"), ("alibi_slopes", "scale"), ("per_sequence_slopes",)],
    ids="+".join,
)
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
def test_any_options(d, options):
    for mask in (CAUSAL, sliding(70)):
        for dtype in (torch.bfloat16, torch.float16):
            assert_forward(
                make(
                    3,
                    200,
                    333,
                    4,
                    2,
                    d,
                    d if d in (256, 512) else min(d, 128),
                    mask=mask,
                    options=options,
                    dtype=dtype,
                )
            )


@pytest.mark.parametrize("scale", [0.05, 8.0])
def test_maxima_that_move_far(scale):
    """Sums are scaled again where a row's maximum grows by more than a few powers of two, and only there."""
    for d in (64, 128, 256):
        assert_forward(make(1, 300, 900, 2, 1, d, mask=CAUSAL, dtype=torch.bfloat16, sigma=scale))


@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
def test_scores_that_rise_from_block_to_block(d, rise):
    """Where they do, probabilities relative to the maxima so far are too large, and the block is done
    again.
    """
    for dtype in (torch.bfloat16, torch.float16):
        for mask in (CAUSAL, FULL, sliding(300)):
            problem = make(1, 300, 900, 2, 1, d, 128 if d == 192 else d, mask=mask, dtype=dtype)
            problem.q[..., 0] = 8.0
            problem.q[:, ::7, :, 0] = -8.0  # and falls for some rows
            problem.k[..., 0] = (RISES[rise](torch.arange(900.0)) * d**0.5 / 8)[None, :, None]
            assert_forward(problem)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(90)], ids=str)
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_packed_sequences_are_each_alone_to_the_bit(d, e, mask):
    lengths = [130, 1, 0, 570, 65, 200]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    total = sum(lengths)
    q, k, v = tokens(total + 7, 4, d), tokens(total + 7, 2, d), tokens(total + 7, 2, e)
    for x in (q, k, v):
        x[total:] = torch.nan
        x[cu[3] : cu[4]] = torch.nan
    out, lse = varlen_attention_with_lse(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=mask, backend="triton"
    )
    wait_for()
    for n, (first, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        if n != 3 and end > first:
            alone = attention_with_lse(
                q[None, first:end], k[None, first:end], v[None, first:end], mask=mask, backend="triton"
            )
            assert_same_bits((out[None, first:end], alone[0]), (lse[None, :, first:end], alone[1]))
    assert not out[total:].any()


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_scores_that_rise_in_every_block_take_no_more_than_their_products(d):
    """Each block is multiplied twice then: 1.8 to 2.5 times the time of random scores (H200, 8k tokens)."""
    q, k, v = (tokens(2, 8192, 16, d) for _ in range(3))
    q[..., 0], times = 8, []
    for rise in (0.0, -2.0):
        k[..., 0] = (rise * torch.arange(8192.0, device="cuda") * d**0.5 / 8)[None, :, None]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        for event in (start, end):
            attention(q, k, v, mask=FULL, backend="triton")
            event.record()
        wait_for()
        times.append(start.elapsed_time(end))
    assert times[1] < 4 * times[0]


def test_bounds_hide_whatever_is_beyond():
    q, k, v = tokens(3, 300, 4, 128), tokens(3, 500, 2, 128), tokens(3, 500, 2, 128)
    bounds = {"key_starts": torch.tensor([0, 130, 37], dtype=torch.int32).cuda()}
    bounds["key_ends"] = torch.tensor([500, 400, 40], dtype=torch.int32).cuda()
    before = attention_with_lse(q, k, v, mask=CAUSAL, backend="triton", **bounds)
    for n, (start, end) in enumerate(((0, 500), (130, 400), (37, 40))):
        for x in (k, v):
            x[n, :start], x[n, end:] = torch.nan, torch.inf
    assert_same_bits(
        *zip(before, attention_with_lse(q, k, v, mask=CAUSAL, backend="triton", **bounds), strict=True)
    )


def test_any_strides():
    b, s, h, d = 2, 300, 4, 128
    fused, heads_first = tokens(b, s, 3 * h, d), tokens(b, h, s, d).transpose(1, 2)
    apart = tokens(b, s, h, d + 8)[..., :d]
    for q, k, v in (
        fused.split(h, 2),
        (heads_first, heads_first, fused[:, :, :h]),
        (apart, apart, heads_first),
    ):
        assert "Hopper" in str(explain(attention, q, k, v, mask=CAUSAL))
        results = [
            attention_with_lse(*each, mask=CAUSAL, backend="triton")
            for each in ((q, k, v), [x.contiguous() for x in (q, k, v)])
        ]
        assert_same_bits(*zip(*results, strict=True))


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_calls_repeat_to_the_bit(d):
    """More programs' worth of tiles than the GPU has room for, drawn in another order every time."""
    q, k, v = tokens(4, 1100, 24, d), tokens(4, 1100, 8, d), tokens(4, 1100, 8, d)
    first = attention_with_lse(q, k, v, mask=CAUSAL, backend="triton")
    for _ in range(1000):
        again = attention_with_lse(q, k, v, mask=CAUSAL, backend="triton")
    wait_for()
    assert_same_bits(*zip(first, again, strict=True))


def test_streams_draw_from_counters_of_their_own():
    q, k, v = (tokens(2, 1500, 8, 128) for _ in range(3))
    expected, streams = (
        attention_with_lse(q, k, v, mask=CAUSAL, backend="triton"),
        [torch.cuda.Stream() for _ in "123"],
    )
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(attention_with_lse(q, k, v, mask=CAUSAL, backend="triton"))
    wait_for()
    torch.cuda.synchronize()
    for result in results:
        assert_same_bits(*zip(expected, result, strict=True))


def test_a_captured_call_replays():
    q, k, v = (tokens(2, 1500, 8, 128) for _ in range(3))
    attention(q, k, v, mask=CAUSAL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_lse(q, k, v, mask=CAUSAL)
    for _ in range(3):
        q.copy_(tokens(*q.shape))
        graph.replay()
        wait_for()
        assert_same_bits(*zip((out, lse), attention_with_lse(q, k, v, mask=CAUSAL), strict=True))


def test_which_kernels_run_is_told():
    q, odd, short = tokens(1, 600, 2, 128), tokens(1, 600, 2, 12), tokens(1, 600, 2, 32)

    def told(x: torch.Tensor, **options) -> str:
        return explain(attention, x, x, x, mask=CAUSAL, **options).variant

    assert told(q) == "Hopper"
    assert (
        told(q, backend="triton:generic")
        == told(q.float())
        == told(q, dropout_p=0.1)
        == told(odd)
        == told(short)
        == "plain"
    )
    assert torch.equal(attention(q, q, q, mask=CAUSAL), attention(q, q, q, mask=CAUSAL, backend="triton"))
    plain = attention(q, q, q, mask=CAUSAL, backend="triton:generic")
    torch.testing.assert_close(plain, attention(q, q, q, mask=CAUSAL))


def test_few_keys_run_on_the_plain_kernels(monkeypatch):
    monkeypatch.setattr(hopper_tables, "FEW_KEYS", 512)
    for t, variant in ((512, "plain"), (513, "Hopper")):
        q, k = tokens(1, 9, 2, 128), tokens(1, t, 2, 128)
        assert explain(attention, q, k, k, mask=FULL).variant == variant
