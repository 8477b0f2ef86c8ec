"""Queries of low rank: the same at full rank, the best of their rank, off by what is reported, and in both
forms.
"""

import math
from dataclasses import replace

import pytest
import torch
from convert_helpers import HIDDEN, D, close, decoded, far, grouped, heads_of, seeds, tokens
from hypothesis import given
from hypothesis import strategies as st

from attnlib import MultiHeadLatentAttention, rotate
from attnlib.convert import Calibration, gqa_to_mla
from attnlib.convert.latent.attended import attended
from attnlib.convert.latent.deepseek_layer import Target, gqa_to_deepseek, to_deepseek
from attnlib.convert.latent.norm import Constant, nearest_to_one
from attnlib.convert.latent.queries import QueryCost, low_rank, whole_queries

PLAIN = ["half", "interleaved", "partial", "partial-interleaved", "llama3", "yarn", "partial-yarn"]
REACH = 12


def full(heads):
    """The rank that all queries of so many heads can have."""
    return min(heads * D, HIDDEN)


def cost_of(layer, x, heads=None):
    heads = heads_of(layer) if heads is None else heads
    calibration = Calibration.of([x])
    return QueryCost.of(heads, calibration, attended(heads, calibration, scale=layer.scale), reach=REACH)


def with_a_one(x):
    return torch.cat((x[..., :-1], torch.ones_like(x[..., :1])), -1)


# What is exact


@given(
    st.sampled_from(PLAIN), st.integers(1, 4), st.booleans(), seeds, st.sampled_from(("expanded", "absorbed"))
)
def test_full_rank_is_exact(rope, heads, bias, seed, form):
    """Also on other text than that of the calibration, whether queries have more channels than inputs or
    fewer.
    """
    layer, x = grouped((1, heads), rope=rope, bias=bias, seed=seed), tokens(2, 9)
    rank = 2 * D - layer.rope.dim + 1
    options = {"rope_dim": layer.rope.dim, "calibration": Calibration.of([tokens(30, seed=seed + 2)])}
    new = gqa_to_deepseek(layer, rank, q_rank=full(heads) + 1, **options)
    assert new.q_lora_rank == full(heads) + 1
    new.form = form
    close(new(x), layer(x), within=1e-8)


@given(st.sampled_from(PLAIN), st.integers(1, 4), seeds)
def test_a_calibrated_norm_of_queries_is_exact_where_an_input_is_always_one(rope, heads, seed):
    layer, x = grouped((1, heads), rope=rope, seed=seed), with_a_one(tokens(2, 9, seed=seed + 1))
    options = {"rope_dim": layer.rope.dim, "calibration": Calibration.of([with_a_one(tokens(100))])}
    rank = 2 * D - layer.rope.dim + 1
    new = gqa_to_deepseek(layer, rank, q_rank=full(heads) + 1, norm="calibrated", **options)
    torch.testing.assert_close(new(x), layer(x), rtol=1e-5, atol=1e-5)
    assert not any(name.endswith("bias") for name in new.state_dict())


@given(st.sampled_from(["none", *PLAIN]), st.integers(1, 4), st.booleans(), seeds)
def test_full_rank_is_exact_in_attnlibs_own_form(rope, heads, bias, seed):
    layer, x = grouped((2, heads), rope=rope, bias=bias, seed=seed), tokens(2, 9)
    new = gqa_to_mla(layer, q_rank=full(2 * heads), calibration=Calibration.of([tokens(30, seed=seed + 2)]))
    assert new.q_lora_rank == full(2 * heads)
    close(new(x), layer(x), within=1e-8)


def test_queries_that_use_few_directions_need_no_more():
    layer, x = grouped((2, 2)), tokens(2, 9)
    with torch.no_grad():
        layer.q_proj.weight.copy_(layer.q_proj.weight[:, :3] @ layer.q_proj.weight[:3])
    close(gqa_to_mla(layer, q_rank=3)(x), layer(x), within=1e-6)
    assert far(gqa_to_mla(layer, q_rank=2)(x), layer(x))


# What is best, and what is lost


@pytest.mark.parametrize("rope", ["none", "half", "interleaved", "partial", "yarn", "partial-yarn"])
def test_an_error_costs_what_scores_miss(rope):
    """By hand: any error of the queries of a head against all keys, at all distances."""
    layer, x = grouped((2, 2), rope=rope), tokens(30)
    heads, error = heads_of(layer), torch.randn(4, D, HIDDEN + 1, dtype=torch.float64)
    cost = cost_of(layer, x)
    seen, y = attended(heads, Calibration.of([x]), scale=layer.scale), Calibration.of([x]).inputs()
    e = torch.einsum("hdm,tm->thd", error, y)
    k = torch.einsum("gdm,tm->tgd", heads.k, y).repeat_interleave(2, 1)
    lost, norm = 0.0, sum(1 / (n + 1) for n in range(REACH))
    for n in range(REACH):
        at = e
        if layer.rope is not None:
            at = rotate(e, layer.rope.angles(torch.full((30,), n)))
            gain = layer.rope.amplitude**2
            at = torch.cat((at[..., : layer.rope.dim] * gain, at[..., layer.rope.dim :]), -1)
        scores = torch.einsum("shd,thd->hst", at, k)
        lost += (scores.square().mean(1) * seen.weights).sum() / (n + 1) / norm
    torch.testing.assert_close(cost._mean(error), lost, rtol=1e-5, atol=0.0)  # angles are fp32


