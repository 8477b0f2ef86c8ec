"""The expanded form over a cache, in chunks: equal to the absorbed one and to a prompt at once, in bounded
memory.
"""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_helpers import (
    ABSORBED,
    EXPANDED,
    HIDDEN,
    Stack,
    alone,
    cache_for,
    calls,
    close,
    feed,
    feed_dense,
    latent,
    stack,
    tokens,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib import CAUSAL, FULL, Mask, sliding
from attnlib.layers import latent_forms

OPTIONS = {
    "plain": {},
    "q-lora": {"q_lora_rank": 10},
    "no-rope-channels": {"qk_rope_head_dim": 0},
    "scale": {"scale": 0.7},
    "full": {"mask": FULL},
    "window": {"mask": sliding(5)},
    "window-ahead": {"mask": Mask(left=9, right=3)},
    "past-only": {"mask": Mask(right=-2)},
    "nothing": {"mask": Mask(left=-50)},
    "prefix": {"mask": Mask(right=0, prefix=7)},
}
WIDE = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # worth expanding from some 20 queries on

chunks = st.sampled_from((1, 4, 10, 64))
page_sizes = st.sampled_from((None, 1, 4, 16))
counts = st.one_of(st.integers(0, 3), st.integers(0, 20))  # more than 16 make a prefill
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True, scope="module")
def _poison():
    """Free pages hold NaN: whatever reads beyond its sequence shows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNLIB_CHECK", "1")
        yield


@pytest.fixture(autouse=True)
def _any_prompt(monkeypatch):
    """Prompts among others are expanded however little that spares."""
    monkeypatch.setattr(latent_forms, "WORTH", 0)


def chunk_of(tokens: int):
    """Chunks of so many tokens of all sequences together, or of as many as a step has queries."""
    return mock.patch.object(latent_forms, "CHUNK", tokens)


def pair(page_size, store=None, **options):
    """One layer in both forms, each with a cache of its own."""
    layers = [latent(form, **options) for form in ("expanded", "absorbed")]
    layers[1].load_state_dict(layers[0].state_dict())
    return [(Stack(layer), cache_for(Stack(layer), page_size, length=96, store=store)) for layer in layers]


# One function


@pytest.mark.parametrize("case", OPTIONS)
@settings(max_examples=2, deadline=None)
@given(chunks, page_sizes, st.lists(st.tuples(counts, counts), min_size=2, max_size=4), seeds)
def test_packed_steps_in_chunks_equal_the_absorbed_form(case, size, page_size, steps, seed):
    outs = []
    for model, cache in pair(page_size, **OPTIONS[case]):
        one, two = cache.admit(2)
        with chunk_of(size):
            fed = [
                feed(model, cache, {two: tokens(m, seed=seed), one: tokens(n, seed=seed + 1)})
                for n, m in steps
            ]
        outs.append([torch.cat([out[handle] for out in fed]) for handle in (one, two)])
    for ours, theirs in zip(*outs, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("case", OPTIONS)
@settings(max_examples=2, deadline=None)
@given(
    chunks,
    page_sizes,
    st.lists(counts, min_size=2, max_size=4),
    st.lists(counts, min_size=3, max_size=3),
    seeds,
)
def test_padded_dense_steps_in_chunks_equal_the_absorbed_form(case, size, page_size, steps, padding, seed):
    """The padding itself is NaN: it is stored and never seen."""
    x, outs = tokens(3, sum(steps), seed=seed), []
    for row, n in zip(x, padding, strict=True):
        row[:n] = torch.nan
    for model, cache in pair(page_size, **OPTIONS[case]):
        cache.admit(3, left_padding=padding)
        with chunk_of(size):
            outs.append(torch.cat([feed_dense(model, cache, part) for part in x.split(steps, 1)], 1))
    for n, ours, theirs in zip(padding, *outs, strict=True):
        close(ours[n:], theirs[n:])


@pytest.mark.parametrize("kind", ["mla-expanded", "mla-auto"])
@settings(max_examples=10, deadline=None)
@given(chunks, page_sizes, st.lists(st.tuples(counts, st.integers(17, 25)), min_size=1, max_size=3), seeds)
def test_a_prompt_in_pieces_equals_the_prompt_at_once(kind, size, page_size, steps, seed):
    model = stack(kind, (sliding(9), CAUSAL), **WIDE)
    cache = cache_for(model, page_size, length=96)
    one, two = cache.admit(2)
    fed = {
        one: tokens(sum(n for n, _ in steps), seed=seed),
        two: tokens(sum(m for _, m in steps), seed=seed + 1),
    }
    pieces = {one: fed[one].split([n for n, _ in steps]), two: fed[two].split([m for _, m in steps])}
    with chunk_of(size):
        outs = [feed(model, cache, {one: n, two: m}) for n, m in zip(*pieces.values(), strict=True)]
    for handle, x in fed.items():
        close(torch.cat([out[handle] for out in outs]), alone(model, x))


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [None, 1, 4, 16])
def test_a_quantised_cache_in_chunks_equals_the_absorbed_form(page_size, store):
    outs = []
    for model, cache in pair(page_size, store):
        one, two = cache.admit(2)
        with chunk_of(4):
            fed = [
                feed(model, cache, {one: tokens(n, seed=n), two: tokens(3, seed=n)}) for n in (5, 40, 1, 18)
            ]
        outs.append([torch.cat(list(out.values())) for out in fed])
    for ours, theirs in zip(*outs, strict=True):
        close(ours, theirs)


@settings(max_examples=10, deadline=None)
@given(chunks, page_sizes, st.lists(st.integers(0, 30), min_size=2, max_size=2), st.integers(0, 20))
def test_a_stored_context_in_chunks_is_the_context_at_once(size, page_size, lengths, queries):
    layer, x = latent("expanded", rope=False, mask=FULL), tokens(2, queries)
    contexts = [tokens(n, seed=n) for n in lengths]
    cache = cache_for(Stack(layer), page_size)
    handles = cache.admit(2)
    with torch.no_grad(), chunk_of(size):
        with cache.step(dict(zip(handles, lengths, strict=True))) as (kv,):
            layer.append_context(torch.cat(contexts), kv)
        with cache.read(queries) as (kv,):
            dense = layer(x, context=kv.view())
        with cache.read({handles[1]: 1, handles[0]: queries}) as (kv,):
            packed = layer(torch.cat((tokens(1), x[0])), context=kv.view())
    for out, row, context in zip(dense, x, contexts, strict=True):
        close(out, alone(layer, row, context=context[None]))
    close(packed, torch.cat((alone(layer, tokens(1), context=contexts[1][None]), dense[0])))


def test_garbage_in_the_table_is_never_followed():
    layer = latent("expanded", mask=FULL, rope=False)
    cache = cache_for(Stack(layer), 4)
    one, two, _ = cache.admit(3)
    with torch.no_grad(), chunk_of(8):
        with cache.step({one: 5, two: 9}) as (kv,):
            layer.append_context(tokens(14), kv)
        with cache.read(3) as (kv,):
            view, x = kv.view(), tokens(3, 3)
            out, table = layer(x, context=view), view.table.clone()
            for row, pages in zip(table, (2, 3, 0), strict=True):
                row[pages:] = torch.tensor([2**30, -7, 5]).repeat(4)[: len(row) - pages]
            assert torch.equal(layer(x, context=replace(view, table=table)), out)
    assert out.isfinite().all()


def test_a_step_of_no_sequence():
    for model, cache in pair(4):
        assert feed_dense(model, cache, tokens(0, 1)).shape == (0, 1, HIDDEN)


def test_many_chunks_round_as_often_as_one():
    layer, x = latent("expanded", dtype=torch.bfloat16), tokens(2, 256, dtype=torch.bfloat16)
    cache = cache_for(Stack(layer), length=256)
    cache.admit(2)
    feed_dense(Stack(layer), cache, x[:, :255])
    with chunk_of(2), torch.no_grad(), cache.step(1) as (kv,):
        last = layer(x[:, 255:], kv=kv)  # of 255 merges
    at_once, truth = layer(x), copy.deepcopy(layer).double()(x.double())
    ours, theirs = ((out.double() - truth[:, 255:]).norm() for out in (last, at_once[:, 255:]))
    assert ours <= 1.5 * theirs


# Bounded memory


class Largest(TorchDispatchMode):
    """The most values that any tensor made meanwhile has."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.numel = max(self.numel, *made, 0)
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_no_tensor_is_larger_than_the_keys_of_a_chunk(packed):
    model, size = Stack(latent("auto", **WIDE)), 64
    cache = cache_for(model, 4, sequences=2, length=300)
    one, two = cache.admit(2)
    feed_dense(model, cache, tokens(2, 250))
    with chunk_of(size), calls() as seen, Largest() as largest:
        if packed:
            feed(model, cache, {one: tokens(30), two: tokens(30)})
        else:
            feed_dense(model, cache, tokens(2, 30))
    assert {shape[-1] for _, shape in seen} == {16 + 4}  # expanded
    assert largest.numel == size * 4 * (16 + 16)  # tokens, heads, and what kv_b_proj makes for each


