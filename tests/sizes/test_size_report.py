"""Models and their variants, the rows of a report against the allocator, and the verdict against the
clock.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from size_helpers import shapes

from attnlib import KVCache
from attnlib.sizes import CHIPS, MODELS, GroupedShape, Model, Setting, chip, model, rows, variants
from attnlib.sizes.text import human, short


def test_llama_2_7b_in_every_form():
    kib = {
        variant.kind: row.token_bytes / 1024
        for variant in variants(model("llama-2-7b"))
        for row in one(variant)
    }
    assert kib == {"MHA": 512, "GQA-8": 128, "MQA": 16, "MLA 512+64": 36, "MLA 512": 32}


def one(variant, **changes):
    return rows([variant], Setting(**{"contexts": (4096,), "batches": (1,)} | changes))


@pytest.mark.parametrize("store", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.name)
def test_the_allocator_agrees_to_the_byte(known, store):
    contexts, page_size = (1, 4_500), 64  # the longer one is past every window
    pages = 2 * -(-contexts[-1] // page_size)
    for variant in variants(known):
        layouts = variant.layouts(dtype=torch.bfloat16, storage_dtype=store)
        cache = KVCache.paged(layouts, pages=pages, page_size=page_size, max_sequences=2, device="meta")
        cache.admit(2)
        used = []
        for tokens in (1, 4_499):
            with cache.step(tokens, replay=True):  # only counted: nothing is written
                pass
            used.append(cache.used_bytes)
        answers = rows(
            [variant], Setting(contexts=contexts, batches=(2,), storage_dtype=store, page_size=page_size)
        )
        assert used == [row.cache_bytes for row in answers]
        assert cache.nbytes == answers[0].token_bytes * pages * page_size


def test_published_totals():
    """Attention parameters and cached values a token, as the papers' own tables let one count them."""
    llama = 4 * 4096**2 * 32
    assert model("llama-2-7b").parameters == llama
    by_name = {known.name: one(known)[0] for known in MODELS}
    assert (
        by_name["deepseek-v2"].token_bytes == 60 * 576 * 2
    )  # 34.6 K values a token (arXiv 2405.04434, table 1)
    assert by_name["deepseek-v3"].token_bytes == 70_272
    assert by_name["falcon-7b"].token_bytes == 32 * 2 * 64 * 2
    assert by_name["llama-3.1-405b"].token_bytes == 126 * 2 * 8 * 128 * 2
    full = [
        sum(shape.window is None for shape in known.layers)
        for known in MODELS
        if known.name.startswith("gemma-3")
    ]
    assert full == [8, 10, 6, 7]  # one layer of six, and in Gemma 3n of five


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt-2", "GPT2Config"),
        ("falcon-7b", "FalconConfig"),
        ("llama-2-7b", "LlamaConfig"),
        ("mistral-7b", "MistralConfig"),
        ("gpt-oss-120b", "GptOssConfig"),
        ("deepseek-v3", "DeepseekV3Config"),
    ],
)
def test_shapes_that_transformers_has_as_defaults(name, config):
    theirs = getattr(pytest.importorskip("transformers"), config)()
    known = model(name)
    shape = known.layers[0]
    assert len(known.layers) == theirs.num_hidden_layers
    assert (shape.hidden_size, shape.num_heads) == (theirs.hidden_size, theirs.num_attention_heads)
    if isinstance(shape, GroupedShape):
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        default = 1 if getattr(theirs, "multi_query", False) else theirs.num_attention_heads
        kv_heads = getattr(theirs, "num_key_value_heads", None) or default
        assert (shape.head_dim, shape.num_kv_heads) == (head_dim, kv_heads)
    else:
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        assert [getattr(shape, rank) for rank in ranks] == [getattr(theirs, rank) for rank in ranks]
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * len(known.layers)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [shape.window for shape in known.layers] == windows


@given(first=shapes, layers=st.integers(1, 3))
def test_variants_keep_widths_heads_and_windows_and_have_the_model_among_them(first, layers):
    own = Model("drawn", (first,) * layers, other_parameters=5)
    made = variants(own, kv_lora_rank=7, qk_rope_head_dim=2)
    assert own in made
    assert {variant.total_parameters - variant.parameters for variant in made} == {5}
    assert len(set(made)) == len(made)
    assert {"MHA", "MLA 7+2", "MLA 7"} <= {variant.kind for variant in made}
    for shape in [shape for variant in made for shape in variant.layers]:
        assert (shape.hidden_size, shape.num_heads, shape.window) == (
            first.hidden_size,
            first.num_heads,
            first.window,
        )


@given(first=shapes, layers=st.integers(1, 2))
def test_variants_are_always_in_the_same_order(first, layers):
    made = variants(Model("drawn", (first,) * layers), kv_lora_rank=7, qk_rope_head_dim=2)
    names = ("MHA", "GQA", "MQA", "MLA")
    order = [names.index(variant.kind[:3]) for variant in made]
    assert order == sorted(order)


