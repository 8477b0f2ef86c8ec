"""Fewer KV heads: what keeps the function keeps it to 1e-10, merging is what its paper says, and loses what
it must.
"""

import copy
from dataclasses import replace

import pytest
import torch
from convert_helpers import (
    HIDDEN,
    ROPES,
    D,
    close,
    far,
    grouped,
    heads_of,
    kinds,
    orthogonal,
    permuted,
    phases,
    seeds,
    state_copy,
    tokens,
    with_heads,
    with_kv,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from attnlib import CAUSAL, FULL, Gate, KVCache, MultiHeadAttention, MultiHeadLatentAttention, sliding
from attnlib.convert import Calibration, MixedLinear, fold, mha_to_gqa
from attnlib.convert.heads.align import (
    agreement,
    align,
    polar,
    rotate_keys,
    rotate_values,
    similarity,
    towards_each_other,
)
from attnlib.convert.heads.merging import arrange, merge_heads, shares
from attnlib.convert.heads.recipe import MergeRecipe
from attnlib.convert.weights import join, pairs_of, rows_of, split

ALIGNS = ("none", "values", "all")
MERGES = ("mean", "first", "energy", "learned")
EXTRAS = {"qk-norm": {"qk_norm": True}, "sinks": {"sinks": True}, "softcap": {"softcap": 3.0}}
EXTRAS["a gate"] = {"gate": Gate("head", bias=True)}


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def same_keys(layer):
    """The layer with every KV head a copy of the first."""
    heads = heads_of(layer)
    return with_kv(layer, k=heads.k[:1].expand_as(heads.k), v=heads.v[:1].expand_as(heads.v))


# What keeps the function


@given(kinds, seeds)
def test_any_turn_keeps_the_function(kind, seed):
    layer, x = grouped(**kind, seed=seed), tokens(2, 7)
    heads, out = heads_of(layer), layer(x)
    g, rotated = len(heads.k), heads.rotated
    close(with_heads(layer, rotate_values(heads, orthogonal(g, D, seed=seed)))(x), out)
    turned = rotate_keys(heads, phases(g, rotated // 2, seed=seed), orthogonal(g, D - rotated, seed=seed))
    assert rotated == 0 or far(turned.k, heads.k)
    close(with_heads(layer, turned)(x), out)


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_a_turn_in_the_other_layout_changes_the_function(rope):
    layer, x = grouped(rope=rope), tokens(1, 7)
    heads, out = heads_of(layer), layer(x)
    other = replace(heads, rope=ROPES["interleaved" if rope == "half" else "half"])
    turned = rotate_keys(other, phases(4, D // 2), orthogonal(4, 0))
    assert far(with_heads(layer, replace(turned, rope=heads.rope))(x), out)


@pytest.mark.parametrize("extra", EXTRAS)
@given(kinds, seeds, st.sampled_from(ALIGNS), st.sampled_from(("neighbours", "similar")), st.data())
def test_arranging_keeps_the_function(extra, kind, seed, what, grouping, data):
    layer, x = grouped(**kind, **EXTRAS[extra], seed=seed), tokens(2, 7)
    num_kv_heads = data.draw(st.sampled_from(divisors(kind["size"][0])))
    heads, out = heads_of(layer), layer(x)
    arranged = arrange(heads, num_kv_heads, MergeRecipe("mean", what, grouping), Calibration.of([x]))
    close(with_heads(layer, arranged)(x), out)


def test_pairs_are_those_of_rope():
    rows = torch.arange(6.0).double()[:, None]
    assert pairs_of(rows, interleaved=False)[:, 0].tolist() == [3j, 1 + 4j, 2 + 5j]
    assert pairs_of(rows, interleaved=True)[:, 0].tolist() == [1j, 2 + 3j, 4 + 5j]
    for interleaved in (False, True):
        assert torch.equal(rows_of(pairs_of(rows, interleaved=interleaved), interleaved=interleaved), rows)


@given(kinds)
def test_split_and_join_are_inverse(kind):
    layer = grouped(**kind, qk_norm=True, sinks=True)
    state = layer.state_dict()
    joined = join(split(state, head_dim=D, rope=layer.rope), state)
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], state[name]) for name in state)


# Norms between projection and rope


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
@pytest.mark.parametrize(
    ("rope", "channel", "reason"),
    [("half", 1, "within a rotated pair"), ("partial", 6, "not rotated"), ("none", 0, "not rotated")],
)
def test_gains_that_a_turn_would_not_pass_are_refused(norm, rope, channel, reason):
    layer, x = grouped(rope=rope, qk_norm=True), tokens(1, 7)
    out = layer(x)
    assert mha_to_gqa(layer, 2, align="all").num_kv_heads == 2
    with torch.no_grad():
        getattr(layer, norm).weight[channel] = 2.0
    for grouping in ("neighbours", "similar"):
        with pytest.raises(ValueError, match=rf'align: .*{reason}.*align="values"'):
            mha_to_gqa(layer, 2, align="all", grouping=grouping)
    out, heads = layer(x), heads_of(layer)
    arranged = arrange(heads, 2, MergeRecipe("mean", "values", "similar"), None)
    assert far(arranged.v, heads.v)
    close(with_heads(layer, arranged)(x), out)


@pytest.mark.parametrize("rope", ["half", "interleaved", "partial"])
def test_gains_alike_in_each_pair_pass_a_turn(rope):
    layer, x = grouped(rope=rope, qk_norm=True), tokens(1, 7)
    gains = torch.rand(D // 2, 1, dtype=torch.float64).expand(-1, 2) + 0.5
    pairs = layer.rope.dim // 2
    each = gains[:pairs].flatten() if rope == "interleaved" else gains[:pairs].T.flatten()
    with torch.no_grad():
        layer.k_norm.weight.copy_(torch.cat((each, torch.full((D - 2 * pairs,), 0.7, dtype=torch.float64))))
        layer.q_norm.weight.copy_(layer.k_norm.weight.square())
    heads, out = heads_of(layer), layer(x)
    arranged = arrange(heads, 1, MergeRecipe("mean", "all", "neighbours"), None)
    assert far(arranged.k, heads.k)
    close(with_heads(layer, arranged)(x), out)


# Alignment


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.booleans())
@example(269, 3, 3, True)  # would climb for 424 sweeps
def test_alignment_finds_rotated_copies_and_never_agrees_less(seed, f, d, paired):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if paired else torch.float64
    x = torch.randn(50, d, generator=generator, dtype=dtype)
    turns = phases(f, 1, 1, seed=seed) * torch.eye(d) if paired else orthogonal(f, d, seed=seed)
    vectors = torch.einsum("fde,te->ftd", turns, x)
    found = towards_each_other(torch.einsum("ftd,kte->fkde", vectors, vectors.conj()))
    aligned = torch.einsum("fde,fte->ftd", found, vectors)
    close(aligned, aligned[:1].expand_as(aligned), within=1e-9)

    other = torch.randn(f, 50, d, generator=generator, dtype=dtype)
    moments = torch.einsum("ftd,kte->fkde", other, other.conj())
    found = towards_each_other(moments)
    close(found @ found.mH, torch.eye(d, dtype=dtype).expand_as(found), within=1e-12)
    aligned = torch.einsum("fde,fte->ftd", found, other)
    assert aligned.sum(0).abs().square().sum() >= (1 - 1e-12) * other.sum(0).abs().square().sum()
    for i in range(1, f):  # and no head alone could do better by much
        again = found.clone()
        again[i] = polar(sum(found[j] @ moments[j, i] for j in range(f) if j != i))
        assert agreement(moments, again) <= (1 + 1e-4) * agreement(moments, found)


@pytest.mark.parametrize("seed", [57, 137, 234])
def test_a_climb_that_ends_below_its_start_is_not_taken(seed):
    """Vectors that agree already, and of which the first leads the others astray."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 6, 2, generator=generator, dtype=torch.float64)
    x += torch.randn(1, 6, 2, generator=generator, dtype=torch.float64)
    moments = torch.einsum("ftd,kte->fkde", x, x)
    untouched = torch.eye(2, dtype=torch.float64).expand(6, 2, 2)
    assert agreement(moments, towards_each_other(moments)) >= agreement(moments, untouched)


def test_where_nothing_says_how_to_turn_nothing_turns():
    """Inputs of rank 2 in 8 channels leave 6 of a turn open, and equal heads must still become one without
    loss.
    """
    layer = same_keys(grouped())
    flat = tokens(40)
    flat[:, 1:] = 0
    heads = heads_of(layer)
    turned = align(heads, 1, Calibration.of([flat]), "all")
    close(turned.v, heads.v)
    close(turned.k, heads.k)
    close(polar(torch.zeros(3, 3, dtype=torch.float64)), torch.eye(3, dtype=torch.float64))


@given(kinds, seeds, st.sampled_from(("values", "all")))
def test_similarity_does_not_see_turns_that_alignment_undoes(kind, seed, what):
    heads, calibration = heads_of(grouped(**kind, seed=seed)), Calibration.of([tokens(30)])
    g = len(heads.k)
    s = similarity(heads, calibration, what)
    close(s, s.T)
    close(s.diagonal(), torch.ones_like(s.diagonal()))
    assert (s.abs() <= 1 + 1e-12).all()
    turned = rotate_values(heads, orthogonal(g, D, seed=seed))
    if what == "all":
        turned = rotate_keys(turned, phases(g, heads.rotated // 2), orthogonal(g, D - heads.rotated))
    close(similarity(turned, calibration, what), s)
    assert (s >= similarity(heads, calibration, "none") - 1e-12).all()


def test_similarity_is_the_cosine_of_activations():
    heads, x = heads_of(grouped(rope="partial", bias=True)), tokens(30)
    y = torch.cat((x, torch.ones(30, 1, dtype=x.dtype)), -1)
    cosines = []
    for rows in (heads.k, heads.v):
        flat = torch.einsum("gdm,tm->gtd", rows, y).flatten(1)
        cosines.append(torch.nn.functional.cosine_similarity(flat[:, None], flat, dim=-1))
    close(similarity(heads, Calibration.of([x]), "none"), sum(cosines) / 2)


@pytest.mark.parametrize("rope", ROPES)
def test_alignment_brings_activations_together(rope):
    heads, x = heads_of(grouped(rope=rope)), tokens(60)
    y = torch.cat((x, torch.ones(60, 1, dtype=x.dtype)), -1)

    def spread(rows):
        activations = torch.einsum("gdm,tm->gtd", rows, y)
        return (activations - activations.mean(0)).square().sum()

    turned = align(heads, 1, Calibration.of([x]), "all")
    assert spread(turned.v) < 0.9 * spread(heads.v)
    assert spread(turned.k) < 0.9 * spread(heads.k)


# Merging


@given(kinds, seeds, st.data())
def test_the_default_is_the_mean_of_neighbours(kind, seed, data):
    """Ainslie et al., 2023, section 2.1."""
    layer = grouped(**kind, seed=seed)
    g = kind["size"][0]
    groups = data.draw(st.sampled_from(divisors(g)))
    new = mha_to_gqa(layer, groups)
    for name in ("k_proj", "v_proj"):
        for parameter in ("weight", "bias") if kind["bias"] else ("weight",):
            old = getattr(getattr(layer, name), parameter)
            pooled = old.unflatten(0, (groups, g // groups, D)).mean(1).flatten(0, 1)
            close(getattr(getattr(new, name), parameter), pooled, within=1e-13)
    for name in ("q_proj.weight", "o_proj.weight"):
        assert torch.equal(new.state_dict()[name], layer.state_dict()[name])


def test_first_keeps_the_first_head_of_each_group():
    layer = grouped((6, 1), bias=True)
    old, new = heads_of(layer), heads_of(mha_to_gqa(layer, 2, merge="first"))
    assert torch.equal(new.k, old.k[[0, 3]])
    assert torch.equal(new.v, old.v[[0, 3]])


def test_energy_weights_are_mean_squares_over_the_text():
    layer, x = grouped((6, 1), bias=True), tokens(40)
    calibration = Calibration.of([x[:9], x[9:]])
    key_mix, value_mix = shares(heads_of(layer), 2, "energy", calibration)
    for mix, project in ((key_mix, layer.k_proj), (value_mix, layer.v_proj)):
        squares = project(x).unflatten(-1, (2, 3, D)).square().sum((0, -1))
        close(mix, squares / squares.sum(1, keepdim=True))
    merged = merge_heads(heads_of(layer), 2, MergeRecipe("energy", "none", "neighbours"), calibration).heads
    close(merged.k[1], sum(key_mix[1, i] * heads_of(layer).k[3 + i] for i in range(3)))
    close(merged.v[0], sum(value_mix[0, i] * heads_of(layer).v[i] for i in range(3)))


def test_silent_heads_are_averaged():
    layer = grouped()
    silent = with_kv(layer, v=torch.zeros_like(heads_of(layer).v))
    new = mha_to_gqa(silent, 2, merge="energy", align="all", grouping="similar")
    assert new(tokens(1, 3)).isfinite().all()
    assert not new.v_proj.weight.any()


@pytest.mark.parametrize("merge", MERGES)
@given(kinds, seeds, st.sampled_from(ALIGNS), st.data())
def test_equal_heads_convert_without_loss(merge, kind, seed, what, data):
    layer, x = same_keys(grouped(**kind, sinks=True, seed=seed)), tokens(2, 9)
    groups = data.draw(st.sampled_from(divisors(kind["size"][0])))
    calibration = data.draw(st.sampled_from((None, Calibration.of([x]))))
    options = {"align": what, "grouping": data.draw(st.sampled_from(("neighbours", "similar")))}
    new = mha_to_gqa(layer, groups, merge=merge, calibration=calibration, **options)
    assert new.num_kv_heads == new.kv_layout.heads == groups
    close(new(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(6, 1), (6, 2)])
def test_the_mean_of_equal_heads_has_the_same_bits(dtype, size):
    layer = same_keys(grouped(size, bias=True, dtype=dtype))
    new = mha_to_gqa(layer, 2)
    for name in ("k_proj", "v_proj"):
        assert torch.equal(getattr(new, name).weight, getattr(layer, name).weight[: 2 * D])
        assert torch.equal(getattr(new, name).bias, getattr(layer, name).bias[: 2 * D])


@pytest.mark.parametrize("rope", ROPES)
def test_shuffled_and_turned_copies_convert_without_loss(rope):
    """Two kinds of heads, three copies of each, turned and shuffled: alignment and grouping find them
    again.
    """
    layer, x = grouped((6, 2), rope=rope, bias=True, sinks=True), tokens(2, 40)
    heads = heads_of(layer)
    layer = with_kv(layer, k=heads.k[:2].repeat_interleave(3, 0), v=heads.v[:2].repeat_interleave(3, 0))
    heads = rotate_values(heads_of(layer), orthogonal(6, D))
    heads = rotate_keys(heads, phases(6, heads.rotated // 2), orthogonal(6, D - heads.rotated))
    layer = permuted(with_heads(layer, heads), [4, 0, 2, 5, 3, 1])
    for calibration in (None, Calibration.of([x])):
        new = mha_to_gqa(layer, 2, align="all", grouping="similar", calibration=calibration)
        close(new(x), layer(x), within=1e-8)
    assert far(mha_to_gqa(layer, 2, align="all")(x), layer(x))
    assert far(mha_to_gqa(layer, 2, align="values", grouping="similar")(x), layer(x))
    assert far(mha_to_gqa(layer, 2, grouping="similar")(x), layer(x))


@given(kinds, seeds, st.sampled_from(ALIGNS), st.sampled_from(("mean", "first", "energy")), st.data())
def test_conversion_commutes_with_permuting_groups(kind, seed, what, merge, data):
    layer, x = grouped(**kind, sinks=True, seed=seed), tokens(1, 9)
    g = kind["size"][0]
    groups = data.draw(st.sampled_from(divisors(g)))
    order = data.draw(st.permutations(range(groups)))
    inner = [n * (g // groups) + i for n in order for i in range(g // groups)]
    options = {"merge": merge, "align": what, "calibration": Calibration.of([tokens(30)])}
    first = permuted(mha_to_gqa(layer, groups, **options), order)
    then = mha_to_gqa(permuted(copy.deepcopy(layer), inner), groups, **options)
    for name, value in first.state_dict().items():
        close(then.state_dict()[name], value)
    close(then(x), mha_to_gqa(layer, groups, **options)(x))


def test_grouped_sources_in_two_steps_are_one_mean():
    layer = grouped((8, 1))
    stepwise = mha_to_gqa(mha_to_gqa(layer, 4), 2)
    close(stepwise.k_proj.weight, mha_to_gqa(layer, 2).k_proj.weight, within=1e-13)


# Learnt merges


def test_a_learnt_merge_starts_as_the_mean_and_folds_exactly():
    layer, x = grouped((4, 2), bias=True, sinks=True, qk_norm=True), tokens(2, 9)
    new = mha_to_gqa(layer, 2, merge="learned")
    close(new(x), mha_to_gqa(layer, 2)(x))
    optimizer = torch.optim.SGD([p for name, p in new.named_parameters() if name.endswith("mix")], lr=0.1)
    new(x).square().mean().backward()
    optimizer.step()
    for name in ("k_proj", "v_proj"):
        assert far(getattr(new, name).mix, torch.full((2, 2), 0.5, dtype=torch.float64))
        assert all(p.grad.abs().max() > 0 for p in getattr(new, name).parameters())
    folded = fold(new)
    assert type(folded.k_proj) is type(folded.v_proj) is nn.Linear
    assert folded.state_dict().keys() == mha_to_gqa(layer, 2).state_dict().keys()
    assert far(folded(x), mha_to_gqa(layer, 2)(x))
    close(folded(x), new(x))
    assert type(new.k_proj) is MixedLinear  # folding made another layer
    with pytest.raises(TypeError, match=r"k_proj: expected a plain nn.Linear, got MixedLinear"):
        mha_to_gqa(new, 1)


def test_a_learnt_merge_decodes_through_a_cache():
    new, x = mha_to_gqa(grouped((4, 2)), 2, merge="learned"), tokens(1, 5)
    cache = KVCache.contiguous([new.kv_layout], max_sequences=1, max_length=8)
    cache.admit(1)
    out = []
    for token in x.split(1, 1):
        with torch.no_grad(), cache.step(1) as (kv,):
            out.append(new(token, kv=kv))
    close(torch.cat(out, 1), new(x))


def test_only_a_learnt_merge_folds():
    with pytest.raises(TypeError, match="expected MixedLinear k_proj"):
        fold(mha_to_gqa(grouped(), 2))


# The layer that comes out


FANCY = {
    "rope": "partial-yarn",
    "mask": sliding(3),
    "bias": True,
    "output_bias": False,
    "qk_norm": True,
    "norm_eps": 1e-3,
    "sinks": True,
    "softcap": 5.0,
    "alibi": True,
    "scale": 0.3,
    "dropout_p": 0.25,
    "backend": "reference",
    "dtype": torch.float32,
}


@pytest.mark.parametrize("options", [FANCY, {"rope": "yarn", "mask": FULL, "output_bias": True}])
def test_all_options_are_kept_and_the_source_is_left_alone(options):
    layer = grouped((4, 2), **options).eval()
    if layer.alibi_slopes is not None:
        layer.alibi_slopes.mul_(1.5)
    before = state_copy(layer)
    new = mha_to_gqa(layer, 2, merge="energy", align="all")
    names = (
        "hidden_size",
        "num_heads",
        "head_dim",
        "mask",
        "rope",
        "softcap",
        "scale",
        "q_gain",
        "dropout_p",
    )
    for name in (*names, "backend", "training"):
        assert getattr(new, name) == getattr(layer, name), name
    assert new.state_dict().keys() == before.keys()
    for name, value in new.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(layer.state_dict()[name], before[name])
        assert value.data_ptr() != layer.state_dict()[name].data_ptr()
    if layer.q_norm is not None:
        assert new.q_norm.eps == layer.q_norm.eps
        assert torch.equal(new.alibi_slopes, layer.alibi_slopes)
        assert new.alibi_slopes.data_ptr() != layer.alibi_slopes.data_ptr()


@pytest.mark.parametrize("align_what", ALIGNS)
def test_as_many_heads_as_before_is_a_copy(align_what):
    layer = grouped((4, 2), bias=True)
    new = mha_to_gqa(layer, 4, align=align_what, grouping="similar")
    for name, value in layer.state_dict().items():
        assert torch.equal(new.state_dict()[name], value)


def test_multi_head_attention_becomes_grouped():
    layer = MultiHeadAttention(HIDDEN, 4, mask=CAUSAL)
    assert mha_to_gqa(layer, 2).num_kv_heads == 2
    assert mha_to_gqa(layer, 1).kv_layout.heads == 1


# Refusals


class Adapter(nn.Linear):
    pass


CHANNEL = {"gate": Gate("channel", bias=True)}


@pytest.mark.parametrize("grouping", ["neighbours", "similar"])
def test_equal_heads_under_a_channel_gate_convert_without_loss(grouping):
    layer, x = same_keys(grouped((4, 2), **CHANNEL)), tokens(2, 7)
    close(mha_to_gqa(layer, 2, grouping=grouping, calibration=Calibration.of([x]))(x), layer(x))


@pytest.mark.parametrize("options", [{"merge": "principal"}, {"merge": "principal-values"}, {"align": "all"}])
def test_values_under_a_channel_gate_are_not_rotated(options):
    calibration = Calibration.of([tokens(2, 7)])
    mha_to_gqa(grouped((4, 2), gate=Gate("head")), 2, **options, calibration=calibration)
    with pytest.raises(ValueError, match=r"merge: .* rotates value channels, each of which has its own"):
        mha_to_gqa(grouped((4, 2), **CHANNEL), 2, **options, calibration=calibration)


def test_what_cannot_be_converted_is_refused():
    layer = grouped((4, 1))
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of the 4 KV heads, got 3"):
        mha_to_gqa(layer, 3)
    for count in (8, 0):
        with pytest.raises(ValueError, match="num_kv_heads"):
            mha_to_gqa(layer, count)
    with pytest.raises(TypeError, match="num_kv_heads: expected an int"):
        mha_to_gqa(layer, 2.0)
    for option in ("merge", "align", "grouping"):
        with pytest.raises(ValueError, match=rf"{option}: expected one of \(.*\), got 'median'"):
            mha_to_gqa(layer, 2, **{option: "median"})
    with pytest.raises(ValueError, match="calibration: expected inputs of width 20 like the layer's, got 21"):
        mha_to_gqa(layer, 2, calibration=Calibration.white(HIDDEN + 1))
    with pytest.raises(NotImplementedError, match=r'grouping: .*use "neighbours"'):
        mha_to_gqa(grouped(alibi=True), 2, grouping="similar")
    sizes = {
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 0,
        "v_head_dim": 4,
        "q_lora_rank": None,
    }
    with pytest.raises(TypeError, match="expected a GroupedQueryAttention, got MultiHeadLatentAttention"):
        mha_to_gqa(MultiHeadLatentAttention(HIDDEN, 2, mask=CAUSAL, **sizes), 2)
    with pytest.raises(NotImplementedError, match=r"layer: expected values as wide as keys, .*v_head_dim=3"):
        mha_to_gqa(MultiHeadAttention(HIDDEN, 4, v_head_dim=3, mask=CAUSAL), 2)
    layer.o_proj = Adapter(4 * D, HIDDEN)
    with pytest.raises(TypeError, match=r"o_proj: expected a plain nn.Linear, got Adapter"):
        mha_to_gqa(layer, 2)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_weights_are_refused_by_name(value):
    layer = grouped()
    layer.v_proj.weight.data[3, 2] = value
    with pytest.raises(ValueError, match=r"v_proj.weight: expected finite weights"):
        mha_to_gqa(layer, 2)


def test_weights_that_do_not_fit_are_refused():
    state = grouped((4, 2)).state_dict()
    with pytest.raises(ValueError, match=r"q_proj.weight: expected rows of heads of 7 channels"):
        split(state, head_dim=7, rope=None)
    with pytest.raises(ValueError, match=r"state: expected projections .*o_proj \(20, 63\)"):
        split(state | {"o_proj.weight": state["o_proj.weight"][:, :-1]}, head_dim=D, rope=None)
    with pytest.raises(ValueError, match="state: expected projections"):
        split(state | {"v_proj.weight": state["v_proj.weight"][:D]}, head_dim=D, rope=None)
