"""Recomputed probabilities and largest scores, against all pairs in fp64, for every option and form."""

import pytest
import torch
from function_cases import MASK_NAMES, SCORE_NAMES, functions
from helpers import OPTIONS, make, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from weight_helpers import WHOLE, all_scores, drawn, forms, oracle, probabilities, spans

from attnlib import (
    CAUSAL,
    FLOP_FORMULAS,
    FULL,
    attention_maxima,
    attention_weights,
    attention_with_lse,
    explain,
    sliding,
    varlen_attention_with_lse,
)

NO_DROPOUT = [name for name in OPTIONS if name != "dropout"]
backends = st.sampled_from(("torch", "torch", "reference"))


def asked_options(problem) -> dict:
    """The options that probabilities take; sinks are in the LSE alone."""
    return {"mask": problem.mask, **{n: x for n, x in problem.options.items() if n != "sinks"}}


def assert_forms(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, wanted[name], msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=60)
@given(problem=problems(options=NO_DROPOUT), backend=backends)
def test_every_form_is_that_of_all_pairs(problem, backend):
    problem = problem.to(torch.float64)
    q, k, _ = problem.tensors
    lse, asked = problem.solve()[1], drawn(*q.shape[:2], k.shape[1])
    options = asked_options(problem)
    assert_forms(forms(q, k, lse, asked, backend=backend, **options), oracle(q, k, lse, asked, **options))


@pytest.mark.parametrize(
    ("s", "t", "mask", "options"),
    [
        (1100, 1100, CAUSAL, ()),
        (1100, 1100, sliding(300), ("softcap",)),
        (70, 1100, CAUSAL, ("alibi_slopes",)),
        (600, 1100, FULL, ("bounds", "per_sequence_slopes")),
    ],
)
def test_lengths_that_cross_tiles(s, t, mask, options):
    problem = make(2, s, t, 2, 1, 8, 5, mask=mask, options=options).to(torch.float64)
    q, k, _ = problem.tensors
    lse, asked, options = problem.solve()[1], drawn(2, s, t), asked_options(problem)
    assert_forms(forms(q, k, lse, asked, **options), oracle(q, k, lse, asked, **options))


@pytest.mark.parametrize("mask_name", [*MASK_NAMES, None])
@pytest.mark.parametrize("score_name", SCORE_NAMES)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_functions_of_indices(mask_name, score_name, backend):
    masks, scores = functions()
    options = {"mask": masks.get(mask_name, CAUSAL), "score": scores.get(score_name, (None,))[0]}
    q, k = torch.randn(2, 37, 4, 8, dtype=torch.float64), torch.randn(2, 60, 2, 8, dtype=torch.float64)
    lse, asked = attention_with_lse(q, k, k, **options)[1].detach(), drawn(2, 37, 60)
    wanted = {name: x.detach() for name, x in oracle(q, k, lse, asked, **options).items()}
    assert_forms(forms(q, k, lse, asked, backend=backend, **options), wanted)


def packed(lengths_q, lengths_k, *, h=4, g=2, d=8, slack=3):
    """Packed q and k with rows after the last sequence, and both offsets."""
    offsets = [torch.tensor([0, *x]).cumsum(0).int() for x in (lengths_q, lengths_k)]
    q = torch.randn(sum(lengths_q) + slack, h, d, dtype=torch.float64)
    k = torch.randn(sum(lengths_k) + slack, g, d, dtype=torch.float64)
    return q, k, {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}


