"""From what people have to what calls take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.packing import bounds_of, from_position_ids


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


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=3), st.integers(0, 5))
def test_offsets_are_those_of_what_begins_again(rows, first):
    width = max(map(sum, rows), default=0)
    rows = [[*row, *[1] * (width - sum(row))] for row in rows]
    positions = [torch.cat([torch.arange(n) + first for n in row]) for row in rows]
    given = torch.stack(positions) if rows else torch.empty(0, 0, dtype=torch.int64)
    lengths = [n for row in rows for n in row]
    cu_seqlens, longest = from_position_ids(given)
    assert cu_seqlens.dtype == torch.int32
    if first != 1:  # one that begins with 1 may go on from a sequence of one token
        assert (cu_seqlens.diff().tolist(), longest) == (lengths, max(lengths, default=0))


def test_what_are_no_positions_is_refused():
    with pytest.raises(ValueError, match=r"position_ids: expected \[b, s\] or \[s\], got \(1, 2, 3\)"):
        from_position_ids(torch.ones(1, 2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"position_ids: expected integers, got torch.float32"):
        from_position_ids(torch.ones(3))
    with pytest.raises(TypeError, match="position_ids: expected a"):
        from_position_ids([0, 1])
