"""A mask's definition, and its ranges against brute force over the definition."""

import pytest
import torch
from helpers import masks
from hypothesis import example, given
from hypothesis import strategies as st

from attnlib import CAUSAL, FULL, Mask, sliding

small = st.integers(0, 24)


def seen(mask, first, last, total):
    """Every visible pair of queries ``[first, last)`` and keys ``[0, total)``."""
    return {(i, j) for i in range(first, last) for j in range(total) if mask.visible(i, j)}


@given(masks(12), st.integers(-12, 24), small, small)
def test_keys_equals_brute_force_over_visible(mask, first, rows, total):
    start, stop = mask.keys(first, first + rows, total)
    wanted = {j for _, j in seen(mask, first, first + rows, total)}
    assert set(range(start, stop)) == wanted
    assert wanted or (start, stop) == (0, 0)


@given(masks(12), st.integers(-12, 24), st.integers(1, 12), small, st.integers(1, 12))
def test_covers_equals_brute_force_over_visible(mask, first, rows, start, width):
    pairs = [mask.visible(i, j) for i in range(first, first + rows) for j in range(start, start + width)]
    assert mask.covers(first, first + rows, start, start + width) == all(pairs)


@given(masks(12), st.integers(-12, 24), st.integers(0, 12), small, st.integers(0, 12))
def test_queries_equals_brute_force_over_visible(mask, first, rows, start, width):
    found_first, found_last = mask.queries(first, first + rows, start, start + width)
    wanted = [i for i in range(first, first + rows) if any(mask.visible(i, start + j) for j in range(width))]
    assert list(range(found_first, found_last)) == wanted
    assert wanted or (found_first, found_last) == (0, 0)


@given(masks(12), small, st.integers(2, 12))
def test_is_causal_among_equals_brute_force_over_visible(mask, first, rows):
    indices = range(first, first + rows)
    wanted = all(mask.visible(i, j) == (j <= i) for i in indices for j in indices)
    assert mask.is_causal_among(first, first + rows) == wanted


@given(masks(12), st.integers(-12, 12), st.integers(-12, 24), small)
def test_counting_from_another_key_moves_indices_alone(mask, key, i, j):
    if key + j >= 0:  # a prefix begins at key 0
        assert mask.counted_from(key).visible(i, j) == mask.visible(key + i, key + j)


@given(masks(12), st.integers(-9, 9), st.integers(-9, 9))
def test_shift_moves_the_band_and_leaves_the_prefix(mask, n, m):
    moved = mask.shift(n)
    band, moved_band = Mask(mask.left, mask.right), Mask(moved.left, moved.right)
    for i in range(8):
        for j in range(max(0, n), 20):
            assert moved_band.visible(i, j) == band.visible(i, j - n)
    assert moved.prefix == mask.prefix
    assert moved.shift(m) == mask.shift(n + m)


@given(masks(12), st.integers(30, 60))
def test_reach_is_how_far_back_a_query_sees(mask, i):
    keys = [j for j in range(99) if mask.visible(i, j)]
    if keys:
        assert i - keys[0] == (i if mask.reach is None else mask.reach)


@example(CAUSAL, 40)
@example(CAUSAL.shift(-1), 40)
@given(masks(12), st.integers(30, 60))
def test_sees_all_before_is_what_it_says(mask, i):  # beyond every prefix and bound drawn
    assert mask.sees_all_before == all(mask.visible(i, j) for j in range(i + 1))


@given(masks(12))
def test_without_prefix_is_the_band(mask):
    band = mask.without_prefix()
    assert (band.left, band.right, band.prefix) == (mask.left, mask.right, 0)
    assert mask.prefix or band is mask


@given(masks(12))
def test_tensors_and_ints_agree(mask):
    i, j = torch.arange(-5, 9)[:, None], torch.arange(9)
    table = mask.visible(i, j)
    assert table.dtype == torch.bool
    assert table.shape == (14, 9)
    assert table.tolist() == [[mask.visible(a, b) for b in range(9)] for a in range(-5, 9)]
    assert type(mask.visible(3, 4)) is bool


def test_the_named_masks():
    assert Mask(None, None, 0) == FULL
    assert Mask(None, 0) == CAUSAL
    assert sliding(3) == Mask(left=2, right=0)
    assert [j for j in range(9) if sliding(3).visible(5, j)] == [3, 4, 5]  # the window counts the query
    assert [j for j in range(9) if sliding(1).visible(5, j)] == [5]
    assert [j for j in range(9) if Mask(left=None, right=-2, prefix=5).visible(3, j)] == [0, 1, 2, 3, 4]


def test_a_mask_is_a_value():
    assert hash(Mask(3, 0)) == hash(sliding(4))
    with pytest.raises(AttributeError):
        CAUSAL.left = 3  # frozen
    assert not hasattr(CAUSAL, "__dict__")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mask(left=1.5), TypeError, ("left", "int", "1.5")),
        (lambda: Mask(right=True), TypeError, ("right", "int", "True")),
        (lambda: Mask(right=torch.tensor(1)), TypeError, ("right", "int", "tensor")),
        (lambda: Mask(prefix=None), TypeError, ("prefix", "int", "None")),
        (lambda: Mask(prefix=-1), ValueError, ("prefix", ">= 0", "-1")),
        (lambda: Mask(left=3, prefix=2), ValueError, ("prefix", "left=None", "left=3", "prefix=2")),
        (lambda: sliding(0), ValueError, ("window", "at least 1", "0")),
        (lambda: sliding(-1), ValueError, ("window", "at least 1", "-1")),
        (lambda: sliding(2.0), TypeError, ("window", "int", "2.0")),
        (lambda: sliding(True), TypeError, ("window", "int", "True")),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value