LENGTHS = [((5, 0, 9, 1), (7, 3, 9, 0)), ((1, 40), (300, 40)), ((0,), (0,)), ((), ())]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("limit", [None, 301])
def test_packed_sequences_are_calls_of_their_own(lengths, backend, limit):
    q, k, offsets = packed(*lengths)
    options = {"mask": sliding(6), "softcap": 2.0, "alibi_slopes": torch.rand(4, dtype=torch.float64)}
    lse = varlen_attention_with_lse(q, k, k, **offsets, **options)[1]
    asked = {
        "rows": torch.tensor([len(q) - 1, 0, 1, -1, len(q) // 2, 0]),
        "at": torch.randint(-1, 9, (len(q), 4)),
    }
    found = forms(q, k, lse, asked, backend=backend, max_seqlen_k=limit, **offsets, **options)
    longest = limit or max(lengths[1], default=0)
    wanted = {name: torch.zeros_like(x) for name, x in found.items()}
    assert found["none"].shape == (4, 6, longest)
    for of in ("scores", "products"):
        wanted[of] = torch.full((4, len(q)), -torch.inf, dtype=torch.float64)
    for (r0, r1), (k0, k1) in zip(*map(spans, offsets.values()), strict=True):
        rows = torch.where((asked["rows"] >= r0) & (asked["rows"] < r1), asked["rows"] - r0, -1)
        own = {"rows": rows, "at": asked["at"][None, r0:r1], "by_sequence": rows[None]}
        one = oracle(q[None, r0:r1], k[None, k0:k1], lse[None, :, r0:r1], own, **options)
        wanted["none"][..., : k1 - k0] += one["none"][0]
        wanted["heads"][r0:r1] = one["heads"][0]
        for name, span in (
            ("scores", (r0, r1)),
            ("products", (r0, r1)),
            ("queries", (k0, k1)),
            ("some", (k0, k1)),
        ):
            wanted[name][:, slice(*span)] = one[name][0]
    assert_forms(found, wanted)


def test_rows_sum_to_one_and_less_with_sinks():
    problem = make(2, 9, 12, 4, 2, 8, options=["sinks"]).to(torch.float64)
    q, k, v = problem.tensors
    rows, sinks = torch.arange(9), problem.options["sinks"]
    for added in (None, sinks):
        lse = attention_with_lse(q, k, v, mask=CAUSAL, sinks=added)[1]
        total = attention_weights(q, k, lse, mask=CAUSAL, over="none", rows=rows).sum(-1)
        lost = 0 if added is None else torch.exp(sinks[:, None] - lse)
        torch.testing.assert_close(total, 1 - torch.as_tensor(lost).expand_as(total).double())


def test_p_times_v_is_attention():
    problem = make(2, 9, 12, 4, 2, 8).to(torch.float64)
    q, k, v = problem.tensors
    out, lse = attention_with_lse(q, k, v, mask=CAUSAL)
    p = attention_weights(q, k, lse, mask=CAUSAL, over="none", rows=torch.arange(9))
    torch.testing.assert_close(torch.einsum("bhst,bthe->bshe", p, v.repeat_interleave(2, 2)), out)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_what_nobody_sees_is_never_read(backend):
    """Keys outside the bounds, and queries whose band is empty, may be NaN."""
    q, k = torch.randn(2, 9, 4, 8, dtype=torch.float64), torch.randn(2, 7, 2, 8, dtype=torch.float64)
    options = {
        "mask": CAUSAL,
        "key_starts": torch.tensor([1, 0]).int(),
        "key_ends": torch.tensor([7, 5]).int(),
    }
    lse, asked = attention_with_lse(q, k, k, **options)[1], drawn(2, 9, 7)
    wanted = oracle(q, k, lse, asked, **options)
    q[:, :2] = k[0, 0] = k[1, 5:] = torch.nan
    assert_forms(forms(q, k, lse, asked, backend=backend, **options), wanted)


def test_any_lse_is_taken_and_inf_gives_no_probability():
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 2, 8)
    lse = torch.randn(1, 2, 3).index_fill(2, torch.tensor([1]), -torch.inf)
    p = attention_weights(q, k, lse, mask=FULL, over="none", rows=torch.arange(3))
    torch.testing.assert_close(p, probabilities(all_scores(q, k, mask=FULL), lse))
    assert not p[:, :, 1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_fp32_and_wide(dtype):
    q, k = (torch.randn(1, 5, 2, 8).to(dtype) for _ in range(2))
    lse, wide = attention_with_lse(q, k, k, mask=CAUSAL)[1], torch.promote_types(dtype, torch.float32)
    found = forms(q, k, lse, drawn(1, 5, 5), mask=CAUSAL)
    assert {x.dtype for x in found.values()} == {wide}
    for name, x in oracle(q, k, lse, drawn(1, 5, 5), mask=CAUSAL).items():
        if name not in ("heads", "none by sequence", "some by sequence"):  # which are drawn anew
            torch.testing.assert_close(found[name].double(), x, rtol=1e-4, atol=1e-5)


def test_there_is_no_gradient():
    q, k = torch.randn(1, 5, 2, 8, requires_grad=True), torch.randn(1, 5, 2, 8, requires_grad=True)
    _, lse = attention_with_lse(q, k, k, mask=CAUSAL)
    found = forms(q, k, lse, drawn(1, 5, 5), mask=CAUSAL)
    assert not any(x.requires_grad for x in found.values())
    assert found.keys() >= {*WHOLE}


def test_forward_mode_is_refused():
    q, k, lse = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8), torch.zeros(1, 2, 5)
    with forward_ad.dual_level():
        assert attention_weights(q, k, lse, mask=CAUSAL, over="queries").shape == (1, 2, 5)
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="q: expected no forward-mode derivative"):
            attention_weights(dual, k, lse, mask=CAUSAL, over="queries")


def test_vmap():
    q, k, lse = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 2, 8), torch.randn(3, 2, 4, 5)

    def mass(q, k, lse):
        return attention_weights(q, k, lse, mask=CAUSAL, over="queries")

    found = torch.func.vmap(mass, in_dims=(0, 0, 0))(q, k, lse)
    torch.testing.assert_close(found, torch.stack([mass(*x) for x in zip(q, k, lse, strict=True)]))


def test_strides_do_not_matter():
    q, k = torch.randn(2, 4, 9, 16)[..., ::2].transpose(1, 2), torch.randn(2, 2, 7, 8).transpose(1, 2)
    lse = attention_with_lse(q, k, k, mask=CAUSAL)[1].transpose(0, 1).contiguous().transpose(0, 1)
    asked = drawn(2, 9, 7)
    asked = {name: torch.stack((x, x), -1)[..., 0] for name, x in asked.items()}
    wanted = forms(q.contiguous(), k.contiguous(), lse.contiguous(), asked, mask=CAUSAL)
    assert_forms(forms(q, k, lse, asked, mask=CAUSAL), wanted)


