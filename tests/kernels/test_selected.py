"""The kernels for selected keys, against the torch backend in fp64: every form of lists, band and option."""

import itertools

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED, moved
from selected_cases import BANDS, FORMS, lists, made

from attnlib import (
    CAUSAL,
    Mask,
    attention,
    attention_with_lse,
    explain,
    scores,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import selected_tables, tables
from attnlib.backends._triton.kernels.selected.lists import list_unions
from attnlib.backends._triton.launching.config import power_of_two
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.call.call import Call, Origin
from attnlib.dispatch.run import attend
from attnlib.masks import selected

HALF = torch.float16 if INTERPRETED else torch.bfloat16
DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))


def assert_right(run, tensors, indices, size, band, **options) -> None:
    """The error against fp64 is at most twice that of the torch backend in the same dtype."""
    wide = (x.double() for x in tensors)
    exact = run(*wide, mask=band & selected(indices, size), backend="torch", **options)
    naive = run(*tensors, mask=band & selected(indices, size), backend="torch", **options)
    here, mask = (x.to(DEVICE) for x in tensors), band & selected(indices.to(DEVICE), size)
    if score := options.get("score"):
        options |= {"score": score.reading([x.to(DEVICE) for x in score.tensors])}
    found = run(*here, mask=mask, backend="triton", **moved(options))
    for ours, theirs, right in zip(found, naive, exact, strict=True):
        ours = ours.cpu()
        assert torch.equal(ours == -torch.inf, right == -torch.inf)
        assert ours.dtype == theirs.dtype
        ours, theirs, right = (x.double().nan_to_num(torch.nan, 0, 0) for x in (ours, theirs, right))
        noise = 4 * torch.finfo(found[0].dtype).eps * max(1, right.abs().max().item())
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + noise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_form_of_lists(form, dtype):
    *tensors, indices, size = made(form, dtype)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=str)
def test_any_band(form, band):
    *tensors, indices, size = made(form, torch.float32, s=9, t=110)
    assert_right(attention_with_lse, tensors, indices, size, BANDS[band])


OPTIONS = {
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "slopes": {"alibi_slopes": torch.rand(8)},
    "slopes of sequences": {"alibi_slopes": torch.rand(2, 8), "sinks": torch.randn(8)},
    "sinks": {"sinks": torch.randn(8)},
    "bounds": {"key_starts": torch.tensor([40, 0]).int(), "key_ends": torch.tensor([150, 99]).int()},
    "score": {"score": scores.distance_bias(torch.randn(8, 20))},
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_any_option(name, dtype):
    *tensors, indices, size = made(FORMS[0], dtype)
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL, **OPTIONS[name])


@pytest.mark.parametrize("widths", [(40, 24), (80, 64), (160, 16), (16, 48)])
def test_any_width(widths):
    *tensors, indices, size = made(FORMS[5], torch.float16, s=3, t=60, d=widths[0], e=widths[1])
    assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


def test_latents():
    """One KV head whose values are the first channels of its keys, and tokens that all heads share."""
    q, latent = torch.randn(1, 3, 20, 48), torch.randn(1, 90, 1, 48)
    indices = lists(1, 3, 1, 33, 90)
    tensors = q, latent, latent[..., :32]
    assert_right(attention_with_lse, tensors, indices, 1, CAUSAL)


