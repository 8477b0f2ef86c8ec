"""Layers in DeepSeek-V3's own form: exact where they can be, with a norm that does nothing, and what they
report.
"""

import math
from dataclasses import replace

import pytest
import torch
from convert_helpers import (
    HIDDEN,
    D,
    close,
    decoded,
    grouped,
    heads_of,
    orthogonal,
    seeds,
    state_copy,
    tokens,
    with_kv,
)
from hypothesis import given
from hypothesis import strategies as st

from attnlib import Gate, MultiHeadLatentAttention, Rope
from attnlib.convert import Calibration
from attnlib.convert.latent.attended import attended
from attnlib.convert.latent.cost import Cost
from attnlib.convert.latent.deepseek_layer import Target, gqa_to_deepseek, to_deepseek
from attnlib.convert.latent.embedding import embed
from attnlib.convert.latent.folding import even_queries, fold
from attnlib.convert.latent.narrowed import narrowed
from attnlib.convert.latent.norm import nearest_to_one
from attnlib.convert.latent.truncation import truncate

PLAIN = ["half", "interleaved", "partial", "partial-interleaved", "llama3", "yarn", "partial-yarn"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def whole(layer, rope_dim=None, **options):
    """Converted at full rank."""
    rope_dim = layer.rope.dim if rope_dim is None else rope_dim
    rank = 2 * layer.num_kv_heads * layer.head_dim - rope_dim + 1
    return gqa_to_deepseek(layer, rank, rope_dim=rope_dim, **options)


def converted(layer, **options):
    """Weights and errors."""
    options = {"rope_dim": layer.rope.dim} | options
    calibration = options.pop("calibration", None)
    with torch.no_grad():
        target = Target(**options)
        return to_deepseek(
            heads_of(layer), layer.state_dict(), target, scale=layer.scale, calibration=calibration
        )


# What is exact


@given(
    st.sampled_from(PLAIN),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("expanded", "absorbed")),
)
def test_one_kv_head_is_exact(rope, heads, bias, output_bias, form):
    layer, x = grouped((1, heads), rope=rope, bias=bias, output_bias=output_bias), tokens(2, 9)
    new = whole(layer)
    assert type(new) is MultiHeadLatentAttention
    new.form = form
    close(new(x), layer(x), within=1e-8)
    assert new.q_lora_rank == (HIDDEN + 1 if bias else None)
    assert new.rope == narrowed(layer.rope, layer.rope.dim)
    assert new.scale == (new.qk_nope_head_dim + new.qk_rope_head_dim) ** -0.5 * new.rope.latent_scale


@given(st.sampled_from(PLAIN), seeds, st.sampled_from([2, 4, 8]), st.booleans())
def test_without_distances_any_width_is_exact(rope, seed, rope_dim, bias):
    layer, x, here = grouped((4, 2), rope=rope, seed=seed, bias=bias), tokens(2, 9), torch.full((9,), 7)
    if layer.rope.dim % rope_dim:
        return
    new = whole(layer, rope_dim, calibration=Calibration.of([x]))
    torch.testing.assert_close(new(x, positions=here), layer(x, positions=here), rtol=1e-5, atol=1e-5)
    close(new(x, positions=0 * here), layer(x, positions=0 * here), within=1e-7)


@pytest.mark.parametrize("rope", PLAIN)
def test_keys_alike_over_heads_need_the_channels_of_one(rope):
    layer, x = grouped((4, 2), rope=rope), tokens(2, 9)
    heads = heads_of(layer)
    sizes = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)[:, None, None]
    layer = with_kv(
        layer, k=torch.cat((heads.k[:1, : heads.rotated] * sizes, heads.k[:, heads.rotated :]), 1)
    )
    for calibration in (None, Calibration.of([x])):
        close(whole(layer, calibration=calibration)(x), layer(x), within=1e-7)
    assert (whole(layer, 2)(x) - layer(x)).abs().max() > 1e-5


def test_a_scale_of_ones_own_goes_into_the_queries():
    layer, x = grouped((1, 3), scale=0.7), tokens(1, 9)
    close(whole(layer)(x), layer(x), within=1e-8)


def test_what_is_never_asked_for_takes_no_room():
    layer, x = grouped((2, 1)), tokens(1, 9)
    with torch.no_grad():
        layer.q_proj.weight.view(2, D, HIDDEN)[1] = 0
    torch.testing.assert_close(whole(layer)(x), layer(x), rtol=1e-4, atol=1e-4)


