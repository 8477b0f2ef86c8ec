"""``--select``: index branches beside weights that stay, in models that decode over every cache."""

import json

import pytest
import torch
from checkpoint_helpers import contents
from family_models import make
from model_helpers import add_tokenizer
from safetensors.torch import load_file
from transformers import DynamicCache, MistralConfig, Qwen2Config, StaticCache

import attnlib
from attnlib.__main__ import main
from attnlib.indexing import Chosen
from attnlib.integrations.transformers import PagedCache, selecting
from attnlib.integrations.transformers.own_selecting import ChoosesKeys
from attnlib.models.own_form import layers_of
from tests.convert.test_own import difference, report_of, run, saved, tiny

TOKENS, BLOCKS = "top=6,heads=2,head_dim=4", "top=3,heads=2,head_dim=4,block_size=4"
ASKED = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tiny(), tmp_path_factory.mktemp("select") / "in")


def loaded(source, out, *options):
    model = attnlib.load_pretrained(run(source, out, *options)).eval()
    model.generation_config.eos_token_id = None
    return model


def branches_in(out):
    return [form.select for form in layers_of(json.loads((out / "config.json").read_text()))]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_weights_stay_and_short_texts_are_read_as_before(tmp_path, kind):
    model = make(kind)
    out = run(saved(model, tmp_path / "in"), tmp_path / "out", "--select", "top=40")
    assert difference(model, attnlib.load_pretrained(out)) < 1e-6
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("in", "out"))
    kept = {name: x for name, x in after.items() if ".indexer." not in name}
    assert sum(x.numel() for x in before.values()) == sum(x.numel() for x in kept.values())
    if kind != "gpt2":  # whose projections are fused
        names = {name.replace("self_attn.", "self_attn.layer."): name for name in before}
        assert all(x.equal(before[names[name]]) for name, x in kept.items())
    assert {form.rope_pairs == () for form in branches_in(out)} == {kind == "gpt2"}


def test_equal_requests_give_equal_bytes(tmp_path, source):
    torch.manual_seed(1)
    first = run(source, tmp_path / "first", "--select", TOKENS)
    torch.manual_seed(2)
    assert contents(first) == contents(run(source, tmp_path / "second", "--select", TOKENS))
    weights = load_file(first / "model.safetensors")
    name = "model.layers.{}.self_attn.layer.indexer.q_proj.weight"
    assert not weights[name.format(0)].equal(weights[name.format(1)])
    assert weights[name.format(0)].any()


def test_the_report_counts_index_keys(tmp_path, source):
    out = run(source, tmp_path / "out", "--select", TOKENS)
    report = report_of(out)
    cache = report["cache_bytes_per_token"]
    assert cache["after"] == cache["before"] + 3 * 4 * 4  # layers, channels, bytes
    layers = attnlib.load_pretrained(out).model.layers
    assert cache["after"] == sum(x.self_attn.layer.kv_layout.token_bytes for x in layers)
    assert report["settings"]["select"] == {"top": 6, "heads": 2, "head_dim": 4, "block_size": 1}
    assert all(not any(x for name, x in layer.items() if name != "layer") for layer in report["layers"])


@pytest.mark.parametrize("size", [("--kv-heads", 2), ("--rank", 12, "--rope-dim", 8), ("--cache", "62%")])
def test_a_branch_is_added_to_other_conversions(tmp_path, source, size):
    plain = loaded(source, tmp_path / "plain", *size)
    sparse = loaded(source, tmp_path / "sparse", *size, "--select", "top=40,heads=2,head_dim=4")
    cache = report_of(tmp_path / "sparse")["cache_bytes_per_token"]
    if size[0] == "--cache":
        assert cache["after"] <= 0.62 * cache["before"]
    else:
        assert difference(plain, sparse) == 0
    assert all(branches_in(tmp_path / "sparse"))


