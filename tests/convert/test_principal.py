"""Merges by principal directions: exact where they can be, optimal elsewhere, blind to turns that change
nothing.
"""

from dataclasses import replace

import pytest
import torch
from convert_helpers import (
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
    tokens,
    with_heads,
    with_kv,
)
from hypothesis import given
from hypothesis import strategies as st

from attnlib.convert import Calibration, mha_to_gqa
from attnlib.convert.heads.align import rotate_keys, rotate_values
from attnlib.convert.heads.factors import factorise
from attnlib.convert.heads.grouping import annealed, neighbours
from attnlib.convert.heads.measure import relative_errors
from attnlib.convert.heads.merging import merge_heads, regroup
from attnlib.convert.heads.parts import keys_of, values_of
from attnlib.convert.heads.principal import group_by_loss, group_loss
from attnlib.convert.heads.recipe import MergeRecipe, recipe

TEXT = Calibration.of([tokens(200)])
MERGES = ("principal", "principal-values", "mean", "first", "energy")


def lost(heads, groups, merge, calibration=TEXT):
    merged = merge_heads(heads, groups, MergeRecipe(merge, "none", "neighbours"), calibration)
    return relative_errors(heads, merged, merged.heads, calibration)


def mapped(layer, seed=0):
    """The layer with every KV head a linear map of the first that rope passes: a number a pair, a matrix
    elsewhere.
    """
    heads, (g, rotated) = heads_of(layer), (layer.num_kv_heads, heads_of(layer).rotated)
    rows = heads.k[:1].expand_as(heads.k)
    maps = phases(g, rotated // 2, seed=seed) * (1 + torch.arange(g))[:, None]
    pairs = heads.pairs(rows) * maps[:, :, None]
    channels = torch.stack(
        (pairs.real, pairs.imag), 2 if heads.rope and heads.rope.interleaved else 1
    ).flatten(1, 2)
    free = (orthogonal(g, D - rotated, seed=seed) * 2) @ rows[:, rotated:]
    skewed = orthogonal(g, D, seed=seed) * torch.linspace(0.5, 2, D, dtype=torch.float64)
    return with_kv(layer, k=torch.cat((channels, free), 1), v=skewed @ heads.v[:1])


# What is exact


@given(kinds, seeds, st.booleans())
def test_heads_that_are_maps_of_one_convert_without_loss(kind, seed, calibrated):
    layer, x = mapped(grouped(**kind, sinks=True, seed=seed), seed), tokens(2, 9)
    new = mha_to_gqa(layer, 1, merge="principal", calibration=TEXT if calibrated else None)
    close(new(x), layer(x), within=1e-7)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("merge", ["principal", "principal-values"])
def test_equal_heads_convert_exactly_and_stay_near_themselves(rope, merge):
    layer, x = grouped((4, 2), rope=rope, bias=True, softcap=4.0), tokens(2, 9)
    heads = heads_of(layer)
    layer = with_kv(layer, k=heads.k[:2].repeat_interleave(2, 0), v=heads.v[:2].repeat_interleave(2, 0))
    new = mha_to_gqa(layer, 2, merge=merge, calibration=TEXT)
    close(new(x), layer(x))
    close(heads_of(new).v.sum(), heads_of(layer).v[::2].sum())  # in whatever order the groups are


@pytest.mark.parametrize("rope", ["half", "partial-interleaved", "none"])
def test_kinds_of_heads_are_found_wherever_they_lie(rope):
    first, other = (mapped(grouped((3, 2), rope=rope, seed=seed), seed) for seed in (1, 2))
    layer = grouped((6, 2), rope=rope)
    joined = {
        name: torch.cat((getattr(heads_of(first), name), getattr(heads_of(other), name))) for name in "kv"
    }
    layer, x = permuted(with_kv(layer, **joined), [4, 0, 2, 5, 3, 1]), tokens(2, 9)
    assert group_by_loss(heads_of(layer), 2, TEXT, keys=True) == ((0, 3, 4), (1, 2, 5))
    close(mha_to_gqa(layer, 2, calibration=TEXT)(x), layer(x), within=1e-7)
    assert far(mha_to_gqa(layer, 2, calibration=TEXT, grouping="neighbours")(x), layer(x))


def test_values_that_are_equal_stay_the_same_to_the_bit():
    layer = grouped((4, 2))
    heads = heads_of(layer)
    layer = with_kv(layer, v=heads.v[:2].repeat_interleave(2, 0))
    new = mha_to_gqa(layer, 2, grouping="neighbours", calibration=TEXT)
    assert torch.equal(heads_of(new).v, heads_of(layer).v[::2])


def test_shared_values_and_those_who_read_them_have_the_same_products():
    heads = heads_of(grouped((4, 2)))
    skewed = replace(heads, v=heads.v * torch.logspace(-2, 2, D, dtype=torch.float64)[:, None])
    for one in (heads, skewed):
        part = values_of(one)
        found = factorise(part, 2, TEXT)
        made = (found.shared @ found.shared.mH)[:, 0]
        read = (found.maps.mH @ part.weights @ found.maps).unflatten(0, (2, 2)).sum(1)[:, 0]
        # Up to the factor that gives them the size of the heads.
        close(
            made / made.norm(dim=(1, 2), keepdim=True),
            read / read.norm(dim=(1, 2), keepdim=True),
            within=1e-5,
        )


def test_heads_that_are_silent_or_unread_stay_finite():
    layer = grouped((4, 1))
    heads = heads_of(layer)
    silent = with_kv(layer, v=torch.zeros_like(heads.v), q=torch.zeros_like(heads.q))
    new = mha_to_gqa(silent, 2, calibration=TEXT)
    assert all(value.isfinite().all() for value in new.state_dict().values())
    assert not new(tokens(1, 3)).any()


# What is optimal


@given(kinds, seeds, st.data())
def test_what_is_lost_is_the_tail_of_the_spectrum(kind, seed, data):
    heads = heads_of(grouped(**kind, seed=seed))
    g = len(heads.k)
    groups = data.draw(st.sampled_from([n for n in range(1, g + 1) if g % n == 0]))
    y = torch.linalg.cholesky(TEXT.moment + 1e-12 * torch.eye(len(TEXT.moment)))
    for part in (*keys_of(heads, TEXT), values_of(heads)):
        factors = factorise(part, groups, TEXT)
        got = part.lost(factors.expanded(factors.shared), TEXT)
        n, tail = part.rows.shape[2], 0.0
        roots = torch.linalg.cholesky(part.weights).mH if n else part.weights
        stacked = (
            (roots @ part.rows @ y.to(part.rows.dtype))
            .unflatten(0, (groups, -1))
            .transpose(1, 2)
            .flatten(2, 3)
        )
        if n:
            tail = float(torch.linalg.svdvals(stacked)[..., n:].square().sum())
        assert float(got) == pytest.approx(tail, rel=1e-4, abs=1e-6 * float(part.size(TEXT)) + 1e-15)


@given(kinds, seeds, st.sampled_from(MERGES[2:]))
def test_no_merge_loses_less(kind, seed, other):
    heads = heads_of(grouped(**kind, seed=seed))
    keys, values = lost(heads, 1, "principal")
    other_keys, other_values = lost(heads, 1, other)
    assert keys <= other_keys + 1e-4
    assert values <= other_values + 1e-4
    assert lost(heads, 1, "principal-values") == pytest.approx((lost(heads, 1, "mean")[0], values), rel=1e-9)


@given(seeds)
def test_moving_the_factors_a_little_never_loses_less(seed):
    heads = heads_of(grouped((4, 2), rope="partial", seed=seed))
    generator = torch.Generator().manual_seed(seed)
    for part in (*keys_of(heads, TEXT), values_of(heads)):
        factors = factorise(part, 2, TEXT)
        least = part.lost(factors.expanded(factors.shared), TEXT)
        for size in (1e-3, 1e-1):
            noise = [
                size * torch.randn(x.shape, generator=generator, dtype=x.dtype)
                for x in (factors.shared, factors.maps)
            ]
            moved = replace(factors, shared=factors.shared + noise[0], maps=factors.maps + noise[1])
            assert part.lost(moved.expanded(moved.shared), TEXT) >= least * (1 - 1e-5)


@given(kinds, seeds)
def test_turns_that_keep_the_function_change_nothing(kind, seed):
    layer, x = grouped(**kind, seed=seed), tokens(2, 7)
    heads = heads_of(layer)
    turned = rotate_values(heads, orthogonal(len(heads.k), D, seed=seed))
    free = D - heads.rotated
    turned = rotate_keys(
        turned, phases(len(heads.k), heads.rotated // 2), orthogonal(len(heads.k), free, seed=seed)
    )
    assert lost(turned, 1, "principal") == pytest.approx(lost(heads, 1, "principal"), rel=1e-5, abs=1e-6)
    before = mha_to_gqa(layer, 1, calibration=TEXT)(x)
    close(mha_to_gqa(with_heads(layer, turned), 1, calibration=TEXT)(x), before, within=1e-4)


def test_queries_decide_which_keys_are_kept():
    """A channel that no query reads is worth nothing, however large its keys are."""
    layer = grouped((2, 1), rope="none")
    heads = heads_of(layer)
    heads.k[:, 0] *= 100
    heads.q[:, 0] = 0
    unread = replace(heads, k=heads.k.clone())
    unread.k[:, 0] = 0
    assert lost(heads, 1, "principal")[0] == pytest.approx(lost(unread, 1, "principal")[0], abs=2e-3)
    assert lost(unread, 1, "principal")[0] < 0.9 * lost(unread, 1, "mean")[0]


# Groups


@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 2)]), seeds, st.booleans())
def test_groups_are_the_same_every_time_and_never_worse_than_neighbours(size, seed, keys):
    heads = heads_of(grouped((size[0], 1), seed=seed))
    groups = group_by_loss(heads, size[1], TEXT, keys=keys)
    assert groups == group_by_loss(heads, size[1], TEXT, keys=keys)
    assert sorted(i for group in groups for i in group) == list(range(size[0]))

    loss = group_loss(heads, TEXT, keys=keys)
    assert sum(map(loss, groups)) <= sum(map(loss, neighbours(*size))) * (1 + 1e-9)
    for group in groups:  # and it is what the merge loses
        alone = [i for i in range(size[0]) if i not in group]
        own = regroup(heads, (group, *((i,) for i in alone)))
        f = len(group)
        own = replace(own, q=own.q[:f], k=own.k[:f], v=own.v[:f], o=own.o[:, :f])
        values = lost(own, 1, "principal-values")[1] ** 2 * float(
            values_of(own).size(TEXT) / values_of(heads).size(TEXT)
        )
        assert group_loss(heads, TEXT, keys=False)(group) == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_annealing_finds_what_no_exchange_of_two_finds():
    """Of heads on a line, whose groups cost what they span, exchanges from neighbours shuffled find the
    best.
    """
    place = [0, 9, 3, 12, 1, 10, 4, 13, 2, 11, 5, 14]
    found = annealed(lambda group: float(max(place[i] for i in group) - min(place[i] for i in group)), 12, 4)
    assert {tuple(sorted(place[i] for i in group)) for group in found} == {
        (0, 1, 2),
        (3, 4, 5),
        (9, 10, 11),
        (12, 13, 14),
    }
    assert annealed(lambda group: 0.0, 4, 2) == neighbours(4, 2)