# The norm of the latent


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_the_norm_is_the_identity_up_to_rounding(dtype, size):
    layer = grouped((1, 2), bias=True)
    with torch.no_grad():
        layer.v_proj.weight.mul_(size)
        layer.v_proj.bias.mul_(size)
    x = tokens(64)
    layer, calibration = layer.to(dtype), Calibration.of([x])
    new = gqa_to_deepseek(layer, D + 1, rope_dim=D, calibration=calibration)
    assert new.kv_a_layernorm.eps == 1e-6
    raw = new.kv_a_proj_with_mqa(x.to(dtype))[:, : D + 1]
    stored = new.kv_a_layernorm(raw)
    weights = attended(heads_of(layer), calibration, scale=layer.scale).weights
    assert 0.49 < weights @ raw[:, :D].double().square().mean(1) < 2.05
    assert (stored[:, D] == 0).all()
    v_up = new.kv_b_proj.weight.double().unflatten(0, (2, -1))[0, new.qk_nope_head_dim :]
    v = x.to(dtype).double() @ layer.v_proj.weight.double().T + layer.v_proj.bias.double()
    error = (stored.double() @ v_up.T - v).square().sum() / v.square().sum()
    assert error.sqrt() < 2 * torch.finfo(dtype).eps
    # but for one factor, which kv_b_proj undoes, it rounds once more and no channel depends on another one
    ratio = stored[:, :D].double() / raw[:, :D].double()
    factor = ratio.median()
    assert 0.5 < factor < 2
    close(
        ratio,
        factor.expand_as(ratio),
        within=2 * torch.finfo(dtype).eps + (1e-3 if dtype == torch.float16 else 0),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bias_of_q_is_that_of_its_dtype(dtype):
    layer, x = grouped((1, 16), bias=True).to(dtype), tokens(64).to(dtype)
    new, exact = whole(layer), whole(layer.double())
    for inputs in (x, 0 * x[:1]):
        q = new.q_b_proj(new.q_a_layernorm(new.q_a_proj(inputs))).double()
        wanted = exact.q_b_proj(exact.q_a_layernorm(exact.q_a_proj(inputs.double())))
        assert (q - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()
    # of the bias alone, each is rounded in its own direction: all of them together are not off
    assert abs((q * wanted).sum() / wanted.square().sum() - 1) < torch.finfo(dtype).eps / 10


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_dtypes_compute_what_fp64_computes(dtype):
    layer, x = grouped((1, 4), bias=True), tokens(4, 33)
    golden = layer(x)
    layer, x = layer.to(dtype), x.to(dtype)
    error, naive = ((out.double() - golden).norm() for out in (whole(layer)(x), layer(x)))
    assert error < 2 * naive
    assert whole(layer).kv_a_proj_with_mqa.weight.dtype == dtype


def with_a_one(x):
    """The same inputs with a channel that is always 1."""
    return torch.cat((x[..., :-1], torch.ones_like(x[..., :1])), -1)


@given(st.sampled_from(PLAIN), st.integers(1, 4), seeds)
def test_a_calibrated_norm_is_exact_where_an_input_is_always_one(rope, heads, seed):
    """On any text that has it, whatever the text of the calibration."""
    layer, x = grouped((1, heads), rope=rope, seed=seed), with_a_one(tokens(2, 9, seed=seed + 1))
    new = whole(layer, norm="calibrated", calibration=Calibration.of([with_a_one(tokens(100))]))
    torch.testing.assert_close(new(x), layer(x), rtol=1e-5, atol=1e-5)
    assert not any(name.endswith("bias") for name in new.state_dict())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_calibrated_norm_is_that_of_its_dtype(dtype):
    """Small inputs, so that the channel that is 1 of them has large weights: fp16 holds them, too."""
    layer, x = grouped((1, 4)), with_a_one(tokens(4, 33)) / 64
    golden, calibration = layer(x), Calibration.of([x])
    layer, x = layer.to(dtype), x.to(dtype)
    new = whole(layer, norm="calibrated", calibration=calibration)
    assert new.kv_a_proj_with_mqa.weight.abs().max() > 2**13
    error, naive = ((out.double() - golden).norm() for out in (new(x), layer(x)))
    assert error < 3 * naive + 1e-5 * golden.norm()


def test_what_is_near_one_is_near_one_as_rounded():
    """Otherwise the best were a small difference of large channels, of which bf16 leaves nothing."""
    x = tokens(500)
    x[:, 0], x[:, 1] = 10017 * x[:, 2] + 1, 7777 * x[:, 2]
    moment = attended(heads_of(grouped()), Calibration.of([x]), scale=0.0).moment
    exact, rounded = (nearest_to_one(moment, dtype)[:-1] for dtype in (torch.float64, torch.bfloat16))
    assert (x @ exact - 1).square().mean() < 0.05
    off = [(x @ row.bfloat16().double() - 1).square().mean() for row in (exact, rounded)]
    assert off[1] < 1
    assert off[1] < off[0] / 100


def uneven(count):
    """Tokens of very different sizes, as texts have and normal distributions have not; and a channel that is
    near 1.
    """
    generator = torch.Generator().manual_seed(2)
    sizes, noise = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
    x = tokens(count) * (sizes / 2).exp()
    return torch.cat((x[:, :-1], 1 + noise / 10), -1)


def without_queries(layer):
    """Nothing is asked for: keys lose nothing, and all tokens get the same attention."""
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    return layer


def lost_values(layer, made, rank, x):
    """By hand, for each token: what outputs miss for the written layer's values, and what they have,
    ``[t]``.
    """
    state, heads = {name: value.double() for name, value in made.state.items()}, layer.num_heads
    latents = x @ state["kv_a_proj_with_mqa.weight"][:rank].T
    normed = (
        latents / (latents.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state["kv_a_layernorm.weight"]
    )
    v_up = state["kv_b_proj.weight"].unflatten(0, (heads, -1))[:, -D:]
    values = layer.v_proj(x).detach().unflatten(-1, (-1, D)).repeat_interleave(heads // layer.num_kv_heads, 1)
    o = layer.o_proj.weight.detach().unflatten(-1, (heads, D))
    missed, whole = (
        torch.einsum("mhd,thd->thm", o, error).square().sum((1, 2))
        for error in (values - torch.einsum("tr,her->the", normed, v_up), values)
    )
    return missed, whole


def test_values_are_off_by_what_is_reported():
    layer, x = without_queries(grouped((4, 2))), uneven(2000)
    made = converted(layer, rank=13, rope_dim=4, norm="calibrated", calibration=Calibration.of([x]))
    missed, sizes = lost_values(layer, made, 13, x)
    assert made.errors["value_error"] == pytest.approx(float(missed.sum() / sizes.sum()) ** 0.5, rel=1e-6)
    assert 0.05 < made.errors["norm_error"] < 0.11  # as far as the channel is from 1
    assert made.errors["key_error"] == 0


def test_inputs_of_hardly_any_mean_are_not_divided_by_nothing():
    """The latents' own size is then better than a constant, and on few inputs is nearly 0."""
    layer, x = without_queries(grouped((4, 2))), tokens(2000)
    x = x - x.mean(0) * 0.8
    made = converted(layer, rank=25, rope_dim=8, norm="calibrated", calibration=Calibration.of([x]))
    assert made.errors["norm_error"] < 0.8
    missed, sizes = lost_values(layer, made, 25, x)
    assert (missed.sum() / sizes.sum()).sqrt() < 0.8
    moment = Calibration.of([x]).moment
    ones = x @ nearest_to_one(moment, torch.float64)[:-1]
    assert (1 / ones.abs() - 1).square().mean().sqrt() > 10


def test_a_calibrated_norm_loses_little_beside_an_exact_one():
    layer, x = grouped((4, 2)), uneven(2000)
    exact, calibrated = (
        converted(layer, rank=13, rope_dim=4, norm=norm, calibration=Calibration.of([x])).errors
        for norm in ("exact", "calibrated")
    )
    for name in ("key_error", "value_error"):
        assert exact[name] < calibrated[name] < (exact[name] ** 2 + 2 * calibrated["norm_error"] ** 2) ** 0.5


def test_a_long_text_and_another_are_off_as_much():
    """A sample stands for a whole text and for what is like it, up to four standard errors of both ratios of
    means.
    """
    layer, x = without_queries(grouped((4, 2))), uneven(12_000)
    calibration = Calibration.of(x[:9000].split(1000))
    assert 2000 < len(calibration.sample) < 4096
    made = converted(layer, rank=7, rope_dim=4, norm="calibrated", calibration=calibration)
    reported = made.errors["value_error"] ** 2
    for part in (x[:9000], x[9000:]):
        missed, sizes = lost_values(layer, made, 7, part)
        spread = (missed - reported * sizes).std() / sizes.mean()
        within = 4 * spread * (1 / len(calibration.sample) + 1 / len(part)) ** 0.5
        assert within < 0.3 * reported
        assert abs(missed.sum() / sizes.sum() - reported) < within


def test_without_tokens_a_calibrated_norm_says_nothing():
    layer, x = grouped((2, 1)), tokens(50)
    bare = Calibration(50, Calibration.of([x]).moment)
    errors = converted(layer, rank=9, rope_dim=4, norm="calibrated", calibration=bare).errors
    unknown = ("key_error", "value_error", "svd_key_error", "svd_value_error", "norm_error")
    assert {name for name, error in errors.items() if math.isnan(error)} == set(unknown)
    assert not any(map(math.isnan, converted(layer, rank=9, rope_dim=4, calibration=bare).errors.values()))


# What is lost, and what is said of it


@given(st.sampled_from(PLAIN), seeds, st.booleans(), st.data())
def test_care_beats_the_plain_svd(rope, seed, bias, data):
    layer, x = grouped((4, 1), rope=rope, seed=seed, bias=bias), tokens(50, seed=seed)
    least, rope_dim = math.inf, data.draw(st.sampled_from((2, 4)))
    for rank in range(2, 8 * D - rope_dim + 2, 5):
        errors = converted(layer, rank=rank, rope_dim=rope_dim, calibration=Calibration.of([x])).errors
        care = errors["key_error"] ** 2 + errors["value_error"] ** 2
        assert care <= errors["svd_key_error"] ** 2 + errors["svd_value_error"] ** 2 + 1e-9
        assert care <= least + 1e-9
        least = care


def test_keys_and_values_weigh_by_their_whole_size():
    """No other weight of keys against values gives a smaller sum of the reported squares."""
    layer, calibration = grouped((4, 1), bias=True), Calibration.of([tokens(50)])
    heads = even_queries(heads_of(layer), calibration)
    whole, _ = fold(heads, 8, calibration, reach=2048)
    seen = attended(heads, calibration, scale=layer.scale)
    cost = Cost.of(whole, heads, calibration, seen, reach=2048)

    def loss(weight):
        cut = truncate(whole, 8, seen, replace(cost, all_keys=cost.all_keys / weight))
        parts = (cost.keys, cost.all_keys, "k_up"), (cost.values, cost.all_values, "v_up")
        rows = [getattr(whole, name) @ whole.down - getattr(cut, name) @ cut.down for *_, name in parts]
        return sum(
            seen.costs(metric, e) / all_ for (metric, all_, _), e in zip(parts, rows, strict=True)
        ).item()

    errors = converted(layer, rank=9, calibration=calibration).errors
    found = errors["key_error"] ** 2 + errors["value_error"] ** 2
    assert found == pytest.approx(loss(1.0), rel=1e-6)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert found < loss(factor)


def test_care_beats_the_plain_svd_by_far_on_correlated_inputs():
    errors = converted(grouped((4, 1)), rank=9, calibration=Calibration.of([tokens(50)])).errors
    for part in ("key_error", "value_error"):
        assert errors[part] < errors[f"svd_{part}"] / 2


def test_without_a_text_weights_weigh_too():
    """What reads keys and values is known from weights alone."""
    errors = converted(grouped((4, 1)), rank=9).errors
    squares = {
        name: errors[f"{name}key_error"] ** 2 + errors[f"{name}value_error"] ** 2 for name in ("", "svd_")
    }
    assert squares[""] < 0.95 * squares["svd_"]


@pytest.mark.parametrize("norm", ["exact", "calibrated"])
def test_reported_errors_are_those_of_the_layer(norm):
    """By the queries, keys, values and outputs of layers that were loaded."""
    layer, x = grouped((4, 2), rope="partial", bias=norm == "exact"), with_a_one(tokens(80))
    options = {"rope_dim": 4, "calibration": Calibration.of([x])}
    errors = converted(layer, rank=10, norm=norm, **options).errors
    exact, cut = whole(layer, **options), gqa_to_deepseek(layer, 10, norm=norm, **options)
    seen = attended(heads_of(layer), options["calibration"], scale=layer.scale)
    cost = Cost.of(embed(heads_of(layer)), heads_of(layer), options["calibration"], seen, reach=2048)

    def made(new):
        """Queries of what is not rotated, as scores meet them, keys and values."""
        latents = new.kv_a_layernorm(new.kv_a_proj_with_mqa(x)[:, : new.kv_lora_rank])
        n = new.qk_nope_head_dim
        q = new.q_proj(x) if new.q_lora_rank is None else new.q_b_proj(new.q_a_layernorm(new.q_a_proj(x)))
        up = new.kv_b_proj(latents).unflatten(-1, (8, -1))
        return q.unflatten(-1, (8, -1))[..., :n] * new.scale / layer.scale, *up.split((n, D), -1)

    with torch.no_grad():
        (q, keys, values), (_, cut_keys, cut_values) = made(exact), made(cut)
        scores = torch.einsum("shn,thn->hst", q, keys - cut_keys).square().mean(1).sum(0)
        outputs = torch.einsum("the,mhe->thm", values - cut_values, heads_of(layer).o).square().sum((1, 2))
    for name, lost, size in (("key_error", scores, cost.all_keys), ("value_error", outputs, cost.all_values)):
        close(torch.tensor(errors[name] ** 2).double(), (lost * seen.weights).sum() / size, within=1e-6)


@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 1e-8), (torch.bfloat16, 5e-4), (torch.float16, 5e-5)]
)
def test_rounding_is_reported(dtype, least):
    errors = converted(grouped((1, 2), bias=True).to(dtype), rank=D + 1).errors
    assert least < errors.pop("rounding") < torch.finfo(dtype).eps
    assert max(errors.values()) < 1e-7


def test_more_rotary_channels_lose_less():
    layer, x = grouped((4, 1)), tokens(50)
    lost = [
        converted(layer, rank=9, rope_dim=p, calibration=Calibration.of([x])).errors["rope_error"]
        for p in (2, 4, 8)
    ]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] > 0


