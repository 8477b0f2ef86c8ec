"""The cases: what they hold, and FLOPs by the papers' formulas."""

import pytest
import torch
from bench_helpers import tiny

from attnlib import CAUSAL
from attnlib.bench import cases

ALL = (*cases.TRAINING, *cases.WIDE, *cases.GROWING, *cases.LONG, *cases.MEMORY, *cases.GROUPED)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_flops_are_the_papers(case):
    pairs = case.batch * case.heads * case.tokens**2 / (2 if case.mask == CAUSAL else 1)
    assert case.flops("inference") == case.flops("forward") == 2 * pairs * (case.dim + case.value_dim)
    assert case.flops("backward") == 2 * pairs * (3 * case.dim + 2 * case.value_dim)
    assert case.flops("both") == case.flops("forward") + case.flops("backward")


def test_known_flops():
    """Forward of 2 x 16 heads of 128 channels on 8192 tokens: 1.0995 TFLOP, and half of it when causal."""
    full, causal = cases.TRAINING[:2]
    assert full.flops("forward") == 4 * 2 * 16 * 8192**2 * 128 == 1099511627776
    assert causal.flops("backward") == 2.5 * full.flops("forward") / 2


def test_packed_flops_add_up_sequences():
    both = cases.packed(5, 3).flops("forward")
    assert both == cases.packed(5).flops("forward") + cases.packed(3).flops("forward")


def test_packed_cases_have_as_many_tokens_and_about_as_many_pairs_as_their_batch():
    for packed, dense in cases.VARLEN:
        assert packed.tokens == dense.batch * dense.tokens == 16384
        assert packed.flops("both") == pytest.approx(dense.flops("both"), rel=0.02)


def test_tensors():
    case = tiny(6, batch=2, kv_heads=2)._replace(value_dim=8)
    q, k, v, dout = case.tensors("cpu")
    assert [tuple(x.shape) for x in (q, k, v, dout)] == [
        (2, 6, 4, 16),
        (2, 6, 2, 16),
        (2, 6, 2, 8),
        (2, 6, 4, 8),
    ]
    assert q.dtype == torch.float32
    q, *_ = cases.packed(5, 3).tensors("cpu")
    assert q.shape == (8, 16, 128)
    assert q.dtype == torch.bfloat16


def test_what_is_asked_for_is_there():
    assert [case.tokens for case in cases.GROWING] == [2**n for n in range(9, 17)]
    assert {(case.batch, case.heads, case.dim) for case in cases.GROWING} == {(1, 48, 64)}
    assert [case.tokens for case in cases.LONG] == [8192, 16384, 32768, 65536]
    assert cases.MEMORY[-1].tokens == 65536
    assert len({case.name for case in cases.TRAINING}) == 9
