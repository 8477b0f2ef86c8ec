"""Over a cache, which tiles of a mask by function are read, and what comes of those."""

from contextlib import contextmanager

import pytest
import torch
from function_cases import MASK_NAMES, close, functions
from kernel_helpers import DEVICE

from attnlib import CAUSAL, KVCache, KVLayout, cached_attention_with_lse, explain, mask_mod
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.masks.ready_made import attention_sinks

SIZES = [
    (16, 16, 16),
    (32, 16, 32),
    (16, 64, 16),
    (64, 32, 32),
]  # rows and keys of a tile, and of what is told apart
LAYOUTS = {
    "grouped": KVLayout.grouped(2, 16),
    "int8": KVLayout.grouped(2, 16, storage_dtype=torch.int8),
    "latent": KVLayout.latent(16, 8),
}
STEPS = (60, 1, (30, 2), (0, 9), 40)  # tokens of each sequence, dense or packed
# Each size with each mask, over one layout after another.
CASES = [
    (size, list(LAYOUTS)[(n + m) % 3], mask)
    for n, size in enumerate(SIZES)
    for m, mask in enumerate(MASK_NAMES)
]


@pytest.fixture(autouse=True)
def _here():
    """Every tensor where kernels run."""
    with torch.device(DEVICE):
        yield


@pytest.fixture
def _small(request, monkeypatch):
    """Tiles so small that a short sequence has many."""
    block_m, block_n, grain = request.param
    monkeypatch.setattr(decode_tables, "GRAIN", grain)
    monkeypatch.setattr(decode_tables, "decode", lambda case: LaunchConfig(block_m, block_n, 1, 4))
    plan_cache.cache_clear()
    yield
    plan_cache.cache_clear()


class Sequences:
    """Two sequences of a layer, which grow step by step; ``heads`` query heads."""

    def __init__(self, layout: KVLayout, heads: int = 6):
        self.layout, self.heads, self.lengths = layout, heads, [0, 0]
        self.cache = KVCache.paged([layout], pages=60, page_size=8, max_sequences=2)
        self.handles = self.cache.admit(2)

    def _tokens(self, counts, *sizes):
        lead = (sum(counts),) if isinstance(counts, tuple) else (2, counts)
        return torch.randn(*lead, *sizes)

    @contextmanager
    def step(self, counts):
        """A step of as many tokens: their queries, and the view with their keys."""
        sizes = ((16,), (8,)) if self.layout.is_latent else ((2, 16), (2, 16))
        new = counts if not isinstance(counts, tuple) else dict(zip(self.handles, counts, strict=True))
        with self.cache.step(new) as (layer,):
            view = layer.append(*(self._tokens(counts, *x) for x in sizes))
            yield self._tokens(counts, self.heads, self.layout.dim + self.layout.rope_dim), view


def agree(mask, q, view):
    """The kernels agree with the reference backend."""
    ours, theirs = (cached_attention_with_lse(q, view, mask=mask, backend=x) for x in ("triton", "reference"))
    close(ours, [x.double() for x in theirs])


@pytest.mark.parametrize(("_small", "name", "mask_name"), CASES, indirect=["_small"], ids=str)
@torch.no_grad()
def test_steps_as_in_the_reference_backend(_small, name, mask_name):
    """Dense and packed ones, of few and of many queries, whose groups are cut by blocks of rows."""
    sequences, mask = Sequences(LAYOUTS[name]), functions(t=140)[0][mask_name]
    for counts in STEPS:
        with sequences.step(counts) as step:
            agree(mask, *step)


@pytest.mark.parametrize("name", ["grouped", "latent"])
@pytest.mark.parametrize("counts", [1, 30, (1, 20)], ids=str)
@pytest.mark.parametrize("by_head", [False, True], ids=["all heads", "by head"])
@pytest.mark.parametrize("_small", SIZES[1:2], indirect=True, ids=str)
@torch.no_grad()
def test_hidden_tiles_are_not_read(_small, by_head, counts, name):
    """What lies there is NaN, and reaches nothing. A tile that some head of a block sees is read for all."""
    sequences = Sequences(LAYOUTS[name])
    with sequences.step(100):
        pass
    shown = torch.ones(6, 4, dtype=torch.bool)
    shown[:, 1] = False  # keys 32 to 63
    shown[:3, 2] = False  # and, where heads differ, those from 64 to 95 of the first half of them
    if by_head:
        mask = CAUSAL & mask_mod(lambda b, h, i, j, shown: shown[h, (j // 32).clamp(max=3)], shown)
    else:
        mask = CAUSAL & mask_mod(lambda b, h, i, j, shown: shown[(j // 32).clamp(max=3)], shown[-1])
    with sequences.step(counts) as (q, view):
        clean, _ = cached_attention_with_lse(q, view, mask=mask, backend="reference")
        for plane in (view.k, view.k_rope, view.v):
            for token in range(32, 64) if plane is not None else ():
                plane[view.table[:, token // 8].long(), token % 8] = torch.nan
        ours, _ = cached_attention_with_lse(q, view, mask=mask, backend="triton")
        close([ours], [clean.double()])


@pytest.mark.parametrize("_small", SIZES[2:], indirect=True, ids=str)
@torch.no_grad()
def test_a_window_with_first_tokens(_small, monkeypatch):
    """Tiles of a kept page go on in dropped ones, which hold NaN, or are another sequence's by now."""
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    sequences = Sequences(KVLayout.grouped(2, 16, window=20, first_tokens=5))
    for counts in (*STEPS, 1):
        with sequences.step(counts) as step:
            agree(attention_sinks(5, 20), *step)
    assert sequences.cache._sequences.allocators[(20, 5)].used <= 2 * (1 + 4)


@torch.no_grad()
def test_explain_a_step_without_queries():
    """It is planned, although it never runs."""
    sequences, mask = Sequences(LAYOUTS["grouped"]), CAUSAL & mask_mod(lambda b, h, i, j: j % 2 == 0)
    with sequences.step(30) as (q, view):
        found = explain(cached_attention_with_lse, q[:, :0], view, mask=mask, backend="triton")
    assert found.variant == "plain"