# The layer that comes out


def test_a_converted_layer_decodes_trains_and_loads_into_one_made_by_hand():
    layer, x = grouped((4, 2), bias=True), tokens(2, 9)
    before = state_copy(layer)
    new = gqa_to_deepseek(layer, 12, rope_dim=4, calibration=Calibration.of([x]))
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    assert new.kv_layout.token_bytes == (12 + 4) * 8
    sizes = {"q_lora_rank": HIDDEN + 1, "kv_lora_rank": 12, "qk_nope_head_dim": D, "qk_rope_head_dim": 4}
    options = {"mask": layer.mask, "rope": Rope(4, interleaved=True), "bias": True, "dtype": torch.float64}
    made = MultiHeadLatentAttention(HIDDEN, 8, v_head_dim=D, **sizes, **options)
    made.load_state_dict(new.state_dict())
    assert torch.equal(made(x), new(x))
    close(decoded(new, x), new(x), within=1e-9)
    new(x).square().mean().backward()
    for name, parameter in new.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("norm", ["exact", "calibrated"])
def test_training_keeps_what_the_norm_is(norm):
    """Some steps of Adam towards the source: the loss falls, and the exact norm is as exact as before."""
    layer, x = grouped((4, 2), dtype=torch.float32), tokens(4, 9).float()
    target = layer(x).detach()
    new = gqa_to_deepseek(layer, 8, rope_dim=4, norm=norm, calibration=Calibration.of([x]))
    optimiser, losses = torch.optim.Adam(new.parameters(), 1e-3), []
    for _ in range(30):
        optimiser.zero_grad()
        losses.append((new(x) - target).square().mean())
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.75 * losses[0]
    if norm == "exact":
        raw = new.kv_a_proj_with_mqa(x)[..., :8]
        ratio = new.kv_a_layernorm(raw)[..., :7] / raw[..., :7]
        assert ratio.max() / ratio.min() < 1 + 1e-5