@given(st.sampled_from(["none", *PLAIN]), seeds, st.booleans(), st.integers(1, 15), st.booleans())
def test_what_is_missed_is_the_tail_of_the_spectrum(rope, seed, bias, rank, has_offset):
    """That of all queries of a text, as weighed by their keys, which no other queries of this rank can
    undercut.
    """
    layer, x = grouped((2, 1), rope=rope, bias=bias, seed=seed), tokens(60, seed=seed)
    cost = cost_of(layer, x)
    roots = torch.linalg.cholesky(cost.metric, upper=True)
    q = layer.q_proj(x).detach().unflatten(-1, (2, D))
    felt = torch.einsum("gij,tgj->tgi", roots, q).flatten(1)
    varying = torch.einsum("gij,tgj->tgi", roots, q - heads_of(layer).q[..., -1]).flatten(1)
    varying = varying - varying.mean(0) if has_offset else varying
    tail = torch.linalg.svdvals(varying)[rank:].square().sum() / felt.square().sum()
    assert cost.missed(low_rank(cost, rank, has_offset=has_offset)) == pytest.approx(
        tail.item() ** 0.5, rel=1e-3
    )


def test_what_is_the_same_for_all_tokens_takes_no_channel():
    layer, x = grouped((2, 2), bias=True), tokens(60) + 1
    cost = cost_of(layer, x)
    new = low_rank(cost, 1, has_offset=True)
    mean = cost.calibration.moment[-1]
    close(new.of_inputs() @ mean, heads_of(layer).q @ mean, within=1e-9)
    assert cost.missed(new) < 0.9 * cost.missed(low_rank(cost, 1, has_offset=False))


def test_the_text_decides_what_is_kept():
    layer, x = grouped((2, 2)), tokens(60)
    cost = cost_of(layer, x)
    heads = heads_of(layer)
    white = QueryCost.of(
        heads, Calibration.white(HIDDEN), attended(heads, cost.calibration, scale=1.0), reach=REACH
    )
    assert cost.missed(low_rank(cost, 3, has_offset=False)) < 0.5 * cost.missed(
        low_rank(white, 3, has_offset=False)
    )


def test_a_higher_rank_misses_less():
    cost = cost_of(grouped((2, 2)), tokens(60))
    missed = [cost.missed(low_rank(cost, rank, has_offset=True)) for rank in range(1, HIDDEN + 1)]
    assert missed == sorted(missed, reverse=True)
    assert missed[-1] == 0 < missed[-2]


@pytest.mark.parametrize("norm", ["exact", "calibrated"])
@pytest.mark.parametrize("rope", ["half", "partial"])
def test_what_is_reported_is_what_the_layers_queries_miss(norm, rope):
    """By the layers that were loaded: their queries' scores against the keys of the source."""
    layer, x = grouped((1, 4), rope=rope), tokens(60)
    calibration = Calibration.of([x])
    options = {"rank": 2 * D - layer.rope.dim + 1, "rope_dim": layer.rope.dim, "norm": norm, "reach": REACH}
    made = to_deepseek(
        heads_of(layer),
        layer.state_dict(),
        Target(q_rank=6, **options),
        scale=layer.scale,
        calibration=calibration,
    )
    options.pop("rank")
    new = gqa_to_deepseek(layer, 2 * D - layer.rope.dim + 1, q_rank=6, calibration=calibration, **options)
    heads, seen = heads_of(layer), attended(heads_of(layer), calibration, scale=layer.scale)
    exact = gqa_to_deepseek(layer, 2 * D - layer.rope.dim + 1, calibration=calibration, **options)
    cost = QueryCost.of(heads, calibration, seen, reach=REACH)
    with torch.no_grad():
        old, cut = (torch.cat(x.query(tokens(60), None), -1) for x in (exact, new))
    # queries of the new layer are maps of the old ones, which are found again by the map of all queries
    q = layer.q_proj(x).detach().unflatten(-1, (4, D))
    back = torch.stack([torch.linalg.lstsq(old[:, h], q[:, h], driver="gelsd").solution for h in range(4)])
    error = q - torch.einsum("thi,hid->thd", cut, back)
    lost = torch.einsum("thi,ij,thj->", error, cost.metric[0], error)
    size = torch.einsum("thi,ij,thj->", q, cost.metric[0], q)
    assert made.errors["query_error"] == pytest.approx((lost / size).item() ** 0.5, rel=1e-4)
    assert made.errors["query_error"] > 1e-2


