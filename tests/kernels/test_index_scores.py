"""The kernel of index scores: against fp64, with any strides, lengths and heads; and the choices by it."""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnlib import CAUSAL, FLOP_FORMULAS, GroupedQueryAttention, Indexer, KVCache, KVLayout
from attnlib.dispatch.index_scores import kernel
from attnlib.indexing import choose
from attnlib.indexing.scores import StoredKeys, index_scores
from attnlib.layers import choices

HALF = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def made(
    b: int, s: int, t: int, indexer: Indexer, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys that are parts of wider rows, and weights."""
    h, d = indexer.heads, indexer.head_dim
    q = torch.randn(b, s, h + 1, d + 8, device=DEVICE).to(dtype)[:, :, 1:, :d]
    k = torch.randn(b, t, 2, d, device=DEVICE).to(dtype)[:, :, 1]
    return q, k, torch.randn(b, s, h, device=DEVICE) if indexer.weighted else None


def by_torch(queries: Tensor, keys: Tensor, weights: Tensor | None, ends: Tensor, indexer: Indexer) -> Tensor:
    """What torch computes, in the dtype of the queries or in fp64, where there is no kernel."""
    products = torch.einsum("bshd,btd->bsht", queries, keys)
    products = products.relu() if indexer.activation else products
    if weights is not None:
        products = products * weights[..., None].to(products.dtype)
    scores = products if indexer.per == "group" else products.sum(2, keepdim=True)
    hidden = torch.arange(keys.shape[1], device=keys.device) >= ends[..., None]
    scores = (scores * indexer.score_scale).masked_fill(hidden[:, :, None], -torch.inf)
    return torch.stack([x.amax(-1) for x in scores.split(indexer.block_size, -1)], -1)


def assert_scores(b: int, s: int, t: int, indexer: Indexer, dtype: torch.dtype) -> None:
    q, k, weights = made(b, s, t, indexer, dtype)
    ends = torch.randint(-2, t + 3, (b, s), device=DEVICE, dtype=torch.int32)
    ends[:, ::3] = torch.arange(t - s + 1, t + 1, device=DEVICE, dtype=torch.int32)[::3]
    assert kernel(q, k) is not None
    ours = index_scores(q, k, weights, ends, indexer)
    assert ours.shape == (b, s, indexer.lists, -(-t // indexer.block_size))
    # Products of all heads with 4k queries would take 64 GiB.
    q, weights, ends, ours = (None if x is None else x[:, -CHECKED:] for x in (q, weights, ends, ours))
    exact = by_torch(q.double(), k.double(), None if weights is None else weights.double(), ends, indexer)
    eager = by_torch(q.float(), k.float(), weights, ends, indexer)
    assert_close("scores", ours, [eager], exact, 2, 4 * torch.finfo(torch.float32).eps)


CHECKED = 200  # last queries
SIZES = [(1, 1, 1), (2, 5, 300), (1, 129, 129), (3, 2, 65)]
SIZES += [] if INTERPRETED else [(1, 4096, 32768), (8, 1, 131072)]
INDEXERS = {
    "64 heads": Indexer(64, 128, scale=1.0),
    "3 heads": Indexer(3, 24),
    "20 heads of 96": Indexer(20, 96, weighted=False),
    "wide": Indexer(4, 256, activation=None),
    "one": Indexer(1, 16),
    "blocks": Indexer(20, 64, block_size=32, pool="max"),
    "blocks of 24": Indexer(3, 64, block_size=24, pool="max"),
    "blocks of groups": Indexer(
        4, 128, per="group", weighted=False, activation=None, block_size=128, pool="max"
    ),
    "groups": Indexer(4, 64, per="group", weighted=False, activation=None),
}


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("name", INDEXERS)
@pytest.mark.parametrize(("b", "s", "t"), SIZES)
def test_scores(b, s, t, name, dtype):
    assert_scores(b, s, t, INDEXERS[name], dtype)


def test_no_queries_or_keys():
    for s, t in ((0, 5), (0, 0)):
        q, k, weights = made(2, s, t, INDEXERS["3 heads"], torch.float32)
        ends = torch.zeros(2, s, dtype=torch.int32, device=DEVICE)
        assert index_scores(q, k, weights, ends, INDEXERS["3 heads"]).shape == (2, s, 1, t)


def test_nan_behind_the_end_is_not_seen():
    """Of keys, not of weights or queries."""
    indexer = INDEXERS["3 heads"]
    q, k, weights = made(1, 5, 40, indexer, torch.float32)
    ends = torch.full((1, 5), 21, dtype=torch.int32, device=DEVICE)
    expected = index_scores(q, k, weights, ends, indexer)
    k[:, 21:] = torch.nan
    assert torch.equal(index_scores(q, k, weights, ends, indexer), expected)


LONG = [] if INTERPRETED else [(2, 3, 90_000), (1, 2000, 9000)]
SAME = {"heads": 4, "head_dim": 32, "scale": 1.0}  # sums of whole numbers have no rounding
CHOICES = {
    "tokens": Indexer(**SAME, top=16),
    "blocks": Indexer(**SAME, top=3, per="group", weighted=False, pool="max", block_size=8, local=1),
    "means": Indexer(**SAME, top=3, weighted=False, pool="mean", block_size=8, tail=True),
}


@pytest.mark.parametrize(("b", "s", "t"), [(2, 150, 200), *LONG])
@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_whole_numbers_are_those_of_the_cpu(name, b, s, t):
    """Many scores are equal; of these the lower position wins on every device."""
    indexer = CHOICES[name]
    q, k, w = (torch.randint(-1, 2, x).float() for x in ((b, s, 4, 32), (b, t, 32), (b, s, 4)))
    w = w if indexer.weighted else None
    on_device = [
        x if x is None else x.to(DEVICE, torch.float16 if n < 2 else None) for n, x in enumerate((q, k, w))
    ]
    lists = choose(*on_device, indexer).cpu().sort(-1).values
    exact = choose(q.double(), k.double(), w, indexer)  # no kernel computes fp64
    assert torch.equal(lists, exact.sort(-1).values)


def test_the_operator_keeps_its_contract():
    q, k, weights = made(2, 5, 20, INDEXERS["3 heads"], torch.float32)
    ends = torch.full((2, 5), 9, dtype=torch.int32, device=DEVICE)
    operator = torch.ops.attnlib.triton_index_scores.default
    tests = ("test_schema", "test_faketensor")
    given = q, k, weights, ends, None, None, None, 0.5, True, False, 8, 20
    torch.library.opcheck(operator, given, test_utils=tests)
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        index_scores(q, k, weights, ends, INDEXERS["3 heads"])
    assert counter.get_total_flops() == 2 * 2 * 5 * 20 * 3 * 24


@pytest.mark.parametrize("form", ["a column", "expanded"])
def test_starts_with_any_strides(form):
    q, k, weights = made(3, 2, 20, INDEXERS["3 heads"], torch.float32)
    ends = torch.full((3, 2), 20, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([[9, 3], [2, 4], [0, 5]], dtype=torch.int32, device=DEVICE)[:, 0]
    if form == "expanded":
        starts = starts[:1].expand(3)
    found, expected = (
        index_scores(q, k, weights, ends, INDEXERS["3 heads"], x) for x in (starts, starts.contiguous())
    )
    assert torch.equal(found, expected)
    assert torch.equal((found == -torch.inf).sum(-1)[:, 0, 0], starts)


@needs_gpu
def test_a_long_prompt_takes_at_most_a_gib():
    indexer = replace(INDEXERS["64 heads"], top=2048)
    q = torch.randn(1, 131072, 64, 128, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(1, 131072, 128, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.rand(1, 131072, 64, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lists = choose(q, k, weights, indexer)
    taken = torch.cuda.max_memory_allocated() - before - lists.numel() * 4
    assert taken <= 1 << 30


@pytest.mark.parametrize("index_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_size", [None, 4, 48, 64])
@pytest.mark.parametrize("name", ["3 heads", "groups"])
def test_keys_in_a_cache_are_read_in_place(name, page_size, index_dtype):
    """What no query sees is NaN, and the page table names no page beyond a sequence."""
    indexer, lengths = replace(INDEXERS[name], head_dim=24), [130, 7, 65]
    layout = KVLayout.latent(16, 0, dtype=HALF[-1], index_dim=24, index_dtype=index_dtype)
    if page_size is None:
        cache = KVCache.contiguous([layout], max_sequences=3, max_length=160, device=DEVICE)
    else:
        cache = KVCache.paged([layout], pages=120, page_size=page_size, max_sequences=3, device=DEVICE)
    with cache.step(dict(zip(cache.admit(3), lengths, strict=True))) as (layer,):
        latents, keys = (torch.randn(sum(lengths), *x, device=DEVICE).to(HALF[-1]) for x in ((16,), (1, 24)))
        view = layer.append(latents, None, index=keys)
    capacity = view.table.shape[1] * view.page_size
    position = torch.arange(capacity, device=DEVICE)
    page, slot, stored = (
        position // view.page_size,
        position % view.page_size,
        position < view.lengths[:, None],
    )
    for plane in (view.index, view.index_scale):
        if plane is not None and plane.dtype != torch.float8_e4m3fn:
            hidden = plane.new_ones(plane.shape[:2], dtype=torch.bool)
            hidden[view.table[:, page].long()[stored], slot.expand(3, -1)[stored]] = False
            plane[hidden] = torch.nan
    ends = torch.tensor([[129, 130], [6, 7], [64, 65]], dtype=torch.int32, device=DEVICE)
    pages = torch.where(stored[:, :: view.page_size], view.table, 2**31 - 1)
    q, _, weights = made(3, 2, 1, indexer, HALF[-1])
    in_place = replace(StoredKeys.of(view, 140 if page_size else capacity), table=pages)
    found = index_scores(q, in_place, weights, ends, indexer)
    gathered = view.index_keys(in_place.tokens)[:, :, 0]
    expected = index_scores(q, gathered.contiguous(), weights, ends, indexer)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["tokens", "blocks"])
def test_layers_choose_among_keys_in_place(name, monkeypatch):
    """As among gathered keys, step by step, over pages of a sequence that is padded and one that is not."""
    blocks = {
        "per": "group",
        "heads": 2,
        "weighted": False,
        "block_size": 4,
        "pool": "max",
        "local": 1,
        "top": 3,
    }
    select = Indexer(**({"heads": 3, "top": 9} if name == "tokens" else blocks), head_dim=16)
    layer = GroupedQueryAttention(32, 4, num_kv_heads=2, mask=CAUSAL, select=select, device=DEVICE)
    x, found = torch.randn(2, 40, 32, device=DEVICE), []
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr(choices, "reads_stored", lambda *_: False)
        cache = KVCache.paged([layer.kv_layout], pages=40, page_size=4, max_sequences=2, device=DEVICE)
        cache.admit(2, left_padding=[0, 6])
        outs = []
        with torch.no_grad():
            for tokens in x.split((25, 1, 3, 1, 10), 1):
                with cache.step(tokens.shape[1]) as (kv,):
                    chosen = layer.choose(tokens, kv=kv)
                    outs.append((chosen.indices.sort(-1).values, layer(tokens, kv=kv)))
        found.append(outs)
    for (lists, out), (others, expected) in zip(*found, strict=True):
        assert torch.equal(lists, others)
        torch.testing.assert_close(out, expected)
