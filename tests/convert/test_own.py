"""``--to attnlib`` and ``attnlib.load_pretrained``: models whose layers are each of a size of their own,
and what refuses them.
"""

import json
import shutil
from itertools import product

import family_models
import pytest
import torch
from checkpoint_helpers import contents
from family_models import DECODERS, GROUPS, HEADS, KV_HEADS, RECENT, equalise, is_as_exact, make, says, slow
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import add_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import attnlib
from attnlib.__main__ import main
from attnlib.convert.own import latent
from attnlib.convert.own.allotment import allot
from attnlib.convert.own.sizes import cache_bytes
from attnlib.integrations.transformers import PagedCache
from attnlib.models.families import STORED
from attnlib.models.own_form import layers_of

NORMED = ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "olmo2", "olmo3", "cohere")  # or with a softcap
RECENTLY = tuple(kind for kind in RECENT if not STORED[kind].is_hybrid)
RECENTLY_NORMED = tuple(
    kind for kind in RECENTLY if len(STORED[kind].weights) > 4 or kind in ("persimmon", "vaultgemma")
)
NORMED_HEADS = (  # latents read what their norms return
    *("qwen3", "qwen3_moe", "apertus", "hy_v3", "dots1", "mellum", "exaone4", "exaone_moe", "glm4_moe"),
)
MIXED = ("exaone4", "exaone_moe")  # only some layers rotate, so whole latents of layers differ in rank
REFUSED = tuple(kind for kind in NORMED if kind not in NORMED_HEADS)
LATENT_KINDS = (
    *(kind for kind in DECODERS if kind not in REFUSED),
    *slow(*(kind for kind in RECENTLY if kind not in RECENTLY_NORMED or kind in {*NORMED_HEADS} - {*MIXED})),
)
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 4.0],
        "original_max_position_embeddings": 16,
    },
}


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def tiny(config=LlamaConfig, **options):
    """A small model in which every weight shows."""
    torch.manual_seed(0)
    made = config(**TINY | {"rope_parameters": ROPES["plain"]} | options)
    model = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for x in model.parameters():
            torch.nn.init.normal_(x, std=x.shape[-1] ** -0.5 if x.dim() > 1 else 1.0)
    return model.eval()


def run(source, out, *options, code=0):
    options = ("--no-calibration", "--quiet", *options)
    assert main([str(x) for x in ("convert", source, out, "--to", "attnlib", *options)]) == code
    return out


def report_of(out):
    return json.loads((out / "conversion_report.json").read_text())


@torch.no_grad()
def difference(model, other, length=40):
    """The largest difference of logits over some tokens, relative to the largest."""
    tokens = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))
    expected, got = model(tokens).logits, other(tokens).logits
    return float((expected - got).abs().max() / expected.abs().max())


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*DECODERS, *slow(*RECENTLY)])
def test_equal_heads_of_every_family_become_one(tmp_path, kind, dtype):
    if (kind, dtype) == ("afmoe", torch.float16):
        pytest.skip("transformers loads its norms in fp32")
    model = make(kind).to(dtype)
    equalise(model)
    out = run(
        saved(model, tmp_path / "in"), tmp_path / "out", "--kv-heads", GROUPS, "--grouping", "neighbours"
    )
    loaded = attnlib.load_pretrained(out)
    assert is_as_exact(tmp_path / "in", loaded)
    layers = [module for module in loaded.modules() if isinstance(module, attnlib.GroupedQueryAttention)]
    assert {layer.num_kv_heads for layer in layers} == {GROUPS}


def test_heads_of_a_family_that_has_no_word_for_fewer_become_fewer(tmp_path):
    model = make("gpt2")
    out = run(saved(model, tmp_path / "in"), tmp_path / "out", "--kv-heads", 2)
    loaded = attnlib.load_pretrained(out)
    assert loaded.transformer.h[0].attn.layer.k_proj.weight.shape[0] == 2 * 8
    assert says(loaded).isfinite().all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_a_whole_latent_is_the_same_function(tmp_path, kind, dtype):
    model = make(kind).to(dtype)
    dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // HEADS
    rope = getattr(model.config, "rope_parameters", None)
    rotary = 0 if rope is None else KV_HEADS * int(dim * (rope.get("partial_rotary_factor") or 1))
    options = ("--rank", 2 * KV_HEADS * dim - rotary, *(("--rope-dim", rotary) if rotary else ()))
    loaded = attnlib.load_pretrained(run(saved(model, tmp_path / "in"), tmp_path / "out", *options))
    assert loaded.dtype == dtype
    assert is_as_exact(tmp_path / "in", loaded)
    assert any(isinstance(module, attnlib.MultiHeadLatentAttention) for module in loaded.modules())