def test_the_order_does_not_depend_on_the_model():
    kinds = ["MHA", "GQA-8", "MQA", "MLA 512+64", "MLA 512"]
    for name in ("llama-2-7b", "llama-3-70b", "deepseek-v3"):
        assert [variant.kind for variant in variants(model(name))] == kinds
    assert [variant.kind for variant in variants(model("qwen-2.5-7b"))][:3] == ["MHA", "GQA-4", "MQA"]
    assert [variant.kind for variant in variants(model("gemma-2-27b"))][:3] == ["MHA", "GQA-16", "GQA-8"]


def test_fewer_kv_heads_store_less_in_proportion():
    base = GroupedShape(hidden_size=64, num_heads=8, num_kv_heads=8, head_dim=4)
    sizes = {g: one(Model("g", (replace(base, num_kv_heads=g),)))[0].token_bytes for g in (8, 4, 2, 1)}
    assert {g: sizes[8] / size for g, size in sizes.items()} == {8: 1, 4: 2, 2: 4, 1: 8}
    kinds = [replace(base, num_kv_heads=g).kind for g in (8, 4, 1)]
    assert kinds == ["MHA", "GQA-4", "MQA"]


@pytest.mark.parametrize("on", CHIPS, ids=lambda on: on.name)
def test_the_verdict_is_what_takes_longer(on):
    models = [
        variant for name in ("deepseek-v3", "falcon-7b", "gpt-oss-20b") for variant in variants(model(name))
    ]
    answers = rows(models, Setting(contexts=(64, 16_384), batches=(1, 512), chip=on))
    for row in answers:
        computing, reading = row.decode_flops / on.flops, row.decode_bytes / on.bandwidth
        assert row.bound == ("compute" if computing > reading else "memory")
    assert {row.bound for row in answers} == {"compute", "memory"}


def test_absorbed_mla_can_be_compute_bound_where_mha_never_is():
    own = model("deepseek-v3")
    made = variants(own)
    bound = {row.variant: row.bound for row in rows(made, Setting(contexts=(32_768,), batches=(64,)))}
    assert (own.kind, bound[own.kind], bound["MHA"]) == ("MLA 512+64", "compute", "memory")


def test_no_verdict_without_the_chips_flops():
    assert one(model("gpt-2"), dtype=torch.float32)[0].bound == ""
    assert one(model("gpt-2"), dtype=torch.float16)[0].bound == "memory"


@pytest.mark.parametrize(
    ("name", "ranks", "copies"), [("llama-3-8b", 8, 1), ("llama-3-8b", 32, 4), ("deepseek-v3", 8, 8)]
)
def test_ranks_of_a_model_add_up(name, ranks, copies):
    [alone], [rank] = one(model(name)), one(model(name), ranks=ranks)
    assert rank.total_token_bytes == ranks * rank.token_bytes == copies * alone.token_bytes
    assert alone.total_token_bytes == alone.token_bytes
    assert ranks * rank.cache_bytes == copies * alone.cache_bytes


def test_more_memory_is_never_worse():
    limits = [
        (row.longest_context, row.largest_batch)
        for gib in (0, 1, 10, 100)
        for row in one(model("gemma-3-27b"), memory=gib * 2**30)
    ]
    assert limits == sorted(limits)
    assert limits[0] == (0, 0) != limits[-1]


def test_settings_and_models_that_ask_nothing_are_refused():
    with pytest.raises(ValueError, match="contexts: expected sizes of at least 1"):
        Setting(contexts=())
    with pytest.raises(ValueError, match="batches: expected sizes of at least 1"):
        Setting(batches=(1, 0))
    with pytest.raises(ValueError, match="page_size: expected at least 1 token, got 0"):
        Setting(page_size=0)
    for name in ("memory", "weights"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 0 bytes, got -1"):
            Setting(**{name: -1})
    with pytest.raises(ValueError, match="layers: expected at least 1, got none"):
        Model("empty", ())


def test_unknown_names_are_refused_with_what_is_known():
    with pytest.raises(ValueError, match=r"chip: expected one of h200, .*; got 'h20'; did you mean 'h200'\?"):
        chip("h20")
    with pytest.raises(ValueError, match=r"model: expected one of gpt-2, .*; got 'nobody'$"):
        model("nobody")


def test_every_entry_has_its_own_name_and_a_source():
    for entries in (MODELS, CHIPS):
        assert len({entry.name for entry in entries}) == len(entries)
        assert all(entry.source for entry in entries)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (36 * 1024, "36 KiB")]
)
def test_whole_sizes_have_no_decimals(size, text):
    assert human(size) == text
    assert human(1536 * 2**20) == "1.5 GiB"


def test_tokens_are_given_in_k_and_m():
    assert [short(n) for n in (1, 1000, 1024, 131_072, 2**20, 3 * 2**19)] == [
        "1",
        "1,000",
        "1K",
        "128K",
        "1M",
        "1,536K",
    ]