def test_autocast_computes_in_its_dtype():
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = attention_with_lse(q, k, k, mask=CAUSAL)
        mass = attention_weights(q, k, lse, mask=CAUSAL, over="queries")
    wanted = attention_weights(q.bfloat16(), k.bfloat16(), lse, mask=CAUSAL, over="queries")
    assert torch.equal(mass, wanted)


@pytest.mark.parametrize("over", ["none", "queries", "heads"])
def test_torch_compile(over):
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8)
    lse, asked = attention_with_lse(q, k, k, mask=CAUSAL)[1], drawn(2, 9, 9)
    more = {"none": {"rows": asked["rows"]}, "queries": {}, "heads": {"at": asked["at"]}}[over]

    def run(q, k, lse):
        return attention_weights(q, k, lse, mask=CAUSAL, over=over, **more), attention_maxima(
            q, k, mask=CAUSAL
        )

    for ours, theirs in zip(
        torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, lse), run(q, k, lse), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_flops_are_those_of_one_product():
    q, k, lse = torch.randn(2, 9, 4, 8), torch.randn(2, 7, 2, 8), torch.zeros(2, 4, 9)
    at = torch.zeros(2, 9, 3).int()
    for more, pairs in (
        ({"over": "queries"}, 2 * 9 * 7),
        ({"over": "queries", "rows": torch.arange(5)}, 2 * 5 * 7),
        ({"over": "none", "rows": torch.zeros(2, 5).int()}, 2 * 5 * 7),
        ({"over": "heads", "at": at}, 2 * 9 * 3),
    ):
        with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
            attention_weights(q, k, lse, mask=CAUSAL, **more)
        assert counter.get_total_flops() == 2 * 4 * 8 * pairs


def test_explain():
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8)
    told = str(explain(attention_maxima, q, k, mask=CAUSAL))
    assert "statistic  maxima" in told
    assert "runs on: torch" in told
    told = explain(attention_weights, q, k, torch.zeros(2, 4, 9), mask=CAUSAL, over="queries")
    assert told.spec.statistic == "mass"


CALL = {
    "q": torch.zeros(2, 3, 4, 8),
    "k": torch.zeros(2, 5, 2, 8),
    "lse": torch.zeros(2, 4, 3),
    "mask": CAUSAL,
}
ROWS = torch.arange(3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"over": "keys"}, ValueError, "over: expected 'none', 'queries', 'heads', got 'keys'"),
        ({"over": "none"}, ValueError, "rows: expected the numbers of queries"),
        ({"over": "heads"}, ValueError, r"at: expected the numbers of keys \[b, s, n\]"),
        (
            {"over": "heads", "rows": ROWS, "at": torch.zeros(2, 3, 1).int()},
            ValueError,
            "rows: expected None",
        ),
        ({"over": "queries", "at": torch.zeros(2, 3, 1).int()}, ValueError, "at: expected None"),
        ({"over": "none", "rows": ROWS.float()}, TypeError, "rows: expected torch.int32 or torch.int64"),
        ({"over": "none", "rows": torch.zeros(3, 2).int()}, ValueError, r"rows: expected \[b=2, r\]"),
        ({"over": "heads", "at": torch.zeros(2, 4, 1).int()}, ValueError, r"at: expected \[b=2, s=3, n\]"),
        ({"over": "queries", "lse": torch.zeros(2, 3, 4)}, ValueError, r"lse: expected \[b=2, h=4, s=3\]"),
        ({"over": "queries", "lse": torch.zeros(2, 4, 3).half()}, TypeError, "lse: expected torch.float32"),
        ({"over": "queries", "lse": None}, TypeError, "lse: expected a tensor"),
        ({"over": "queries", "k": None}, TypeError, "k: expected a tensor"),
        (
            {"over": "queries", "cu_seqlens_q": torch.zeros(1).int(), "key_ends": torch.zeros(2).int()},
            ValueError,
            "key_ends: expected None with cu_seqlens_q",
        ),
    ],
)
def test_refusals(changes, error, words):
    with pytest.raises(error, match=words):
        attention_weights(**(CALL | changes))


def test_maxima_of_what():
    with pytest.raises(ValueError, match="of: expected 'scores' or 'products', got 'queries'"):
        attention_maxima(CALL["q"], CALL["k"], mask=CAUSAL, of="queries")


@pytest.mark.parametrize(("name", "value"), [("rows", torch.tensor([3])), ("rows", torch.tensor([-2]))])
def test_checks_refuse_numbers_out_of_range(name, value, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    with pytest.raises(ValueError, match="rows: expected numbers from 0 to 2, or -1 for none"):
        attention_weights(**CALL, over="none", rows=value)
    with pytest.raises(ValueError, match="at: expected numbers from 0 to 4, or -1 for none, got 0 to 5"):
        attention_weights(**CALL, over="heads", at=torch.tensor([0, 5, 1]).expand(2, 3, 3))