def test_what_latents_lose_to_their_dtype_is_said(tmp_path):
    """Where they lose nothing else, so that a result that is not the source's to the bit is no failure."""
    model = make("llama").to(torch.bfloat16)
    equalise(model)
    out = run(saved(model, tmp_path / "in"), tmp_path / "out", "--rank", 2 * 16, "--rope-dim", 4 * 16)
    for layer in report_of(out)["layers"]:
        assert max(layer[name] for name in ("key_error", "value_error", "rope_error")) < 1e-6
        assert 1e-4 < layer["rounding"] < 2**-8


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("window", [None, 7])
def test_latents_have_any_rope_and_window(tmp_path, rope, window):
    options = {"rope_parameters": ROPES[rope], "head_dim": 4}
    model = tiny(MistralConfig, sliding_window=window, **options)
    loaded = attnlib.load_pretrained(
        run(saved(model, tmp_path / "in"), tmp_path / "out", "--rank", 16, "--rope-dim", 16)
    )
    assert difference(model, loaded, length=12) < 1e-5
    assert difference(model, loaded, length=40) < 1e-5


def test_latents_have_biases(tmp_path):
    model = tiny(Qwen2Config)
    out = run(saved(model, tmp_path / "in"), tmp_path / "out", "--rank", 16, "--rope-dim", 16)
    assert report_of(out)["config_changes"]["layers"][0]["query_bias"]
    assert difference(model, attnlib.load_pretrained(out)) < 1e-5


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_latents_have_queries_of_low_rank(tmp_path, config):
    """As many channels as inputs are the same function; of fewer the report says what is missed."""
    model = tiny(config)
    options = ("--rank", 16, "--rope-dim", 16)
    whole = run(saved(model, tmp_path / "in"), tmp_path / "whole", *options, "--q-rank", 32)
    assert difference(model, attnlib.load_pretrained(whole)) < 1e-5
    assert all(layer["query_error"] < 1e-6 for layer in report_of(whole)["layers"])
    cut = run(tmp_path / "in", tmp_path / "cut", *options, "--q-rank", 9)
    loaded = attnlib.load_pretrained(cut)
    assert {form.q_lora_rank for form in layers_of(json.loads((cut / "config.json").read_text()))} == {9}
    assert loaded.model.layers[0].self_attn.layer.q_a_proj.weight.shape == (9, 32)
    assert (loaded.model.layers[0].self_attn.layer.q_b_proj.bias is not None) == (config is Qwen2Config)
    assert difference(model, loaded) > 1e-3
    assert all(0 < layer["query_error"] < 1 for layer in report_of(cut)["layers"])
    run(tmp_path / "in", tmp_path / "none", *options, "--q-rank", 33, code=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_whole_latents_of_layers_of_which_some_rotate_are_the_same_function(tmp_path, kind):
    options = ("--cache", "100%", "--rope-dim", KV_HEADS * make(kind).config.hidden_size // HEADS)
    loaded = attnlib.load_pretrained(run(saved(make(kind), tmp_path / "in"), tmp_path / "out", *options))
    assert is_as_exact(tmp_path / "in", loaded)


@pytest.mark.parametrize("bias", [False, True])
def test_latents_of_normalized_heads_have_biases(tmp_path, bias):
    model = tiny(Qwen3Config, head_dim=8, attention_bias=bias)
    options = ("--rank", 4 * 8, "--rope-dim", 4 * 8)
    whole = attnlib.load_pretrained(run(saved(model, tmp_path / "in"), tmp_path / "whole", *options))
    assert difference(model, whole) < 1e-5
    assert whole.config.attnlib_layers[0]["qk_norm"]
    run(tmp_path / "in", tmp_path / "none", *options, "--q-rank", 9, code=2)


def test_latents_of_normalized_heads_lose_little_of_a_text(tmp_path):
    """Calibrated on a text, a latent of half of the values is better than merged heads of as many."""
    add_tokenizer(saved(tiny(Qwen3Config, head_dim=8, vocab_size=130), tmp_path / "in"))
    found = {}
    for name, size in (("latents", ("--rank", 16, "--rope-dim", 16)), ("heads", ("--kv-heads", 2))):
        given = ("convert", tmp_path / "in", tmp_path / name, "--to", "attnlib", *size, "--samples", 16)
        assert main([str(x) for x in (*given, "--length", 64, "--quiet")]) == 0
        found[name] = report_of(tmp_path / name)["measures"]["kl_nats"]
    assert 0 < found["latents"] < found["heads"]


@pytest.mark.parametrize(
    "kind", [*REFUSED, *slow(*(kind for kind in RECENTLY_NORMED if kind not in NORMED_HEADS))]
)
def test_what_latents_cannot_do_is_refused(tmp_path, kind, capsys):
    run(saved(make(kind), tmp_path / "in"), tmp_path / "out", "--rank", 16, code=2)
    assert not (tmp_path / "out").exists()
    assert "--to attnlib" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--kv-heads", 2), ("--rank", 16), ("--cache", "50%")])
def test_hybrids_are_refused(tmp_path, options, capsys):
    run(saved(make("lfm2"), tmp_path / "in"), tmp_path / "out", *options, code=2)
    assert "--to attnlib: expected attention in every layer, and lfm2 has" in capsys.readouterr().err


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tiny(), tmp_path_factory.mktemp("own") / "in")


@pytest.mark.parametrize("options", [("--layers", "gqa"), ("--rope-dim", "8")])
def test_a_cache_is_shared_by_what_layers_lose(tmp_path, source, options):
    out = run(source, tmp_path / "out", "--cache", "62%", *options)
    report = report_of(out)
    before, after = (report["cache_bytes_per_token"][when] for when in ("before", "after"))
    assert after <= 0.62 * before
    forms = layers_of(json.loads((out / "config.json").read_text()))
    sizes = [getattr(form, "num_key_value_heads", None) or form.kv_lora_rank for form in forms]
    assert sizes == report["settings"]["sizes"]
    loaded = attnlib.load_pretrained(out)
    layers = (layer.self_attn.layer for layer in loaded.model.layers)
    assert sum(layer.kv_layout.token_bytes for layer in layers) == after


def test_layers_of_sizes_of_their_own_decode_as_they_attend(tmp_path, source):
    out = run(source, tmp_path / "out", "--cache", "75%", "--layers", "gqa")
    assert len({*report_of(out)["settings"]["sizes"]}) > 1
    model = attnlib.load_pretrained(out).eval()
    tokens, asked = (
        torch.arange(3, 25).view(2, 11),
        {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0},
    )
    whole = tokens
    with torch.no_grad():
        for _ in range(7):
            whole = torch.cat((whole, model(whole).logits[:, -1:].argmax(-1)), 1)
    padding = {"attention_mask": torch.ones_like(tokens)}
    assert model.generate(tokens, **padding, **asked).equal(whole)
    cache = PagedCache(model, pages=16, page_size=16, max_sequences=2)
    assert model.generate(tokens, **padding, **cache.as_argument, **asked).equal(whole)


@pytest.mark.parametrize("kind", ["llama", "smollm3", "qwen3"])  # smollm3 has layers without rope
def test_latents_decode_as_they_attend(tmp_path, source, kind):
    source = source if kind == "llama" else saved(make(kind), tmp_path / "in")
    out = run(source, tmp_path / "out", "--rank", 12, "--rope-dim", 8)
    model = attnlib.load_pretrained(out).eval()
    tokens, asked = (
        torch.arange(3, 25).view(2, 11),
        {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0},
    )
    padding = {"attention_mask": torch.ones_like(tokens)}
    made = model.generate(tokens, **padding, **asked)
    with torch.no_grad():
        assert model(made).logits[:, 10:-1].argmax(-1).equal(made[:, 11:])
    cache = PagedCache(model, pages=16, page_size=16, max_sequences=2)
    assert model.generate(tokens, **padding, **cache.as_argument, **asked).equal(made)


def test_a_loaded_model_trains_and_is_saved_as_it_was_read(tmp_path, source):
    out = run(source, tmp_path / "out", "--rank", 12, "--rope-dim", 8)
    model = attnlib.load_pretrained(out, dtype=torch.float32).train()
    tokens = torch.randint(3, 60, (2, 11))
    model(tokens, labels=tokens).loss.backward()
    assert all(x.grad is not None and x.grad.any() for x in model.parameters() if x.dim() > 1)
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    first = json.loads((out / "config.json").read_text())
    assert again["layers"] == first["layers"]
    assert again["base"]["model_type"] == "llama"
    assert "attnlib_layers" not in again["base"]
    assert difference(model.eval(), attnlib.load_pretrained(tmp_path / "again")) == 0


def test_others_refuse_the_folder(tmp_path, source):
    out = run(source, tmp_path / "out", "--kv-heads", 2)
    with pytest.raises(ValueError, match="attnlib"):
        AutoModelForCausalLM.from_pretrained(out)


def test_stock_folders_are_loaded_too(source):
    model = attnlib.load_pretrained(source)
    assert type(model) is LlamaForCausalLM
    assert any(isinstance(module, attnlib.GroupedQueryAttention) for module in model.modules())
    assert difference(AutoModelForCausalLM.from_pretrained(source), model) < 1e-5


@pytest.mark.parametrize("how", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, source, how):
    out = run(source, tmp_path / "out", "--kv-heads", 2)
    weights, name = load_file(out / "model.safetensors"), "model.layers.1.self_attn.layer.k_proj.weight"
    taken = weights.pop(name)
    weights |= {
        "missing": {},
        "unexpected": {name: taken, f"{name}s": taken},
        "mismatched": {name: taken[:-1]},
    }[how]
    save_file({key: x.clone() for key, x in weights.items()}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"got {how} .*{name}"):
        attnlib.load_pretrained(out)


@pytest.mark.parametrize("own", [False, True])
def test_tensors_that_no_model_has_are_passed_over(tmp_path, source, own):
    """As transformers does; a conversion copies them."""
    shutil.copytree(source, tmp_path / "in")
    weights = load_file(source / "model.safetensors") | {"model.layers.0.spare": torch.ones(2)}
    save_file(weights, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    folder = run(tmp_path / "in", tmp_path / "out", "--kv-heads", 4) if own else tmp_path / "in"
    assert "model.layers.0.spare" in load_file(folder / "model.safetensors")
    assert difference(AutoModelForCausalLM.from_pretrained(source), attnlib.load_pretrained(folder)) < 1e-5


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"layers": []}, ValueError, "layers: expected one entry"),
        ({"layers": [{"num_key_value_heads": 2}]}, ValueError, "layers: expected 3, as base says, got 1"),
        ({"layers": [{"num_key_value_heads": 3}] * 3}, ValueError, "num_kv_heads: expected a divisor"),
        ({"version": 7}, ValueError, "version: expected 1"),
        ({"base": {"model_type": "nobody"}}, ValueError, "nobody"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path, source, change, error, reason):
    out = run(source, tmp_path / "out", "--kv-heads", 2)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(error, match=reason):
        attnlib.load_pretrained(out)