@pytest.mark.parametrize("select", [TOKENS, BLOCKS, "top=6,heads=2,head_dim=2"])
def test_layers_choose_as_attnlib_layers_do(tmp_path, source, select):
    """The layers of the model, called by the model, and each of them called alone.

    A branch of two channels has one pair of the two in the rope of its layer.
    """
    model, x = loaded(source, tmp_path / "out", "--select", select), torch.randn(2, 30, 32)
    ids = torch.arange(30)[None]
    angles = model.model.rotary_emb(x, ids)
    for module in model.modules():
        if isinstance(module, ChoosesKeys):
            given = {"position_embeddings": angles, "position_ids": ids, "attention_mask": None}
            got, chosen = module(x, **given)[0], module.layer.choose(x)
            torch.testing.assert_close(got, module.layer(x))
            assert module.choose(x, **given).indices.equal(chosen.indices)
            dense = module(x, **given, selected=Chosen(None))[0]
            torch.testing.assert_close(dense, module.layer(x, selected=Chosen(None)))
            assert not torch.allclose(got, dense, atol=1e-3)
            assert module.index_loss(x, **given, selected=chosen) == module.layer.index_loss(
                x, selected=chosen
            )


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [(), ("--rank", 12, "--rope-dim", 8)], ids=["heads", "latents"])
@pytest.mark.parametrize("select", [TOKENS, BLOCKS], ids=["tokens", "blocks"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_models_decode_over_every_cache(tmp_path, source, size, select, padded):
    model = loaded(source, tmp_path / "out", *size, "--select", select)
    tokens = torch.randint(3, 60, (3, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5], mask[1, :17] = 0, 0
    pages = PagedCache(model, pages=96, page_size=4, max_sequences=8)
    assert {layout.index_dim for layout in pages.kv.layouts} == {4}
    found = {
        name: model.generate(tokens, attention_mask=mask, **ASKED, **given)
        for name, given in (
            ("dynamic", {}),
            ("static", {"cache_implementation": "static"}),
            ("pages", pages.as_argument),
        )
    }
    for way, got in found.items():
        assert got.equal(found["dynamic"]), way
    if not padded:
        whole = model(found["dynamic"]).logits
        assert whole[:, 20:-1].argmax(-1).equal(found["dynamic"][:, 21:])
    pages.reset()
    beams = [
        model.generate(tokens, attention_mask=mask, num_beams=2, **ASKED, **given)
        for given in ({}, pages.as_argument)
    ]
    assert beams[0].equal(beams[1])


@torch.no_grad()
def test_steps_before_a_choice_store_index_keys(tmp_path, source):
    """At first fewer tokens than a query chooses, then several at once; one cache has no config."""
    model = loaded(source, tmp_path / "out", "--select", TOKENS)
    tokens = torch.randint(3, 60, (2, 30), generator=torch.Generator().manual_seed(1))
    whole = model(tokens).logits
    pages = PagedCache(model, pages=96, page_size=4, max_sequences=8)
    name = next(iter(pages.as_argument))
    for cache in (DynamicCache(), DynamicCache(config=model.config), pages):
        parts = [model(part, **{name: cache}).logits for part in tokens.split([3, 2, 15, 1, 9], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_masks_with_holes_hide_keys_from_the_choice(tmp_path, source):
    model = loaded(source, tmp_path / "out", "--select", TOKENS)
    tokens, mask = torch.randint(3, 60, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[0, 4:9] = 0
    got = model(tokens, attention_mask=mask, position_ids=torch.arange(30)[None]).logits
    model.set_attn_implementation("sdpa")
    other = model(tokens, attention_mask=mask, position_ids=torch.arange(30)[None]).logits
    torch.testing.assert_close(got, other, atol=1e-4, rtol=1e-4)
    changed = tokens.clone()
    changed[0, 4:9] = 60 - changed[0, 4:9]
    seen = mask.bool()
    again = model(changed, attention_mask=mask, position_ids=torch.arange(30)[None]).logits
    torch.testing.assert_close(again[seen], other[seen], atol=1e-4, rtol=1e-4)


def test_a_cache_that_has_keys_without_index_keys_is_refused(tmp_path, source):
    plain, model = (
        loaded(source, tmp_path / "a", "--kv-heads", 2),
        loaded(source, tmp_path / "b", "--select", TOKENS),
    )
    cache, tokens = DynamicCache(), torch.arange(3, 12)[None]
    name = next(iter(PagedCache(model, pages=4, max_sequences=1).as_argument))
    plain(tokens, **{name: cache})
    with pytest.raises(NotImplementedError, match="cache: expected an empty dynamic or static cache"):
        model(tokens, **{name: cache})


def test_blocks_need_padding_on_one_side(tmp_path, source):
    model, mask = loaded(source, tmp_path / "out", "--select", BLOCKS), torch.ones(1, 30, dtype=torch.long)
    mask[0, 7] = 0
    with pytest.raises(NotImplementedError, match="attention_mask: expected padding on one side"):
        model(torch.arange(3, 33)[None], attention_mask=mask)


def test_layers_with_windows_stay(tmp_path):
    options = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    model = tiny(Qwen2Config, **options)
    out = run(saved(model, tmp_path / "in"), tmp_path / "out", "--select", TOKENS)
    kinds = [x == "full_attention" for x in model.config.layer_types]
    assert [form is not None for form in branches_in(out)] == kinds
    assert 0 < sum(kinds) < len(kinds)
    model = attnlib.load_pretrained(out).eval()
    tokens = torch.arange(3, 33)[None]
    got = model.generate(tokens, **ASKED)
    pages = PagedCache(model, pages=96, page_size=4, max_sequences=1)
    assert got.equal(model.generate(tokens, **ASKED, **pages.as_argument))


def test_a_model_whose_layers_all_have_windows_is_refused(tmp_path, capsys):
    model = tiny(MistralConfig, sliding_window=7)
    run(saved(model, tmp_path / "in"), tmp_path / "out", "--select", TOKENS, code=2)
    error = capsys.readouterr().err
    assert "--select: expected a layer that can choose among all keys, got none; layer 0: mask" in error
    assert not (tmp_path / "out").exists()


def test_a_sparse_model_is_saved_as_it_was_read(tmp_path, source):
    model = loaded(source, tmp_path / "out", "--select", TOKENS)
    model.save_pretrained(tmp_path / "again")
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("out", "again")]
    assert configs[0]["layers"] == configs[1]["layers"]
    assert difference(model, attnlib.load_pretrained(tmp_path / "again")) == 0


def test_a_comparison_is_exact_up_to_the_chosen_keys(tmp_path, capsys):
    source = saved(tiny(vocab_size=130), tmp_path / "in")
    add_tokenizer(source)
    (tmp_path / "text").write_text("".join(f"{n} green bottles\n" for n in range(99)))
    for top, exact in ((64, True), (9, False)):
        given = ("convert", source, tmp_path / str(top), "--to", "attnlib", "--select", f"top={top}")
        assert main([str(x) for x in (*given, "--text", tmp_path / "text")]) == 0
        measures = report_of(tmp_path / str(top))["measures"]
        assert (measures["kl_nats"] == 0) == exact
        shown = capsys.readouterr().out
        assert f"new index branches choose {top} keys of longer texts at random" in shown
        assert f"--context {4 * top}" in shown
        assert "calibrated on: nothing" in shown


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("512", "--select: expected one of top, heads, head_dim, block_size, as in top=512,heads=4, got 512"),
        ("heads=4", "--select: expected top=N, the keys of each query, got heads=4"),
        ("top=4,top=5", "--select: expected only once"),
        ("top=4,pool=max", "--select: expected one of top"),
        ("top=0", "--select: top: expected a count of 1"),
        ("top=4,heads=two", "--select: heads: expected a count of 1"),
        ("top=4,head_dim=-1", "--select: head_dim: expected a count of 1"),
        ("top=2000000", "--select: top: expected a count of 1 to 1048576, got 2000000"),
        (
            "top=4,heads=10000,head_dim=1000",
            "--select: heads: expected at most 1048576 channels in all heads",
        ),
    ],
)
def test_wrong_branches_are_refused(tmp_path, source, asked, reason, capsys):
    run(source, tmp_path / "out", "--select", asked, code=2)
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_cache_without_room_for_the_layers_names_index_keys(tmp_path, source, capsys):
    run(source, tmp_path / "out", "--cache", 100, "--select", "top=6,head_dim=64", code=2)
    assert "bytes, the size of the smallest layers with index keys, got 100" in capsys.readouterr().err


def test_a_rope_that_needs_lengths_needs_whole_branches(tmp_path, capsys):
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    place = saved(tiny(rope_parameters=scaling), tmp_path / "in")
    run(place, tmp_path / "out", "--select", "top=4,head_dim=2", code=2)
    assert "head_dim: expected at least" in capsys.readouterr().err
    run(place, tmp_path / "whole", "--select", "top=4")


@pytest.mark.parametrize("select", [None, TOKENS])
def test_sdpa_over_a_static_cache_is_refused_without_a_mask(tmp_path, source, select):
    options = ("--select", select) if select else ("--kv-heads", 2)
    model = loaded(source, tmp_path / "out", *options)
    tokens = torch.arange(20)[None]
    want = model(tokens).logits
    for name in ("eager", "attnlib"):
        model.set_attn_implementation(name)
        static = StaticCache(config=model.config, max_cache_len=32)
        torch.testing.assert_close(model(tokens, cache=static).logits, want, atol=1e-5, rtol=1e-5)
    model.set_attn_implementation("sdpa")
    full = StaticCache(config=model.config, max_cache_len=20)
    torch.testing.assert_close(model(tokens, cache=full).logits, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="attention_mask: expected one with a static cache of 32"):
        model(tokens, cache=StaticCache(config=model.config, max_cache_len=32))


def test_prompts_in_static_caches_make_no_square_masks(tmp_path, source, monkeypatch):
    model = loaded(source, tmp_path / "out", "--select", TOKENS)
    model.set_attn_implementation("attnlib")
    tokens, static = torch.arange(20)[None], StaticCache(config=model.config, max_cache_len=32)
    want = model(tokens).logits
    monkeypatch.setattr(selecting, "choose_visible", None)
    torch.testing.assert_close(model(tokens, cache=static).logits, want, atol=1e-5, rtol=1e-5)


def test_compiled_steps_choose_blocks(tmp_path, source):
    model = loaded(source, tmp_path / "out", "--select", BLOCKS)
    model.set_attn_implementation("attnlib")
    tokens, found = torch.arange(30)[None], []
    for step in (model, torch.compile(model, backend="eager")):
        static = StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            model(tokens[:, :-1], cache=static, attention_mask=torch.ones(1, 29).long())
            given = {"attention_mask": torch.ones(1, 30).long(), "position_ids": torch.tensor([[29]])}
            found.append(step(tokens[:, -1:], cache=static, **given).logits)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("target", [("gqa", "--kv-heads"), ("mla", "--rank")])
def test_other_targets_have_no_branches(tmp_path, source, target, capsys):
    given = (
        "convert",
        source,
        tmp_path / "out",
        "--to",
        target[0],
        target[1],
        2,
        "--select",
        "top=4",
        "--quiet",
    )
    assert main([str(x) for x in given]) == 2
    assert f"--select: does not apply to --to {target[0]}" in capsys.readouterr().err


def test_a_folder_with_pairs_that_its_rope_lacks_is_refused(tmp_path, source):
    out = run(source, tmp_path / "out", "--select", TOKENS)
    config = json.loads((out / "config.json").read_text())
    config["layers"][1]["select"]["rope_pairs"] = [0, 99]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="rope_pairs: expected numbers below 2"):
        attnlib.load_pretrained(out)