# Choices


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({"calibrated": True}, ("principal", "none", "similar")),
        ({"calibrated": False}, ("mean", "none", "neighbours")),
        ({"calibrated": True, "maps_keys": False}, ("principal-values", "none", "similar")),
        ({"calibrated": True, "moves_heads": False}, ("principal", "none", "neighbours")),
        ({"calibrated": True, "align": "all"}, ("mean", "all", "neighbours")),
        ({"calibrated": True, "merge": "mean"}, ("mean", "none", "neighbours")),
    ],
)
def test_the_best_is_chosen_where_nothing_is(known, wanted):
    assert recipe(**known) == MergeRecipe(*wanted)


def test_norms_forbid_to_map_keys_and_leave_values():
    layer, x = grouped((4, 2), qk_norm=True), tokens(2, 9)
    with pytest.raises(
        ValueError, match=r'merge: "principal" maps keys.*norms of q and k.*use merge="principal-values"'
    ):
        mha_to_gqa(layer, 2, merge="principal", calibration=TEXT)
    new = mha_to_gqa(layer, 2, calibration=TEXT, grouping="neighbours")
    close(new.k_proj.weight, mha_to_gqa(layer, 2).k_proj.weight)
    close(new.q_proj.weight, layer.q_proj.weight)
    keyed = with_kv(layer, k=heads_of(layer).k[:1].expand(4, -1, -1))
    mean, principal = (mha_to_gqa(keyed, 2, merge=merge, calibration=TEXT) for merge in ("mean", None))
    assert (principal(x) - keyed(x)).norm() < 0.9 * (mean(x) - keyed(x)).norm()


def test_alibi_keeps_its_order_of_heads():
    layer = grouped((4, 2), rope="none", alibi=True)
    with pytest.raises(NotImplementedError, match="slopes depend on their order"):
        mha_to_gqa(layer, 2, merge="principal", grouping="similar")
    keyed = mapped(grouped((4, 2), rope="none", alibi=True))
    close(mha_to_gqa(keyed, 1, calibration=TEXT)(tokens(1, 6)), keyed(tokens(1, 6)), within=1e-7)


@pytest.mark.parametrize("merge", ["principal", "principal-values"])
def test_turns_before_a_principal_merge_are_refused(merge):
    with pytest.raises(ValueError, match=r'align: expected "none" .*finds every rotation itself'):
        mha_to_gqa(grouped(), 2, merge=merge, align="values", calibration=TEXT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_keep_their_dtype_and_size(dtype):
    layer = grouped((4, 2), bias=True, dtype=dtype)
    old, new = layer.state_dict(), mha_to_gqa(layer, 2, calibration=TEXT).state_dict()
    assert old.keys() == new.keys()
    for name, value in new.items():
        assert value.dtype == dtype
        assert value.abs().max() < 30 * old[name].abs().max()