def test_latents_where_the_model_has_what_they_have_not_are_refused(tmp_path, source):
    out = run(source, tmp_path / "out", "--rank", 12, "--rope-dim", 8)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"base": make("gemma2").config.to_dict()}))
    with pytest.raises((ValueError, NotImplementedError), match="layers: expected"):
        attnlib.load_pretrained(out)


def test_an_interrupted_run_gives_the_same_bytes(tmp_path, source, monkeypatch, capsys):
    honest, calls = latent.latent_state, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(latent, "latent_state", interrupted)
    options = ("--rank", 12, "--rope-dim", 8, "--max-shard-size", "12KB")
    run(source, tmp_path / "out", *options, code=130)
    assert "run the same command again to resume" in capsys.readouterr().err
    run(source, tmp_path / "out", *options)
    run(source, tmp_path / "whole", *options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "one of --kv-heads, --rank, --cache, --select: required with --to attnlib"),
        (("--rank", 8, "--kv-heads", 2), "--kv-heads, --rank: expected only one of them"),
        (("--rank", 8, "--cache", "50%"), "--rank, --cache: expected only one of them"),
        (("--rank", 8, "--merge", "mean"), "--merge: does not apply"),
        (("--kv-heads", 2, "--rope-dim", 8), "--rope-dim: does not apply"),
        (("--kv-heads", 2, "--norm", "exact"), "--norm: does not apply"),
        (("--kv-heads", 2, "--layers", "gqa"), "--layers: applies only with --cache"),
        (("--cache", "lots"), "--cache: expected bytes per token, or a share"),
        (("--cache", "101%"), "--cache: expected at most the source's"),
        (("--cache", "1%"), "--cache: expected at least"),
        (("--kv-heads", 3), "--kv-heads: expected a divisor"),
        (("--rank", 999), "--rank: expected 1 to"),
        (("--rank", 8, "--rope-dim", 7), "--rope-dim: expected an even number"),
    ],
)
def test_requests_that_are_wrong(tmp_path, source, options, reason, capsys):
    run(source, tmp_path / "out", *options, code=2)
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [("--layers", "gqa"), ("--rope-dim", "8")])
def test_a_cache_is_shared_by_what_a_text_shows(tmp_path, options):
    add_tokenizer(saved(tiny(vocab_size=130), tmp_path / "in"))
    text = ("--samples", "4", "--length", "16", "--quiet", "--cache", "62%", *options)
    given = [str(x) for x in ("convert", tmp_path / "in", tmp_path / "out", "--to", "attnlib", *text)]
    assert main(given) == 0
    report = report_of(tmp_path / "out")
    assert report["cache_bytes_per_token"]["after"] <= 0.62 * report["cache_bytes_per_token"]["before"]
    assert report["measures"]["kl_nats"] > 0
    assert not [path for path in tmp_path.iterdir() if path.name not in ("in", "out")]