@pytest.mark.parametrize(
    ("form", "dtype"), [(FORMS[0], torch.float32), (FORMS[0], HALF), (FORMS[4], torch.float32)], ids=str
)
def test_packed_sequences(form, dtype):
    """With queries and keys of nobody after the last one, of which keys may be NaN."""
    h, g, c, n, size = form
    queries, keys = (5, 0, 3, 1), (40, 7, 3, 130)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys))
    q, k, v = (torch.randn(x, heads, 16).to(dtype) for x, heads in ((11, h), (183, g), (183, g)))
    k[180:], v[180:] = torch.nan, torch.nan
    indices, offsets = lists(1, 11, c, n, 140 // size)[0], {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    assert_right(varlen_attention_with_lse, (q, k, v), indices, size, CAUSAL, **offsets)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_keys_that_a_query_does_not_see_are_not_read(dtype):
    """NaN keys before its window and after it, in a block that it selects, and all of other blocks."""
    q, k, v = (torch.randn(1, x, 2, 16, dtype=dtype, device=DEVICE) for x in (1, 100, 100))
    indices = torch.tensor([[[[2, 0, 2, -1]]]], dtype=torch.int32, device=DEVICE)
    mask = Mask(left=30, right=-5) & selected(indices, 32)  # keys 69 to 94
    expected = attention(q, k, v, mask=mask, backend="triton")
    k[:, :69], v[:, :69], k[:, 95:], v[:, 95:] = (torch.nan,) * 4
    assert torch.equal(attention(q, k, v, mask=mask, backend="triton"), expected)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_rows_that_select_nothing(n):
    q, k = torch.randn(2, 5, 4, 16, device=DEVICE), torch.randn(2, 9, 2, 16, device=DEVICE)
    indices = torch.full((2, 5, 2, n), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    if n == 3:
        indices[..., 0], indices[..., 1] = -1, 1  # of 16 keys, which do not exist
    for size in (1, 16, 64):
        out, lse = attention_with_lse(q, k, k, mask=CAUSAL & selected(indices, size), backend="triton")
        if n < 3 or size > 1:
            assert not out.any()
            assert (lse == -torch.inf).all()


def test_what_kernels_lack_runs_elsewhere():
    q = torch.randn(1, 5, 2, 16, requires_grad=True, device=DEVICE)
    indices = torch.zeros(1, 5, 1, 1, dtype=torch.int32, device=DEVICE)
    asked = {
        "with dropout": {"dropout_p": 0.5},
        "in fp8": {"compute_dtype": torch.float8_e4m3fn},
    }
    for name, options in asked.items():
        x = q.half() if "compute_dtype" in options else q
        found = explain(attention, x, x, x, mask=selected(indices), **options)
        assert (
            f"has no kernels yet for masks.selected() {name}; use backend='torch'" in found.rejected["triton"]
        )
        assert found.chosen == "torch"
    assert explain(attention, q, q, q, mask=selected(indices)).chosen == "triton"


# Tiles of 4, 4, 4 and 2 neighbouring queries: of 4 heads, of 16, of one with several lists for each KV head,
# and of 20 heads whose block has 3 tiles.
UNIONS = [(8, 2, 2, 5, 32), (32, 2, 1, 3, 64), (6, 2, 6, 4, 32), (20, 1, 1, 3, 96)]


def neighbouring(kind: str, s: int, c: int, n: int, blocks: int) -> torch.Tensor:
    """Lists of two sequences whose neighbours choose alike, at random or no block twice, with empty rows."""
    indices = lists(2, s, c, n, blocks)
    if kind == "alike":
        return torch.where(torch.rand(indices.shape) < 0.8, indices[:, :1], indices)
    if kind == "disjoint":
        return torch.where(indices < 0, -1, torch.arange(s * n).view(s, 1, n) % (blocks + 1)).int()
    return indices


@pytest.mark.parametrize("kind", ["alike", "random", "disjoint"])
@pytest.mark.parametrize("form", UNIONS, ids=str)
def test_tiles_of_neighbouring_queries(form, kind):
    for s, t in ((6, 200), (1, 70)):
        *tensors, _, size = made(form, HALF, s=s, t=t)
        indices = neighbouring(kind, s, *form[2:4], -(-t // size))
        assert_right(attention_with_lse, tensors, indices, size, CAUSAL)


@pytest.mark.parametrize("band", BANDS)
def test_any_band_of_neighbouring_queries(band):
    *tensors, indices, size = made(UNIONS[0], HALF, s=9, t=110)
    assert_right(attention_with_lse, tensors, indices, size, BANDS[band])


def test_lists_of_neighbours_change_no_bit():
    """Neither do repeats, gaps and the order of entries, and tiles of one query agree."""
    *tensors, indices, size = made(UNIONS[0], HALF, s=8)
    tensors = [x.to(DEVICE) for x in tensors]

    def found(indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = CAUSAL & selected(indices.to(DEVICE), size)
        return attention_with_lse(*tensors, mask=mask, backend="triton")

    expected = found(indices)
    wide = torch.stack((torch.full_like(indices, -1), indices.flip(-1), indices), -1).flatten(-2)
    assert_same_bits(*zip(found(wide), expected, strict=True))
    for query in range(8):
        others = torch.randint_like(indices, -1, 6)
        others[:, query] = indices[:, query]
        out, lse = found(others)
        assert_same_bits((out[:, query], expected[0][:, query]), (lse[..., query], expected[1][..., query]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selected_tables, "neighbours", lambda *a, **b: 1)
        plan_cache.cache_clear()
        for x, y in zip(found(indices), expected, strict=True):
            torch.testing.assert_close(x, y)


def test_a_chunk_of_keys_that_begins_within_a_block():
    *tensors, indices, size = made(UNIONS[0], HALF, s=9)
    q, k, v = (x.to(DEVICE) for x in tensors)
    mask, first = CAUSAL & selected(indices.to(DEVICE), size), 45
    starts = torch.full((2,), first, dtype=torch.int32, device=DEVICE)
    whole = attention_with_lse(q, k, v, mask=mask, key_starts=starts, backend="triton")
    origin = Origin(query=first, key=first)
    chunk = attend(Call(q, mask, k=k[:, first:], v=v[:, first:], origin=origin, lse=True), "triton")
    for x, y in zip(chunk, whole, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("queries", [2, 4])
def test_unions_of_lists(queries):
    """A list has each visible block once, in ascending order, with a bit for every query that has it."""
    s, planes, slots, size, t = 7, 2, 5, 32, 200
    indices = lists(2, s, planes, slots, 7)
    tiles = -(-s // queries)
    found = torch.full((2, tiles, planes, queries * slots + 1), -9, dtype=torch.int32, device=DEVICE)
    list_unions[(2 * tiles * planes,)](
        indices.to(DEVICE), found, None, None, None, None, None, 2, s, t, planes, slots, 99, 0, None,
        BLOCK_SIZE=size, BLOCK_M=power_of_two(queries * slots), QUERIES=queries,
    )  # fmt: skip
    for b, tile, plane in itertools.product(range(2), range(tiles), range(planes)):
        wanted = {}
        for query in range(min(queries, s - tile * queries)):
            last = t - s + tile * queries + query
            for block in set(indices[b, tile * queries + query, plane].tolist()):
                if (last - 99) // size <= block <= last // size:
                    wanted[block] = wanted.get(block, 0) + 2**query
        count, *blocks = found[b, tile, plane].tolist()
        rest = [-9] * (queries * slots - len(wanted))
        assert [count, *blocks] == [len(wanted), *((x << queries) + wanted[x] for x in sorted(wanted)), *rest]


@pytest.mark.parametrize("arch", [80, 90])
def test_neighbouring_queries_share_tiles(arch):
    """If a tile has rows for several, blocks are whole tiles, and a program can sort their lists."""
    case = tables.DenseCase(128, 128, itemsize=2, causal=True, plain=True, arch=arch, aligned=True)

    def shared(rows: int = 16, block_size: int = 64, slots: int = 16, case: tables.DenseCase = case) -> int:
        return selected_tables.neighbours(case, rows=rows, block_size=block_size, slots=slots)

    assert [shared(rows=x) for x in (1, 16, 17, 32, 33, 128)] == [4, 4, 2, 2, 1, 1]
    assert [shared(block_size=x) for x in (1, 16, 32, 96, 100, 128)] == [1, 1, 4, 4, 1, 4]
    assert [shared(slots=x) for x in (0, 1, 256, 257, 512, 513)] == [1, 4, 4, 2, 2, 1]
    assert shared(case=case._replace(itemsize=4)) == 1
    assert selected_tables.forward(case, rows=3, block_size=64, queries=4).block_m == 16


@pytest.mark.parametrize("arch", [80, 90])
def test_tiles_fit_blocks_and_heads(arch):
    case = tables.DenseCase(128, 128, itemsize=2, causal=True, plain=True, arch=arch, aligned=True)
    for block_size, tile in ((1, 64), (16, 64), (32, 32), (96, 32), (100, 64), (128, 64)):
        assert selected_tables.forward(case, rows=4, block_size=block_size).block_n == tile
    assert [selected_tables.forward(case, rows=x, block_size=64).block_m for x in (1, 16, 17, 128)] == [
        16,
        16,
        32,
        64,
    ]


def test_values_that_are_wider_than_the_keys_at_the_same_address():
    """Only values that are the first channels of the keys are read with them."""
    q, x = torch.randn(1, 5, 4, 40), torch.randn(1, 60, 2, 64)
    indices = lists(1, 5, 2, 3, 4)
    mask = CAUSAL & selected(indices, 16)
    expected = attention(q, x[..., :40], x, mask=mask, backend="reference")
    here, mask = x.to(DEVICE), CAUSAL & selected(indices.to(DEVICE), 16)
    found = attention(q.to(DEVICE), here[..., :40], here, mask=mask, backend="triton")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