# Refusals


@pytest.mark.parametrize("extra", [{"qk_norm": True}, {"sinks": True}, {"softcap": 3.0}, {"alibi": True}])
def test_what_a_latent_layer_has_not_is_refused(extra):
    with pytest.raises(NotImplementedError, match="which latent layers do not support"):
        gqa_to_deepseek(grouped(**extra), 9, rope_dim=D)


def test_a_gate_is_refused():
    with pytest.raises(NotImplementedError, match=r"gate: expected None, as in DeepSeek.* use gqa_to_mla"):
        gqa_to_deepseek(grouped(gate=Gate("head")), 9, rope_dim=D)


@pytest.mark.parametrize(
    ("rope", "options", "error", "message"),
    [
        ("none", {}, NotImplementedError, "rope: expected a rope, as in DeepSeek, got none"),
        ("half", {"rope_dim": 6}, ValueError, "rope_dim: expected an even divisor of 8, .* got 6"),
        ("half", {"rank": 25 + 1}, ValueError, "rank: expected at most 25, .* got 26"),
        ("half", {"rank": 25 + 1, "norm": "calibrated"}, ValueError, "rank: expected at most 25, .* got 26"),
        (
            "half",
            {"norm": "calibrated"},
            ValueError,
            'norm: "calibrated" needs a calibration on text, got weights',
        ),
        (
            "half",
            {"norm": "calibrated", "calibration": Calibration.white(HIDDEN)},
            ValueError,
            'norm: "calibrated" needs a calibration on text, got weights alone; use norm="exact"',
        ),
        ("half", {"rank": 1}, ValueError, "rank: expected at least 2, got 1"),
        ("half", {"reach": 0}, ValueError, "reach: expected at least 1, got 0"),
        ("half", {"norm": "none"}, ValueError, "norm: expected one of .* got 'none'"),
        ("half", {"rank": 9.0}, TypeError, "rank: expected an int, got 9.0"),
        (
            "half",
            {"calibration": Calibration.white(3)},
            ValueError,
            "calibration: expected inputs of width 20",
        ),
    ],
)
def test_what_cannot_be_is_refused(rope, options, error, message):
    layer = grouped((2, 1), rope=rope)
    with pytest.raises(error, match=message):
        gqa_to_deepseek(layer, **({"rank": 9, "rope_dim": D} | options))