@pytest.mark.parametrize("options", [("--kv-heads", 2), ("--cache", "35%")])
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox"])
def test_a_text_helps_who_has_no_word_for_fewer_heads(tmp_path, kind, options, monkeypatch):
    monkeypatch.setitem(family_models.SIZES, "vocab_size", 130)
    add_tokenizer(saved(make(kind), tmp_path / "in"))
    run(tmp_path / "in", tmp_path / "alone", *options)
    given = (
        "convert",
        tmp_path / "in",
        tmp_path / "out",
        "--to",
        "attnlib",
        "--samples",
        8,
        "--quiet",
        *options,
    )
    assert main([str(x) for x in given]) == 0
    alone, out = (report_of(tmp_path / name)["measures"]["kl_nats"] for name in ("alone", "out"))
    assert 0 < out < 0.8 * alone


@given(
    st.lists(
        st.dictionaries(st.sampled_from((2, 4, 6, 10)), st.floats(0, 9, width=16), min_size=1),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 45),
)
@settings(max_examples=150)
def test_no_other_sizes_lose_less(losses, total):
    ways = [
        (sum(options[size] for options, size in zip(losses, way, strict=True)), sum(way))
        for way in product(*losses)
        if sum(way) <= total
    ]
    if not ways:
        with pytest.raises(ValueError, match="expected at least"):
            allot(losses, total)
        return
    found = allot(losses, total)
    assert sum(found) <= total
    assert sum(options[size] for options, size in zip(losses, found, strict=True)) == pytest.approx(
        min(ways)[0]
    )