def test_there_are_as_many_chunks_as_the_longest_sequence_may_have():
    """Of a prompt: 40 tokens, known to be at most 64, and 18 more. Of a token: the capacity of the table."""
    layer = latent("expanded")
    windowed = latent("expanded", mask=sliding(7))
    expected = {
        layer: {18: -(-(64 + 18) // 18), 1: 128 // 4},
        windowed: {18: -(-(6 + 18) // 18), 1: -(-(6 + 1) // 4)},
    }
    for layer, by_queries in expected.items():
        cache = cache_for(Stack(layer), 4, sequences=1, length=128)
        cache.admit(1)
        feed_dense(Stack(layer), cache, tokens(1, 40))
        for queries, count in by_queries.items():
            with chunk_of(4), calls() as seen:
                feed_dense(Stack(layer), cache, tokens(1, queries))
            assert seen == [("varlen_attention_with_lse", (queries, 4, EXPANDED))] * count


# Which form runs


def widths(step, *, history=300, form="auto", **options):
    """How wide the queries of a step are after so many tokens of each sequence."""
    model = Stack(latent(form, **WIDE | options))
    cache = cache_for(model, 16, sequences=2, length=400)
    handles = cache.admit(2 if isinstance(step, dict) else 1)
    for _ in range(history // 100):
        feed_dense(model, cache, tokens(len(handles), 100))
    with calls() as seen:
        if isinstance(step, dict):
            feed(model, cache, {handles[n]: tokens(count) for n, count in step.items()})
        else:
            feed_dense(model, cache, tokens(1, step))
    return {shape[-1] for _, shape in seen}


@pytest.mark.parametrize(
    ("step", "options", "forms"),
    [
        (20, {}, "absorbed"),  # over 300 keys, known to be at most 512
        (21, {}, "expanded"),
        ({0: 30, 1: 25}, {}, "expanded"),
        ({0: 18, 1: 17}, {}, "absorbed"),
        ({0: 30, 1: 18}, {}, "expanded absorbed"),
        ({0: 30, 1: 18}, {"form": "expanded"}, "expanded"),
        ({0: 30, 1: 18}, {"form": "absorbed"}, "absorbed"),
        (17, {"mask": sliding(9)}, "expanded"),  # of which 8 are seen
        ({0: 17, 1: 1}, {"mask": sliding(9)}, "expanded absorbed"),
        (16, {"mask": sliding(2)}, "absorbed"),  # no prefill
    ],
)
def test_a_prompt_goes_on_in_the_cheaper_form(step, options, forms):
    width = {"absorbed": 64 + 4, "expanded": 16 + 4}
    assert widths(step, **options) == {width[form] for form in forms.split()}
    if isinstance(step, int) and not options:
        sizes = {"rank": 64, "nope": 16, "rope": 4, "value": 16}
        assert latent_forms.cheaper_form(step, 512 + step, **sizes) == forms


@pytest.mark.parametrize("case", ["plain", "window", "prefix", "no-rope-channels"])
@pytest.mark.parametrize("page_size", [4, None])
def test_prompts_among_single_tokens_are_expanded_alone(case, page_size):
    """The others are absorbed in one call, and the step equals that of a layer which absorbs all of it."""
    step, stored, outs = {0: 1, 1: 40, 2: 0, 3: 2, 4: 24, 5: 1}, (30, 3, 9, 1, 0, 17), []
    layers = [latent(form, **WIDE | OPTIONS[case]) for form in ("auto", "absorbed")]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        model = Stack(layer)
        cache = cache_for(model, page_size, sequences=6, length=96)
        handles = cache.admit(6)
        feed(model, cache, {handle: tokens(n, seed=n) for handle, n in zip(handles, stored, strict=True)})
        with calls() as seen, chunk_of(16):
            outs.append(feed(model, cache, {handles[n]: tokens(count, seed=n) for n, count in step.items()}))
        mixed = {("cached_attention", 4), *(("varlen_attention_with_lse", n) for n in (40, 24))}
        assert {(name, shape[0]) for name, shape in seen} == (
            mixed if layer.form == "auto" else {("cached_attention", sum(step.values()))}
        )
    for ours, theirs in zip(*(out.values() for out in outs), strict=True):
        close(ours, theirs)


def test_a_prompt_among_others_is_expanded_where_that_spares_much(monkeypatch):
    step, sizes = {0: 30, 1: 1}, {"rank": 64, "nope": 16, "rope": 4, "value": 16}
    spared = (
        30 * 64 * 32 + 30 * 330 * (2 * 64 - 32) - 330 * 64 * 32
    )  # multiplications of a head, of which there are 4
    for least, form in ((spared, "expanded"), (spared + 1, "absorbed")):
        assert latent_forms.cheaper_form(30, 330, **sizes, least=least) == form
        monkeypatch.setattr(latent_forms, "WORTH", 4 * least)
        assert widths(step) == ({16 + 4, 64 + 4} if form == "expanded" else {64 + 4})


def test_a_small_rank_goes_on_absorbed():
    assert widths(100, kv_lora_rank=12, qk_nope_head_dim=16, v_head_dim=16) == {12 + 4}
    assert ABSORBED == 12 + 4


# Compiled


def test_expanded_steps_compile_to_one_graph():
    torch._dynamo.reset()
    model = Stack(latent("expanded", dtype=torch.float32))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    outs = []
    for f in (run, model):
        cache = cache_for(model, 4, sequences=2, length=24)
        cache.admit(2)
        feed_dense(model, cache, tokens(2, 1, dtype=torch.float32))
        with chunk_of(24):  # two chunks a step
            steps = [tokens(2, n, seed=n, dtype=torch.float32) for n in (1, 1, 18, 1)]
            outs.append(torch.cat([feed_dense(f, cache, x) for x in steps], 1))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2  # a token each, and a prompt
    torch._dynamo.reset()


def test_a_compiled_packed_step_has_one_form_whatever_its_prompts_are():
    torch._dynamo.reset()
    model = Stack(latent("auto", dtype=torch.float32, **WIDE))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    outs = []
    for f in (run, model):
        cache = cache_for(model, 4, sequences=3, length=128)
        handles = cache.admit(3)
        feed_dense(model, cache, tokens(3, 33, dtype=torch.float32))
        for counts in ((1, 20, 1), (20, 1, 1), (1, 1, 20)):  # their history stays below 64
            step = {x: tokens(n, seed=n, dtype=torch.float32) for x, n in zip(handles, counts, strict=True)}
            outs.append(torch.cat(list(feed(f, cache, step).values())))
    torch.testing.assert_close(outs[:3], outs[3:], rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


# What is refused


def stored(**options):
    """A layer for cross-attention, and a cache of two contexts."""
    layer = latent("expanded", rope=False, **options)
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with torch.no_grad(), cache.step(6) as (kv,):
        layer.append_context(tokens(2, 6), kv)
    return layer, cache


@pytest.mark.parametrize("x", [tokens(3, 2), tokens(2)])
def test_x_has_the_shape_of_the_read(x):
    layer, cache = stored(mask=FULL)
    with (
        pytest.raises(ValueError, match=r"q: expected \[b=2, s, h, d\]"),
        torch.no_grad(),
        cache.read(1) as (kv,),
    ):
        layer(x, context=kv.view())
    handle, _ = cache._sequences.handles
    with (
        pytest.raises(ValueError, match=r"q: expected \[t, h, d\]"),
        torch.no_grad(),
        cache.read({handle: 2}) as (kv,),
    ):
        layer(tokens(1, 2), context=kv.view())


def test_a_mask_beyond_the_window_of_the_cache_is_refused():
    layer, cache = stored(mask=sliding(3))
    for mask, reach in ((sliding(4), "3 keys"), (CAUSAL, "without bound")):
        layer.mask = mask
        with pytest.raises(
            ValueError, match=f"mask: it reaches back {reach}, and the cache keeps a window of 3"
        ):
            feed_dense(Stack(layer), cache, tokens(2, 1))


@pytest.mark.parametrize("trained", ["q_proj", "kv_b_proj"])
def test_a_gradient_is_refused(trained):
    layer, cache = stored(mask=FULL)
    layer.requires_grad_(False)
    getattr(layer, trained).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"no backward; .*no_grad"), cache.read(1) as (kv,):
        layer(tokens(2, 1), context=kv.view())