def test_a_calibrated_norm_has_no_place_for_biases():
    layer = grouped((2, 1), bias=True)
    with pytest.raises(
        NotImplementedError, match=r'k_proj\.bias, o_proj\.bias, q_proj\.bias.*: norm="calibrated"'
    ):
        gqa_to_deepseek(layer, 9, rope_dim=D, norm="calibrated")
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer, name).bias.zero_()
    new = gqa_to_deepseek(layer, 9, rope_dim=D, norm="calibrated", calibration=Calibration.of([tokens(30)]))
    assert new.q_lora_rank is None


def test_inputs_without_a_mean_make_no_constant():
    x = tokens(30)
    calibration = Calibration.of([torch.cat((x, -x))])
    with pytest.raises(
        ValueError, match='norm: "calibrated" needs a calibration on text, got inputs of mean 0'
    ):
        gqa_to_deepseek(grouped((2, 1)), 9, rope_dim=D, norm="calibrated", calibration=calibration)


def test_weights_of_eight_bits_are_refused():
    state = {name: value.to(torch.float8_e4m3fn) for name, value in grouped((2, 1)).state_dict().items()}
    with pytest.raises(TypeError, match=r"q_proj\.weight: expected fp16, bf16, fp32 or fp64"):
        to_deepseek(heads_of(grouped((2, 1))), state, Target(rank=9, rope_dim=D), scale=1.0, calibration=None)


def test_turning_the_values_of_all_heads_changes_nothing():
    """The latent has no preferred coordinates: an orthogonal map of V with its inverse in o is the same
    layer.
    """
    layer, x = grouped((2, 1)), tokens(1, 30)
    turned, turn = grouped((2, 1)), orthogonal(D)
    with torch.no_grad():
        turned.v_proj.weight.copy_(
            torch.einsum("de,gem->gdm", turn, layer.v_proj.weight.view(2, D, -1)).flatten(0, 1)
        )
        turned.o_proj.weight.copy_((layer.o_proj.weight.view(HIDDEN, 2, D) @ turn.T).flatten(1))
    close(turned(x), layer(x))
    options = {"rope_dim": 4, "calibration": Calibration.of([x])}
    close(gqa_to_deepseek(turned, 7, **options)(x), gqa_to_deepseek(layer, 7, **options)(x), within=1e-6)
