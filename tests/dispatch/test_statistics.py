"""Statistics over caches, against a dense call of each sequence; and on DTensors, against the whole call."""

from types import SimpleNamespace

import decode_helpers
import pytest
import torch
from decode_helpers import Sizes, store
from weight_helpers import forms, oracle

from attnlib import (
    CAUSAL,
    KVLayout,
    attention_maxima,
    attention_weights,
    cached_attention_with_lse,
    mask_mod,
    score_mod,
    sliding,
)

LAYOUTS = {
    "grouped": KVLayout.grouped(2, 8, 5),
    "windowed": KVLayout.grouped(2, 8, 5, window=9),
    "latent": KVLayout.latent(12, 4),
    "int8": KVLayout.grouped(2, 8, storage_dtype=torch.int8),
    "fp8": KVLayout.grouped(2, 8, storage_dtype=torch.float8_e4m3fn),
    "latent int8": KVLayout.latent(12, 4, storage_dtype=torch.int8),
    "fp64": KVLayout.grouped(2, 8, dtype=torch.float64),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(decode_helpers, "DEVICE", "cpu")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("page_size", [4, None])
@pytest.mark.parametrize("counts", [3, (2, 0, 5)], ids=str)
def test_over_a_cache(layout, page_size, counts):
    stored = store(layout, Sizes((20, 3, 7), (0, 2, 4), page_size))
    mask = CAUSAL if layout.window is None else sliding(9)
    call = stored.call(counts, 4, mask, ["softcap", "per_sequence_slopes"])
    q, view, options = call.q, call.stored.view, {"mask": mask, **call.options}
    lse = cached_attention_with_lse(q, view, **options)[1]
    packed = not isinstance(counts, int)
    rows = torch.tensor([1, -1, 0, 2, 6] if packed else [[1, -1, 0], [-1, 2, 2], [3, 0, 1]])
    at = torch.randint(-1, 21, (*q.shape[:-2], 6))
    mass = attention_weights(q, view, lse, over="queries", **options)
    some = attention_weights(q, view, lse, over="queries", rows=rows, **options)
    none = attention_weights(q, view, lse, over="none", rows=rows, **options)
    heads = attention_weights(q, view, lse, over="heads", at=at, **options)
    maxima = {of: attention_maxima(q, view, of=of, **options) for of in ("scores", "products")}
    assert mass.shape == (3, 4, 20)
    for n, problem in enumerate(call.problems()):
        first = sum(counts[:n]) if packed else 0
        s, t = problem.q.shape[1], problem.k.shape[1]
        own_rows = rows - first if packed else rows[n]
        own_at, own_lse = call.of(n, at, lse) if packed else (at[n : n + 1], lse[n : n + 1])
        asked = {"rows": own_rows.masked_fill((own_rows < 0) | (own_rows >= s), -1), "at": own_at}
        asked |= {"by_sequence": asked["rows"][None]}
        given = {"mask": mask, **problem.options}
        want = oracle(problem.q, problem.k, own_lse, asked, **given)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(mass[n, :, :t].double(), want["queries"][0], **close)
        torch.testing.assert_close(some[n, :, :t].double(), want["some"][0], **close)
        assert not mass[n, :, t:].any()
        seen = (asked["rows"] >= 0).nonzero()[:, 0]
        got = none[:, seen] if packed else none[n][:, seen]
        torch.testing.assert_close(got[..., :t].double(), want["none"][0][:, seen], **close)
        assert not got[..., t:].any()
        assert packed or not none[n][:, asked["rows"] < 0].any()
        own = heads[first : first + s] if packed else heads[n]
        torch.testing.assert_close(own.double(), want["heads"][0], **close)
        for of, x in maxima.items():
            own = x[:, first : first + s] if packed else x[n]
            torch.testing.assert_close(own.double(), want[of][0], **close)


@pytest.mark.parametrize("layout", [LAYOUTS["windowed"], LAYOUTS["latent int8"]], ids=["windowed", "latent"])
def test_the_reference_reads_the_same_keys(layout):
    stored = store(layout, Sizes((20, 3, 7), (6, 2, 0), 4))
    call = stored.call(3, 4, CAUSAL if layout.window is None else sliding(9))
    lse = cached_attention_with_lse(call.q, stored.view, mask=call.mask)[1]
    asked = {"rows": torch.tensor([2, 0]), "at": torch.randint(-1, 21, (3, 3, 6))}
    ours, theirs = (
        forms(call.q, stored.view, lse, asked, mask=call.mask, backend=name)
        for name in ("torch", "reference")
    )
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5)


def test_functions_count_in_the_cache():
    """i and j are storage indices, though the keys before the start are not gathered."""
    stored = store(LAYOUTS["fp64"], Sizes((20, 9), (3, 5), 4))
    call = stored.call(2, 4)
    options = {
        "mask": CAUSAL & mask_mod(lambda b, h, i, j: (i + j + b) % 3 != h % 3),
        "score": score_mod(lambda score, b, h, i, j: score * (i - 2 * j + b)),
    }
    lse = cached_attention_with_lse(call.q, stored.view, **options)[1]
    mass = attention_weights(call.q, stored.view, lse, over="queries", **options)
    torch.testing.assert_close(mass.sum(-1), (lse > -torch.inf).sum(-1).double())


def test_no_sequences_and_empty_ones():
    for lengths, b in (((), 0), ((0, 0), 2)):
        stored = store(LAYOUTS["grouped"], Sizes(lengths, (), 4))
        q, lse = torch.randn(b, 1, 4, 8), torch.full((b, 4, 1), -torch.inf)
        assert attention_weights(q, stored.view, lse, mask=CAUSAL, over="queries").shape == (b, 4, 0)
        maxima = attention_maxima(q, stored.view, mask=CAUSAL)
        assert torch.equal(maxima, torch.full((b, 4, 1), -torch.inf))


def test_a_sharded_cache_is_refused():
    """Its route says so; one that merely shares prefixes is read as a whole."""
    view = store(LAYOUTS["grouped"], Sizes((5,), (), 4)).view
    q = torch.randn(1, 1, 4, 8)
    wanted = attention_maxima(q, view, mask=CAUSAL)
    for partial in (False, True):
        routed = view.with_route(SimpleNamespace(is_partial=partial))
        if not partial:
            assert torch.equal(attention_maxima(q, routed, mask=CAUSAL), wanted)
            continue
        with pytest.raises(NotImplementedError, match="kv: expected a cache that this device stores whole"):
            attention_maxima(q, routed, mask=CAUSAL)


def test_bounds_and_offsets_belong_to_the_view():
    stored = store(LAYOUTS["grouped"], Sizes((5,), (), 4))
    with pytest.raises(ValueError, match="key_ends: expected None over a cache"):
        attention_maxima(torch.zeros(1, 1, 4, 8), stored.view, mask=CAUSAL, key_ends=torch.tensor([1]).int())