def test_inputs_of_hardly_any_mean_do_not_blow_up_queries():
    """The channels' own size is then better than a constant, and on few inputs is nearly 0."""
    layer, x = grouped((2, 2)), tokens(2000)
    x = x - x.mean(0) * 0.8
    cost = cost_of(layer, x)
    queries = low_rank(cost, HIDDEN, has_offset=False).scaled(cost.calibration)
    constant = Constant.of(nearest_to_one(cost.calibration.moment, torch.float64), HIDDEN + 1, torch.float64)
    assert cost.missed(queries, cost.beside(queries, constant)) < 0.9
    assert cost.missed(queries, constant) > 10


def test_a_bias_of_attnlibs_own_form_holds_what_is_the_same_for_all_tokens():
    layer, x = grouped((2, 2), bias=True), tokens(60) + 1
    queries = low_rank(cost_of(layer, x), 2, has_offset=True)
    new = gqa_to_mla(layer, q_rank=2, calibration=Calibration.of([x]), reach=REACH)
    bias = new.q_b_proj.bias.unflatten(0, (4, -1))
    wanted = queries.rows[..., -1]
    close(bias.norm(dim=1), wanted.norm(dim=1))
    assert far(wanted, heads_of(layer).q[..., -1])


def test_without_tokens_nothing_is_said_of_a_calibrated_norm():
    layer, x = grouped((2, 1)), with_a_one(tokens(50))
    bare = Calibration(50, Calibration.of([x]).moment)
    for norm, is_known in (("exact", True), ("calibrated", False)):
        target = Target(rank=9, rope_dim=4, norm=norm, q_rank=5)
        made = to_deepseek(heads_of(layer), layer.state_dict(), target, scale=1.0, calibration=bare)
        assert math.isnan(made.errors["query_error"]) != is_known


def test_queries_that_nobody_asked_to_cut_are_no_error():
    made = to_deepseek(
        heads_of(grouped((1, 2), bias=True)),
        grouped((1, 2), bias=True).state_dict(),
        Target(rank=9, rope_dim=D),
        scale=1.0,
        calibration=None,
    )
    assert "query_error" not in made.errors
    assert len(made.state["q_a_layernorm.weight"]) == HIDDEN + 1


# Dtypes, caches, training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1 / 256, 1.0, 64.0])
def test_all_dtypes_compute_what_fp64_computes(dtype, size):
    """Whatever the size of the inputs: channels have mean squares of 1."""
    layer, x = grouped((1, 4), bias=True), tokens(4, 33) * size
    golden, calibration = layer(x), Calibration.of([x])
    layer, x = layer.to(dtype), x.to(dtype)
    new = gqa_to_deepseek(layer, D + 1, rope_dim=D, q_rank=HIDDEN + 1, calibration=calibration)
    error, naive = ((out.double() - golden).norm() for out in (new(x), layer(x)))
    assert error < 2 * naive
    channels = new.q_a_proj(x)[..., :-1].double().square().mean()
    assert 0.49 < channels < 2.05


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_attnlibs_own_form_decodes_trains_and_loads(bias):
    layer, x = grouped((4, 2), bias=bias), tokens(2, 9)
    new = gqa_to_mla(layer, 12, rope_dim=4, q_rank=5, calibration=Calibration.of([x]))
    assert {name.partition(".")[0] for name in new.state_dict()} >= {"q_a_proj", "q_a_layernorm", "q_b_proj"}
    assert ("q_b_proj.bias" in new.state_dict()) == bias
    close(decoded(new, x), new(x), within=1e-9)
    new(x).square().mean().backward()
    for name, parameter in new.named_parameters():
        assert parameter.grad.isfinite().all(), name
    if not bias:
        sizes = {
            "q_lora_rank": 5,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": D,
            "qk_rope_head_dim": 4,
            "v_head_dim": D,
        }
        options = {"mask": layer.mask, "rope": new.rope, "norm_eps": 2.0**100, "scale": new.scale}
        made = MultiHeadLatentAttention(HIDDEN, 8, dtype=torch.float64, **sizes, **options)
        made.load_state_dict(new.state_dict())
        assert torch.equal(made(x), new(x))


def test_whole_queries_are_the_queries():
    heads = heads_of(grouped((2, 2), bias=True))
    assert torch.equal(whole_queries(heads).of_inputs(), heads.q)
    scaled = whole_queries(heads).scaled(Calibration.of([tokens(30) * 100]))
    assert torch.equal(scaled.of_inputs(), heads.q)
    assert not torch.equal(scaled.down, whole_queries(heads).down)
    nothing = whole_queries(replace(heads, q=0 * heads.q)).scaled(Calibration.of([0 * tokens(30)]))
    assert nothing.down.isfinite().all()


@pytest.mark.parametrize(
    ("q_rank", "error", "message"),
    [
        (0, ValueError, "q_rank: expected at least [12], got 0"),
        (18, ValueError, "q_rank: expected at most 1[67], the rank of all queries, got 18"),
        (4.0, TypeError, "q_rank: expected an int, got 4.0"),
    ],
)
def test_what_is_no_rank_of_queries_is_refused(q_rank, error, message):
    with pytest.raises(error, match=message):
        gqa_to_mla(grouped((2, 1)), q_rank=q_rank)
    with pytest.raises(error, match=message):
        gqa_to_deepseek(grouped((2, 1)), 9, rope_dim=D, q_rank=q_rank)
