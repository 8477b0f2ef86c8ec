"""Keys over distances: averages are those of attnlib's rotation, errors are those of scores, and the search
gains.
"""

from dataclasses import replace

import pytest
import torch
from convert_helpers import ROPES, D, close, grouped, heads_of, kinds, seeds, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from attnlib import rotate
from attnlib.convert import Calibration
from attnlib.convert.heads.distances import Distances
from attnlib.convert.heads.factors import Factors
from attnlib.convert.heads.measure import relative_errors
from attnlib.convert.heads.merging import merge_heads
from attnlib.convert.heads.principal import Merged
from attnlib.convert.heads.recipe import MergeRecipe
from attnlib.convert.heads.shared_keys import commuting_maps, share_keys

TEXT = Calibration.of([tokens(200)])
TURNED = [name for name in ROPES if name != "none"]


def rotated(heads, rows, position):
    """Rows ``[n, d]`` as rope turns them at a position."""
    rope = heads.rope
    if rope is None:
        return rows
    angles = rope.angles(torch.full((len(rows),), position))
    return rotate(rows[:, None], angles)[:, 0]


def weights(reach):
    weight = 1 / torch.arange(1, reach + 1, dtype=torch.float64)
    return weight / weight.sum()


@pytest.mark.parametrize("rope", ROPES)
def test_products_are_averaged_as_rope_turns_keys_behind_their_query(rope):
    heads, reach = heads_of(grouped(rope=rope)), 6
    rows = torch.randn(30, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances, products = Distances.of(heads, reach), rows.T @ rows
    for mean, sign in ((distances.rotated, -1), (distances.rotated_back, 1)):
        turned = torch.stack([rotated(heads, rows, sign * n) for n in range(reach)])
        close(mean(products), torch.einsum("n,nti,ntj->ij", weights(reach), turned, turned), within=1e-5)


@pytest.mark.parametrize("merge", ["principal", "mean"])
@pytest.mark.parametrize("rope", ["half", "partial-interleaved", "partial-yarn"])
def test_the_error_of_keys_is_that_of_scores(merge, rope):
    """Of new queries with new keys against old ones, over all pairs of tokens at every distance."""
    heads, x, reach = heads_of(grouped((4, 2), rope=rope, bias=True)), tokens(40), 5
    recipe, y = MergeRecipe(merge, "none", "neighbours", reach), pad(x, (0, 1), value=1.0)
    merged = merge_heads(heads, 2, recipe, Calibration.of([x]))
    gain = torch.ones(D, dtype=torch.float64)
    gain[: heads.rotated] = heads.rope.amplitude**2

    def scores(q, k, position):
        queries = torch.einsum("hdm,tm->htd", q, y) * gain
        keys = torch.stack([rotated(heads, y @ one.T, position) for one in k])
        return torch.einsum("htd,hsd->hts", queries, keys.repeat_interleave(len(q) // len(k), 0))

    lost = whole = 0.0
    for n, weight in enumerate(weights(reach)):
        old, new = scores(heads.q, heads.k, -n), scores(merged.heads.q, merged.heads.k, -n)
        lost, whole = lost + weight * (old - new).square().sum(), whole + weight * old.square().sum()
    error, _ = relative_errors(heads, merged, merged.heads, Calibration.of([x]))
    assert error == pytest.approx(float((lost / whole).sqrt()), rel=1e-4)


@given(kinds, seeds, st.sampled_from([1, 20, 2048]))
def test_the_search_is_never_worse_than_maps_that_commute(kind, seed, reach):
    heads = heads_of(grouped(**kind, seed=seed))
    found = share_keys(heads, 1, TEXT, reach)
    maps = commuting_maps(heads, 1, TEXT)
    best = torch.linalg.lstsq(
        maps.flatten(0, 1), heads.k.flatten(0, 1)
    ).solution  # some shared keys of these maps
    commuting = Factors(best[None, None], maps[:, None])
    assert error_of(heads, found, reach) <= error_of(heads, commuting, reach) + 1e-3


@pytest.mark.parametrize("rope", TURNED)
def test_found_keys_and_maps_are_the_best_of_each_other(rope):
    heads, reach = heads_of(grouped(rope=rope)), 100
    found = share_keys(heads, 2, TEXT, reach)
    least, generator = error_of(heads, found, reach), torch.Generator().manual_seed(0)
    for size in (1e-2, 1e-1):
        for part in ("shared", "maps"):
            x = getattr(found, part)
            noise = size * x.std() * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            assert error_of(heads, replace(found, **{part: x + noise}), reach) > least


def test_a_short_reach_lets_pairs_mix_and_a_long_one_does_not():
    heads = heads_of(grouped((4, 1)))
    errors = []
    for reach in (1, 64, 100_000):
        merged = merge_heads(heads, 1, MergeRecipe("principal", "none", "neighbours", reach), TEXT)
        errors.append(relative_errors(heads, merged, merged.heads, TEXT)[0])
    assert errors[0] < 0.8 * errors[1] < 0.8 * errors[2] + 1e-9
    plain = replace(heads, rope=None)
    merged = merge_heads(plain, 1, MergeRecipe("principal", "none", "neighbours"), TEXT)
    assert errors[0] == pytest.approx(relative_errors(plain, merged, merged.heads, TEXT)[0], rel=1e-2)


def error_of(heads, keys, reach):
    stored = replace(heads, k=keys.shared[:, 0], v=heads.v[: len(keys.shared)])
    return relative_errors(heads, Merged(heads, reach, keys), stored, TEXT)[0]
