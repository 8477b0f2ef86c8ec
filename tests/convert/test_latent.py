"""Grouped-query attention as latent attention: exactly, with fewer rotary channels, with a smaller latent."""

import copy
from dataclasses import replace

import pytest
import torch
from convert_helpers import (
    HIDDEN,
    ROPES,
    D,
    close,
    decoded,
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
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib import (
    CAUSAL,
    FULL,
    Axes,
    Gate,
    GroupedQueryAttention,
    KVCache,
    MultiHeadLatentAttention,
    Rope,
    rotate,
    sliding,
)
from attnlib.convert import Calibration, gqa_to_mla
from attnlib.convert.heads.align import rotate_keys
from attnlib.convert.latent.attended import Attended, attended
from attnlib.convert.latent.cost import Cost
from attnlib.convert.latent.embedding import concentrate, embed
from attnlib.convert.latent.folding import even_queries
from attnlib.convert.latent.layers import identity_eps, join
from attnlib.convert.latent.truncation import truncate
from attnlib.rope.scaling import DynamicNTKScaling
from attnlib.rope.selected import select

ROTARY = [name for name, rope in ROPES.items() if rope is not None]


def activations(latent, y):
    """K that is not rotated and V ``[t, h, ...]`` of inputs y ``[t, m + 1]``."""
    stored = y @ latent.down.T
    return torch.einsum("tr,hnr->thn", stored, latent.k_up), torch.einsum("tr,her->the", stored, latent.v_up)


def seen_and_cost(heads, calibration, latent):
    seen = attended(heads, calibration, scale=D**-0.5)
    return seen, Cost.of(latent, heads, calibration, seen, reach=64)


def plainly(heads, latent, rank):
    """Cut by the SVD of the weights alone."""
    white = Attended.white(HIDDEN + 1, heads.k.device)
    return truncate(latent, rank, white, Cost.plain(latent, heads, white))


def weighed(latent, cost, seen):
    """What scores and outputs have of K that is not rotated and of V, each relative to all of it: ``[t,
    channels]``.
    """
    group, rows = len(latent.k_up) // len(cost.keys), []
    parts = zip((cost.keys, cost.values), (cost.all_keys, cost.all_values), strict=True)
    for (metric, whole), part in zip(parts, activations(latent, seen.inputs), strict=True):
        values, vectors = torch.linalg.eigh(metric)
        root = vectors * values.clamp(min=0).sqrt()[:, None]
        made = torch.einsum("tgi,gij->tgj", part[:, ::group], root) * seen.weights.sqrt()[:, None, None]
        rows.append(made.flatten(1) / (whole.sqrt() if whole else 1))
    return torch.cat(rows, 1)


def with_one(x):
    return torch.cat((x, x.new_ones(*x.shape[:-1], 1)), -1)


# The exact embedding


@given(kinds, seeds, st.sampled_from(("expanded", "absorbed", "auto")))
def test_the_embedding_is_the_same_function_in_either_form(kind, seed, form):
    gate = (None, Gate("head"), Gate("channel", "softplus", bias=True))[seed % 3]
    layer, x = grouped(**kind, gate=gate, seed=seed), tokens(2, 9)
    new = gqa_to_mla(layer)
    assert type(new) is MultiHeadLatentAttention
    new.form = form
    close(new(x), layer(x))
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    close(new(x[0], cu_seqlens=offsets), layer(x[0], cu_seqlens=offsets))
    positions = torch.arange(9) * 7 + 1000
    close(new(x, positions=positions), layer(x, positions=positions))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_the_embedding_decodes_like_its_source(rope, paged, form):
    layer, x = grouped((4, 2), rope=rope, bias=True), tokens(2, 11)
    new = gqa_to_mla(layer)
    new.form = form
    if paged:
        cache = KVCache.paged([new.kv_layout], pages=8, page_size=4, max_sequences=2)
    else:
        cache = KVCache.contiguous([new.kv_layout], max_sequences=2, max_length=16)
    cache.admit(2)
    outs = []
    for part in x.split((5, 1, 1, 3, 1), 1):
        with torch.no_grad(), cache.step(part.shape[1]) as (kv,):
            outs.append(new(part, kv=kv))
    close(torch.cat(outs, 1), layer(x))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("size", [(4, 1), (3, 2), (1, 4)])
def test_the_embedding_stores_what_its_source_stores(rope, size):
    layer = grouped(size, rope=rope)
    new, g, rotated = gqa_to_mla(layer), size[0], 0 if ROPES[rope] is None else ROPES[rope].dim
    assert (new.kv_lora_rank, new.qk_rope_head_dim) == (g * (2 * D - rotated), g * rotated)
    assert new.kv_layout.token_bytes == layer.kv_layout.token_bytes


def test_the_embedding_reads_a_context():
    layer, x, context = grouped(rope="none", mask=FULL), tokens(2, 4), tokens(2, 6, seed=5)
    close(gqa_to_mla(layer)(x, context=context), layer(x, context=context))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_embedding_has_the_bits_of_its_source(dtype):
    layer = grouped((2, 2), rope="partial", bias=True, dtype=dtype)
    new, x = gqa_to_mla(layer), tokens(1, 9).to(dtype)
    values = new.kv_a_layernorm(new.kv_a_proj_with_mqa(x)[..., : new.kv_lora_rank])[..., -2 * D :]
    assert torch.equal(values, layer.v_proj(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_of_the_latent_is_the_identity(dtype):
    new = gqa_to_mla(grouped(dtype=dtype))
    assert new.kv_a_layernorm.eps == identity_eps(dtype)
    largest = 100.0 if dtype == torch.float16 else 2.0**16
    size = torch.logspace(-3, torch.tensor(largest).log10(), 50)[:, None]
    x = (torch.randn(50, new.kv_lora_rank) * size).clamp(-largest, largest).to(dtype)
    assert torch.equal(new.kv_a_layernorm(x), x)


# Fewer rotary channels


@given(kinds, seeds)
def test_mixing_pairs_over_heads_keeps_the_function(kind, seed):
    """All components keep their rotation, so that only the mixing is left of a concentration."""
    layer = grouped(**kind, seed=seed)
    heads, x = heads_of(layer), with_one(tokens(9))
    if not heads.rotated:
        return
    most = len(heads.k) * heads.rotated
    mixed, plain = concentrate(heads, most, Calibration.of([tokens(30)]), reach=99)[0], embed(heads)
    assert len(heads.k) == 1 or far(mixed.k_rope, plain.k_rope)
    close(*(scores(latent, x, latent.rope.angles(torch.arange(9))) for latent in (mixed, plain)))
    close(mixed.v_up @ mixed.down, plain.v_up @ plain.down)


def scores(latent, y, angles):
    """``[h, s, t]`` of inputs y as queries and keys."""
    q = torch.einsum("tm,hpm->thp", y, latent.q_rope)
    k = (y @ latent.k_rope.T)[:, None]
    rotated = torch.einsum("shp,tkp->hst", rotate(q, angles), rotate(k, angles))
    k_nope, _ = activations(latent, y)
    return rotated + torch.einsum("shn,thn->hst", torch.einsum("tm,hnm->thn", y, latent.q_nope), k_nope)


@given(kinds, seeds, st.data())
def test_without_distances_any_concentration_is_exact(kind, seed, data):
    """At one position nothing turns, and that a channel is not rotated makes no difference."""
    layer, x, here = grouped(**kind, seed=seed), tokens(2, 9), torch.full((9,), 7)
    if layer.rope is None:
        return
    pairs = data.draw(st.integers(1, layer.num_kv_heads * layer.rope.dim // 2))
    new = gqa_to_mla(layer, rope_dim=2 * pairs, calibration=Calibration.of([x]))
    assert new.kv_lora_rank + new.qk_rope_head_dim == 2 * layer.num_kv_heads * D
    assert new.qk_rope_head_dim == new.rope.dim == 2 * pairs
    # The angles' cosine and sine are fp32, so that even a shared turn changes a score in the eighth digit.
    torch.testing.assert_close(new(x, positions=here), layer(x, positions=here), rtol=1e-5, atol=1e-6)
    close(new(x, positions=0 * here), layer(x, positions=0 * here))


@pytest.mark.parametrize("rope", ROTARY)
def test_keys_alike_over_heads_need_the_channels_of_one(rope):
    """Heads whose pairs are complex multiples of each other have one component a pair: all the rotation fits
    in it.
    """
    layer, x = grouped((4, 2), rope=rope), tokens(2, 9)
    heads = heads_of(layer)
    sizes = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)[:, None, None]
    layer = with_kv(
        layer, k=torch.cat((heads.k[:1, : heads.rotated] * sizes, heads.k[:, heads.rotated :]), 1)
    )
    turns = phases(4, heads.rotated // 2), orthogonal(4, D - heads.rotated)
    layer = with_heads(layer, rotate_keys(heads_of(layer), *turns))
    for calibration in (None, Calibration.of([x])):
        close(gqa_to_mla(layer, rope_dim=layer.rope.dim, calibration=calibration)(x), layer(x), within=1e-9)
    assert (gqa_to_mla(layer, rope_dim=layer.rope.dim - 2)(x) - layer(x)).abs().max() > 1e-5


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_that_hardly_turn_are_the_first_to_stay_still(interleaved):
    """With a theta this large only pair 0 turns within reach: its components take the rotary channels."""
    layer, x = grouped((4, 1)), tokens(1, 9)
    layer.rope = Rope(D, theta=1e30, interleaved=interleaved)
    with torch.no_grad():
        layer.k_proj.weight.view(4, D, HIDDEN)[:, 2:4].mul_(30)  # large keys, which would win by size alone
    new = gqa_to_mla(layer, rope_dim=8, calibration=Calibration.of([x]), reach=64)
    assert new.rope.pairs == (0, 0, 0, 0)
    torch.testing.assert_close(new(x), layer(x), rtol=1e-4, atol=1e-4)
    assert set(gqa_to_mla(layer, rope_dim=8, reach=2**30, calibration=Calibration.of([x])).rope.pairs) != {0}


def test_what_queries_never_ask_for_is_not_kept():
    layer = grouped((2, 1), rope="half")
    with torch.no_grad():
        layer.q_proj.weight.view(2, 2, D // 2, HIDDEN)[:, :, 1:] = 0  # all pairs but the first
    assert gqa_to_mla(layer, rope_dim=4).rope.pairs == (0, 0)


# A smaller latent


@given(kinds, seeds)
def test_no_other_latent_of_its_rank_loses_as_little(kind, seed):
    """Neither plain SVD nor one of lower rank, in what scores and outputs miss."""
    heads, x = heads_of(grouped(**kind, seed=seed)), tokens(50, seed=seed)
    exact = embed(heads)
    seen, cost = seen_and_cost(heads, Calibration.of([x]), exact)

    def loss(latent):
        return (weighed(exact, cost, seen) - weighed(latent, cost, seen)).square().sum().item()

    least = float("inf")
    for rank in range(1, len(exact.down) + 1):
        best = loss(truncate(exact, rank, seen, cost))
        assert best <= loss(plainly(heads, exact, rank)) + 1e-5
        assert best <= least + 1e-5
        least = best
    assert least <= 1e-9


def test_a_truncation_is_the_best_of_its_rank():
    """Eckart and Young: the squares of the singular values that were left out of what is read."""
    heads, x = heads_of(grouped((4, 2), rope="partial", bias=True)), tokens(50)
    exact = embed(heads)
    seen, cost = seen_and_cost(heads, Calibration.of([x]), exact)
    whole = weighed(exact, cost, seen)
    for rank in (1, 5, 13):
        lost = (whole - weighed(truncate(exact, rank, seen, cost), cost, seen)).square().sum()
        close(lost, torch.linalg.svdvals(whole)[rank:].square().sum(), within=1e-6)


def test_plain_truncation_is_the_svd_of_the_weights():
    heads = heads_of(grouped((2, 1), rope="half"))
    exact, cut = embed(heads), plainly(heads, embed(heads), 3)
    u, s, vh = torch.linalg.svd(heads.v.flatten(0, 1))
    close((cut.v_up @ cut.down).flatten(0, 1), (u[:, :3] * s[:3]) @ vh[:3])
    assert torch.equal(cut.k_rope, exact.k_rope)


@pytest.mark.parametrize("rope", ["none", "partial", "partial-yarn"])
def test_channels_may_have_any_size(rope):
    """A channel of keys or values times a number, and what reads it divided by it, is the same layer, and is
    cut so.
    """
    layer, other, x = grouped((2, 2), rope=rope), grouped((2, 2), rope=rope), tokens(2, 30)
    heads, size = heads_of(layer), torch.logspace(-1, 1, D, dtype=torch.float64)
    free = torch.where(torch.arange(D) < heads.rotated, 1.0, size)
    scaled = {"q": heads.q / free[:, None], "k": heads.k * free[:, None], "v": heads.v * size[:, None]}
    other = with_heads(other, replace(heads, o=heads.o / size, **scaled))
    close(other(x), layer(x))
    ours, theirs = (
        gqa_to_mla(old, 5, rope_dim=None, calibration=Calibration.of([x])) for old in (layer, other)
    )
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-3, atol=1e-3 * ours(x).abs().max().item())
    assert far(ours(x), layer(x))


@given(kinds, seeds, st.integers(1, 10))
def test_inputs_of_low_rank_need_no_more(kind, seed, used):
    layer = grouped(**kind, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(used, HIDDEN, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 30, used, generator=generator, dtype=torch.float64) @ basis
    new = gqa_to_mla(layer, min(used + 1, gqa_to_mla(layer).kv_lora_rank), calibration=Calibration.of([x]))
    close(new(x), layer(x), within=1e-7)
    assert new.kv_layout.token_bytes <= 8 * (used + 1 + new.qk_rope_head_dim)


@given(kinds, seeds)
def test_the_full_rank_is_exact(kind, seed):
    heads, calibration = heads_of(grouped(**kind, seed=seed)), Calibration.of([tokens(40)])
    exact = embed(heads)
    same = truncate(exact, len(exact.down), *seen_and_cost(heads, calibration, exact))
    close(same.k_up @ same.down, exact.k_up @ exact.down, within=1e-8)
    close(same.v_up @ same.down, exact.v_up @ exact.down, within=1e-8)


def test_keys_that_nothing_asks_for_take_no_room():
    layer, x = grouped((2, 1), rope="none"), tokens(1, 30)
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    close(gqa_to_mla(layer, 2 * D, calibration=Calibration.of([x]))(x), layer(x), within=1e-6)


def test_values_that_no_output_reads_take_no_room():
    layer, x = grouped((2, 1), rope="none"), tokens(1, 30)
    with torch.no_grad():
        layer.o_proj.weight.view(HIDDEN, 2, D)[:, 1] = 0
    close(gqa_to_mla(layer, 3 * D, calibration=Calibration.of([x]))(x), layer(x), within=1e-6)


@pytest.mark.parametrize("name", ["k", "v"])
def test_silent_heads_are_cut_like_any(name):
    layer, x = grouped((2, 2), rope="none"), tokens(1, 9)
    silent = with_kv(layer, **{name: torch.zeros_like(heads_of(layer).v)})
    close(gqa_to_mla(silent, 2 * D)(x), silent(x))


@given(kinds, seeds, st.data())
def test_the_result_does_not_depend_on_the_order_of_groups(kind, seed, data):
    layer, x = grouped(**kind, seed=seed), tokens(2, 30)
    order = data.draw(st.permutations(range(layer.num_kv_heads)))
    options = {"rope_dim": None if layer.rope is None else 2, "calibration": Calibration.of([x])}
    rank = data.draw(st.integers(1, 6))
    ours = gqa_to_mla(layer, rank, **options)
    theirs = gqa_to_mla(permuted(copy.deepcopy(layer), order), rank, **options)
    close(theirs(x), ours(x), within=1e-6)  # eigenvectors of close eigenvalues keep half of the digits
    close(gqa_to_mla(permuted(copy.deepcopy(layer), order))(x), gqa_to_mla(layer)(x))


def test_a_converted_layer_decodes_what_it_computes_and_trains():
    layer, x = grouped((4, 2), rope="half", bias=True), tokens(2, 9)
    new = gqa_to_mla(layer, 12, rope_dim=8, calibration=Calibration.of([x]))
    assert new.kv_layout.token_bytes == (12 + 8) * 8
    close(decoded(new, x), new(x))
    new(x).square().mean().backward()
    for name, parameter in new.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# The layer that comes out


def test_options_are_kept_and_the_source_is_left_alone():
    options = {
        "mask": sliding(3),
        "scale": 0.3,
        "dropout_p": 0.25,
        "backend": "reference",
        "dtype": torch.float32,
    }
    layer = grouped((4, 2), rope="yarn", bias=True, **options).eval()
    before = state_copy(layer)
    for new in (gqa_to_mla(layer), gqa_to_mla(layer, 8, rope_dim=4)):
        for name in ("hidden_size", "num_heads", "mask", "scale", "dropout_p", "backend", "training"):
            assert getattr(new, name) == getattr(layer, name), name
        assert {value.dtype for value in new.state_dict().values()} == {torch.float32}
        assert torch.equal(new.o_proj.weight, layer.o_proj.weight)
        assert new.o_proj.weight.data_ptr() != layer.o_proj.weight.data_ptr()
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
    made = join(embed(heads_of(layer)), before)
    assert {value.data_ptr() for value in made.values()}.isdisjoint(
        value.data_ptr() for value in before.values()
    )


@pytest.mark.parametrize("output_bias", [False, True])
def test_a_state_dict_loads_into_a_layer_made_by_hand(output_bias):
    layer, x = grouped((2, 2), rope="interleaved", output_bias=output_bias), tokens(1, 5)
    new = gqa_to_mla(layer, 8, rope_dim=6)
    sizes = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": new.qk_nope_head_dim}
    sizes |= {"qk_rope_head_dim": 6, "v_head_dim": D, "rope": select(layer.rope, new.rope.pairs)}
    options = {"mask": layer.mask, "scale": layer.scale, "norm_eps": 2.0**100, "dtype": torch.float64}
    made = MultiHeadLatentAttention(HIDDEN, 4, bias=output_bias, **sizes, **options)
    made.load_state_dict(new.state_dict())
    assert torch.equal(made(x), new(x))


# Selected ropes


def test_a_selected_rope_turns_as_the_chosen_pairs():
    source = ROPES["yarn"]
    rope, positions = select(source, (2, 0, 0)), torch.tensor([0, 3, 70_000])
    ours, theirs = rope.angles(positions), source.angles(positions)
    assert torch.equal(ours.cos, theirs.cos[:, [2, 0, 0]])
    assert torch.equal(ours.sin, theirs.sin[:, [2, 0, 0]])
    assert (rope.dim, rope.interleaved, rope.amplitude, rope.latent_scale) == (
        6,
        source.interleaved,
        1.0,
        1.0,
    )
    assert source.amplitude != 1
    assert {rope: 1}[select(source, (2, 0, 0))] == 1
    assert rope != select(source, (2, 0, 1))


@pytest.mark.parametrize("order", ["blocks", "interleaved", "ladders"])
def test_pairs_keep_their_axes(order):
    """Each rotary channel of the latent layer rotates by the axis of its pair in the source."""
    rope = Rope(8, axes=Axes((2, 1, 1), order))
    layer = GroupedQueryAttention(24, 4, num_kv_heads=2, head_dim=10, mask=CAUSAL, rope=rope).double()
    x, positions = torch.randn(2, 7, 24).double(), torch.randint(0, 99, (3, 2, 7))
    latent = gqa_to_mla(layer)
    torch.testing.assert_close(latent(x, positions=positions), layer(x, positions=positions))
    torch.testing.assert_close(latent(x), layer(x))


def test_dynamic_ntk_is_scaled_for_a_length():
    rope = Rope(D, scaling=DynamicNTKScaling(2.0, 8))
    layer = grouped((2, 1))
    layer.rope = rope
    x = tokens(1, 20)
    close(gqa_to_mla(layer)(x), layer(x))
    assert gqa_to_mla(layer, rope_dim=4)(x).isfinite().all()


# Refusals


EXTRAS = {
    "q_norm and k_norm": {"qk_norm": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"alibi": True},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_a_latent_layer_has_not_is_refused(name):
    with pytest.raises(NotImplementedError, match=f"it has {name}.*, which latent layers do not support"):
        gqa_to_mla(grouped(**EXTRAS[name]))


def test_sizes_out_of_range_are_refused():
    layer = grouped((2, 1))
    for rank in (0, 17):
        with pytest.raises(
            ValueError, match=f"rank: expected 1 to 16, the rank of the whole latent, got {rank}"
        ):
            gqa_to_mla(layer, rank)
    for rope_dim in (0, 3, 18):
        with pytest.raises(
            ValueError, match=f"rope_dim: expected an even number from 2 to 16.*got {rope_dim}"
        ):
            gqa_to_mla(layer, rope_dim=rope_dim)
    with pytest.raises(ValueError, match="rope_dim: expected None or 0 for a layer without rope, got 4"):
        gqa_to_mla(grouped(rope="none"), rope_dim=4)
    with pytest.raises(ValueError, match="reach: expected at least 1, got 0"):
        gqa_to_mla(layer, rope_dim=4, reach=0)
    with pytest.raises(TypeError, match=r"rank: expected an int, got 8.0"):
        gqa_to_mla(layer, 8.0)
    with pytest.raises(ValueError, match="calibration: expected inputs of width 20"):
        gqa_to_mla(layer, calibration=Calibration.white(3))
    with pytest.raises(TypeError, match="expected a GroupedQueryAttention, got MultiHeadLatentAttention"):
        gqa_to_mla(gqa_to_mla(layer))
    assert isinstance(layer, GroupedQueryAttention)


@given(seed=seeds)
@settings(max_examples=20)
def test_what_fewer_turns_lose_falls_with_their_number(seed):
    heads, calibration = heads_of(grouped((3, 2), seed=seed)), Calibration.of([tokens(40)])
    lost = [concentrate(heads, dim, calibration, reach=99)[1] for dim in range(2, 25, 2)]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] == 0
    assert 0 < lost[0] < 2
    assert concentrate(heads, 2, calibration, reach=1)[1] < lost[0]


def test_what_fewer_turns_lose_is_the_error_of_turned_keys():
    """By hand: of one head, whose pairs are all asked for alike, one pair of four goes on turning."""
    heads = heads_of(grouped((1, 1)))
    heads = even_queries(heads, calibration := Calibration.of([tokens(40)]))
    y = torch.nn.functional.pad(tokens(40), (0, 1), value=1.0)
    keys = torch.einsum("cm,tm->tc", heads.pairs(heads.k[0]), y.to(torch.complex128))
    speeds, distances = heads.rope.inverse_frequencies().double(), torch.linspace(0, 50, 20_001)
    turned = torch.polar(torch.ones(4, 1, dtype=torch.float64), speeds[:, None] * distances)
    missed = (turned - 1).abs().square().mean(1) * keys.abs().square().mean(0)
    least = (missed.sum() - missed.max()) / keys.abs().square().mean(0).sum()
    assert concentrate(heads, 2, calibration, reach=50)[1] == pytest.approx(least.item(), rel=1e-3)
