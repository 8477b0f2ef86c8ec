"""From what people have to what calls take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.packing import bounds_of


@given(st.integers(0, 9).flatmap(lambda t: st.lists(st.lists(st.integers(0, 2), min_size=t, max_size=t), max_size=4)))
def test_bounds_hold_all_tokens_and_no_more(rows):
    mask = torch.tensor(rows, dtype=torch.int64).view(len(rows), len(rows[0]) if rows else 0)
    starts, ends = bounds_of(mask)
    assert starts.dtype == ends.dtype == torch.int32
    for row, start, end in zip(rows, starts.tolist(), ends.tolist(), strict=True):
        there = [n for n, x in enumerate(row) if x]
        assert (start, end) == ((there[0], there[-1] + 1) if there else (0, 0))


def test_what_is_no_padding_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: expected \[b, t\], got \(1, 2, 3\)"):
        bounds_of(torch.ones(1, 2, 3))
    with pytest.raises(TypeError, match="attention_mask: expected a"):
        bounds_of([[1, 1]])