def test_a_cache_is_bytes_or_a_share():
    assert cache_bytes("50 %", 1000) == 500
    assert cache_bytes(" 512", 1000) == 512


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "size",
    [("--kv-heads", "2"), ("--cache", "60%", "--layers", "gqa"), ("--rank", "80"), ("--cache", "55%")],
    ids=" ".join,
)
def test_a_gpu_says_the_same(tmp_path, size, dtype):
    wide = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    source = saved(tiny(**wide).to(dtype), tmp_path / "in")
    out = run(source, tmp_path / "out", *map(str, size))
    model, other = (
        attnlib.load_pretrained(out, dtype=x, device=where)
        for x, where in ((torch.float32, "cpu"), (dtype, "cuda"))
    )
    tokens = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = model(tokens).logits, other(tokens.cuda()).logits.float().cpu()
    torch.testing.assert_close(
        got, expected, atol=(1e-3 if dtype == torch.float32 else 0.1) * expected.abs().max().item(), rtol=0
    )
    cache = PagedCache(other, pages=16, page_size=64, max_sequences=2)
    asked = {
        "max_new_tokens": 9,
        "do_sample": False,
        "attention_mask": torch.ones_like(tokens).cuda(),
        "pad_token_id": 0,
    }
    made = other.generate(tokens.cuda(), **cache.as_argument, **asked)
    with torch.no_grad():
        steps = other(made).logits[:, 39:-1].float()
    chosen = steps.gather(-1, made[:, 40:, None])[..., 0]
    assert (steps.amax(-1) - chosen).max() <= (1e-3 if dtype == torch.float32 else 0.1) * steps.abs().max()
