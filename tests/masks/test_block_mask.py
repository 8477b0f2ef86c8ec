"""What a mask by function says of tiles, found once for many calls."""

import pytest
import torch
from function_cases import MASK_NAMES, functions

from attnlib import CAUSAL, FULL, attention, mask_mod, sliding, varlen_attention
from attnlib.masks.function import GRAIN


def reach(b, h, i, j):
    return i - j * j < 70


@pytest.mark.parametrize(("s", "t"), [(130, 200), (64, 128), (1, 1)])
@pytest.mark.parametrize("name", MASK_NAMES)
def test_tiles_are_what_the_function_says(name, s, t):
    mask = functions(2, 4, max(t, 2))[0][name]
    tiles = mask.block_mask(2, 4, s, t).tiles
    assert tiles.shape[:2] == (2 if name == "documents" else 1, 4 if name == "by head" else 1)
    at = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    i, j = torch.arange(t - s, t)[:, None], torch.arange(t)
    seen = mask.definition(*at, i, j, torch.tensor(t - s)).broadcast_to(2, 4, s, t)
    for m, rows in enumerate(seen.split(GRAIN, 2)):
        for n, tile in enumerate(rows.split(GRAIN, 3)):
            expected = tile.any((-1, -2)).int() + tile.all(-1).all(-1).int()
            assert torch.equal(tiles[:, :, m, n].int().expand(2, 4), expected)


def test_no_query_or_key_has_a_tile():
    assert mask_mod(reach).block_mask(1, 1, 0, 5).tiles.shape == (1, 1, 0, 1)


def test_it_holds_within_any_band_and_no_further():
    blocks = mask_mod(reach).block_mask(1, 1, 100, 100)
    for mask in (CAUSAL & blocks, blocks & sliding(80), FULL & blocks):
        assert mask.tiles is blocks.tiles
    other = mask_mod(lambda b, h, i, j: i % 2 == 0)
    for mask in (blocks & other, other & blocks, blocks | CAUSAL, ~blocks, blocks.reading(())):
        assert mask.tiles is None


def test_the_result_is_that_of_the_mask():
    q = torch.randn(2, 100, 4, 8)
    for mask in (CAUSAL & mask_mod(reach), functions(2, 4, 100)[0]["documents"]):
        blocks = mask.block_mask(2, 4, 100, 100)
        assert torch.equal(attention(q, q, q, mask=blocks), attention(q, q, q, mask=mask))
    cu = torch.tensor([0, 40, 200], dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    short = mask_mod(reach).block_mask(1, 1, 7, 7)  # of packed sequences it says nothing
    q = q.flatten(0, 1)
    found = [varlen_attention(q, q, q, **packed, mask=mask) for mask in (short, mask_mod(reach))]
    assert torch.equal(*found)


def test_other_calls_are_refused():
    q = torch.randn(1, 100, 2, 8)
    for sizes in (
        (1, 2, 100, 200),
        (1, 2, 30, 100),
        (1, 2, 99, 100),
        (1, 2, 100, 101),
    ):  # the last two of as many tiles
        with pytest.raises(
            ValueError, match=r"expected a mask for b=1, h=2, s=100, t=100, got tiles .*see block_mask"
        ):
            attention(q, q, q, mask=mask_mod(reach).block_mask(*sizes))
    elsewhere = mask_mod(reach).block_mask(1, 2, 100, 100, device="meta")
    with pytest.raises(
        ValueError, match=r"on meta, not.*device= is missing: block_mask\(\.\.\., device='cpu'\)"
    ):
        attention(q, q, q, mask=elsewhere)


def test_tiles_of_other_numbers_are_refused():
    q, documents = torch.randn(1, 100, 2, 8), torch.zeros(1, 100, dtype=torch.int32)
    mask = mask_mod(lambda b, h, i, j, x: x[b, i] == x[b, j], documents)
    blocks = CAUSAL & mask.block_mask(1, 2, 100, 100)
    attention(q, q, q, mask=blocks)
    documents[:, 50:] = 1
    with pytest.raises(ValueError, match=r"has changed since block_mask\(\); call that again"):
        attention(q, q, q, mask=blocks)
    attention(q, q, q, mask=CAUSAL & mask)
