"""Converted checkpoints as stock transformers loads and runs them: DeepSeek-V3 in name, the source in what it
says.
"""

import json

import pytest
import torch
from checkpoint_helpers import contents
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from attnlib import CAUSAL, GroupedQueryAttention, KVCache, MultiHeadLatentAttention
from attnlib.convert import Calibration
from attnlib.convert.checkpoint import CheckpointError, ConvertedLayer, convert
from attnlib.convert.checkpoint.source_rope import rope_of
from attnlib.convert.latent.deepseek import converter, deepseek_config
from attnlib.convert.latent.deepseek_layer import gqa_to_deepseek

KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
D, WIDTH = 16, 48
SIZES = {"vocab_size": 97, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": D, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
SOURCES = {
    "llama": ("llama", {}),
    "biased llama": ("llama", {"attention_bias": True}),
    "tied llama": ("llama", {"tie_word_embeddings": True, "bos_token_id": 3, "eos_token_id": [4, 5]}),
    "linear llama": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 1e5}},
    ),
    "yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 100.0}}),
    "yarn with a factor": (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 100.0, "attention_factor": 0.7}},
    ),
    "yarn with mscale": (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 50.0, "mscale": 2.0, "mscale_all_dim": 0.5}},
    ),
    "biased yarn": ("qwen2", {"rope_parameters": YARN | {"rope_theta": 100.0, "truncate": False}}),
    "mistral": ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}
TOKENS = torch.arange(60).view(2, 30)


def source_of(folder, name="llama", dtype=torch.float32, **options):
    """A model with random weights, biases and norms, saved in a folder."""
    kind, own = SOURCES[name]
    model = AutoModelForCausalLM.from_config(KINDS[kind](**(SIZES | own | options))).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim > 1 else 0.5)
            parameter.copy_(noise + ("norm" in key))
    model.save_pretrained(folder)
    return model


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def run(source, out, rank=D + 1, **options):
    """Converted on disk; returns the report and the loaded model, of which every tensor was in its place."""
    parts = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    made = converter(config_of(source), rank, **({"rope_dim": D} | options))
    report = convert(source, out, made, progress=False, **parts)
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert not any(info.values()), info
    return report, model.eval()


@torch.no_grad()
def logits(model, tokens=TOKENS):
    return model(tokens).logits.double()


@pytest.mark.parametrize("q_rank", [None, WIDTH + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_one_kv_head_is_the_same_model_up_to_rounding(tmp_path, name, dtype, q_rank):
    """By the logits of transformers: not further from fp64 than twice as far as the source in its dtype."""
    old = source_of(tmp_path / "in", name, dtype)
    report, new = run(tmp_path / "in", tmp_path / "out", q_rank=q_rank)
    assert new.dtype == dtype
    error, naive = (logits(model) for model in (new, old))
    golden = logits(old.double())
    assert (error - golden).norm() < 2 * (naive - golden).norm()
    for row in report["layers"]:
        assert max(value for key, value in row.items() if key not in ("layer", "rounding")) < 1e-6
    old, new = old.config, new.config
    for key in (
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "rms_norm_eps",
        "max_position_embeddings",
    ):
        assert getattr(old, key) == getattr(new, key), key


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen2"])
def test_our_layer_is_that_of_transformers(tmp_path, name):
    source_of(tmp_path / "in", name, num_key_value_heads=2)
    _, model = run(tmp_path / "in", tmp_path / "out", rank=24, rope_dim=8)
    theirs, config = model.model.layers[1].self_attn, model.config
    rope = rope_of(config_of(tmp_path / "in"))
    rope = type(rope)(8, theta=rope.theta, scaling=rope.scaling, interleaved=True)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {key: getattr(config, key) for key in names}
    ours = MultiHeadLatentAttention(WIDTH, 4, mask=CAUSAL, rope=rope, bias=config.attention_bias, **sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20)[None]
    mask = torch.full((20, 20), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        wanted, _ = theirs(x, model.model.rotary_emb(x, positions), mask)
        torch.testing.assert_close(ours(x), wanted, rtol=1e-4, atol=1e-4)
        ours.form = "absorbed"
        cache = KVCache.contiguous([ours.kv_layout], max_sequences=2, max_length=32)
        cache.admit(2)
        outs = []
        for part in x.split((12, *[1] * 8), 1):
            with cache.step(part.shape[1]) as (kv,):
                outs.append(ours(part, kv=kv))
    torch.testing.assert_close(torch.cat(outs, 1), wanted, rtol=1e-4, atol=1e-4)


def test_trained_layers_go_back_into_a_checkpoint(tmp_path):
    source = source_of(tmp_path / "in", num_key_value_heads=2)
    config, layers = config_of(tmp_path / "in"), []
    for block in source.model.layers:
        old = GroupedQueryAttention(WIDTH, 4, num_kv_heads=2, head_dim=D, mask=CAUSAL, rope=rope_of(config))
        old.load_state_dict(block.self_attn.state_dict())
        layers.append(gqa_to_deepseek(old, 24, rope_dim=8))
        with torch.no_grad():
            layers[-1].kv_b_proj.weight.mul_(1.5)  # as if it had learnt something

    def trained(weights, shape):
        state, rope = layers[shape.index].state_dict(), layers[shape.index].rope
        return ConvertedLayer(state, deepseek_config(config, state, rope, shape))

    convert(tmp_path / "in", tmp_path / "out", trained, progress=False)
    new, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    x, positions = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(9)[None]
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    for ours, block in zip(layers, new.model.layers, strict=True):
        with torch.no_grad():
            wanted, _ = block.self_attn(x, new.model.rotary_emb(x, positions), mask)
            torch.testing.assert_close(ours(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", ["exact", "calibrated"])
def test_several_heads_are_cut_and_still_speak(tmp_path, norm):
    old = source_of(tmp_path / "in", num_key_value_heads=4)
    x = 1 + torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))
    known = {"calibrations": lambda _: Calibration.of([x])}
    report, new = run(tmp_path / "in", tmp_path / "out", rank=40, rope_dim=8, norm=norm, **known)
    assert logits(new).isfinite().all()
    assert (logits(new) - logits(old)).norm() < 1.5 * logits(old).norm()
    assert report["cache_bytes_per_token"] == {"before": 2 * 2 * 4 * D * 4, "after": 2 * (40 + 8) * 4}
    assert any(name.endswith("bias") for name in new.state_dict()) == (norm == "exact")
    for row in report["layers"]:
        assert row["rope_error"] > 0
        assert 0 < row["value_error"] < 1
    steps = new.generate(
        TOKENS[:, 5:10], max_new_tokens=6, do_sample=False, pad_token_id=96, eos_token_id=None
    )
    assert torch.equal(steps[:, 5:], logits(new, steps)[:, 4:-1].argmax(-1))


@pytest.mark.parametrize("norm", ["exact", "calibrated"])
@pytest.mark.parametrize("q_rank", [9, 33])
def test_queries_of_low_rank_are_told_and_loaded(tmp_path, norm, q_rank):
    old = source_of(tmp_path / "in")
    x = 1 + torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, WIDTH)
    known = {"calibrations": lambda _: Calibration.of([x])}
    report, new = run(tmp_path / "in", tmp_path / "out", norm=norm, q_rank=q_rank, **known)
    assert config_of(tmp_path / "out")["q_lora_rank"] == q_rank
    assert new.model.layers[0].self_attn.q_a_proj.weight.shape == (q_rank, WIDTH)
    assert logits(new).isfinite().all()
    assert not torch.equal(logits(new), logits(old))
    for row in report["layers"]:
        assert 0 < row["query_error"] < (0.3 if q_rank == 9 else 0.1)


def test_every_layer_has_its_own_calibration(tmp_path):
    source_of(tmp_path / "in", num_key_value_heads=4)
    x = torch.randn(2, 50, WIDTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, WIDTH)
    known, asked = [Calibration.of([part]) for part in x], []

    def calibrations(index):
        asked.append(index)
        return known[index]

    report, _ = run(tmp_path / "in", tmp_path / "out", rank=20, rope_dim=8, calibrations=calibrations)
    assert set(asked) == {0, 1}
    for row in report["layers"]:
        assert (
            row["key_error"] ** 2 + row["value_error"] ** 2
            < row["svd_key_error"] ** 2 + row["svd_value_error"] ** 2
        )
    assert report["layers"][0]["value_error"] != report["layers"][1]["value_error"]


def test_the_same_request_gives_the_same_bytes(tmp_path):
    source_of(tmp_path / "in", "qwen2")
    for out, options in (("a", {}), ("b", {})):
        run(tmp_path / "in", tmp_path / out, max_shard_size=20_000, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2


def test_a_stopped_conversion_goes_on(tmp_path):
    source_of(tmp_path / "in")
    made = converter(config_of(tmp_path / "in"), D + 1, rope_dim=D)

    def stops(weights, shape):
        if shape.index == 1:
            raise KeyboardInterrupt
        return made(weights, shape)

    options = {"max_shard_size": 20_000, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "in", tmp_path / "out", stops, **options)
    report = convert(tmp_path / "in", tmp_path / "out", made, **options)
    assert convert(tmp_path / "in", tmp_path / "again", made, **options) == report
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_the_config_is_a_deepseek_and_the_report_says_how(tmp_path):
    source_of(tmp_path / "in", "llama3", attention_bias=True, bos_token_id=7)
    config = config_of(tmp_path / "in") | {
        "auto_map": {"AutoConfig": "code.Evil"},
        "layer_types": ["full_attention"] * 2,
    }
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    report, _ = run(tmp_path / "in", tmp_path / "out")
    new = config_of(tmp_path / "out")
    assert new["model_type"] == "deepseek_v3"
    assert not {"head_dim", "auto_map", "layer_types", "sliding_window"} & new.keys()
    assert new["q_lora_rank"] == WIDTH + 1
    assert new["bos_token_id"] == 7
    assert new["rope_scaling"] == LLAMA3 | {"original_max_position_embeddings": 64}
    assert new["rope_parameters"] == new["rope_scaling"] | {"rope_theta": 1e5}
    assert report["config_changes"] == {
        key: new[key] for key in new if key not in config or config[key] != new[key]
    }
    assert set(report["config_keys_dropped"]) == config.keys() - new.keys()


def test_a_null_is_a_change(tmp_path):
    """DeepSeek-V3 without q_lora_rank has 1536, so that None is said."""
    source_of(tmp_path / "in")
    report, _ = run(tmp_path / "in", tmp_path / "out")
    assert report["config_changes"]["q_lora_rank"] is None


@pytest.mark.parametrize(("kind", "ends"), [("llama", (1, 2)), ("mistral", (1, 2)), ("qwen2", (None, None))])
def test_unnamed_tokens_are_those_that_the_source_had(tmp_path, kind, ends):
    source_of(tmp_path / "in", kind)
    config = {
        key: x for key, x in config_of(tmp_path / "in").items() if key not in ("bos_token_id", "eos_token_id")
    }
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    old = KINDS[kind].from_pretrained(tmp_path / "in")
    _, new = run(tmp_path / "in", tmp_path / "out")
    assert (old.bos_token_id, old.eos_token_id) == (new.config.bos_token_id, new.config.eos_token_id) == ends


PLAIN = {"model_type": "llama", **SIZES}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen3"},
            "model_type: expected one of llama, mistral, qwen2.* got qwen3, which has q_norm",
        ),
        (
            {"model_type": "olmo2"},
            "got olmo2, which has q_norm and k_norm that scale each token differently",
        ),
        ({"model_type": "gemma"}, "got gemma$"),
        ({"model_type": "nobody"}, "model_type: expected one of llama, mistral, qwen2.* got nobody$"),
        ({"model_type": ["llama"]}, "model_type: expected one of llama, mistral, qwen2.* got "),
        ({"model_type": "mistral", "sliding_window": 64}, "expected no sliding window"),
        ({"model_type": "mistral"}, "expected no sliding window"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "expected no sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "expected no sliding window"),
        ({"mlp_bias": True}, "mlp_bias: expected false"),
        ({"vocab_size": None}, "expected vocab_size and intermediate_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: loaders disagree"),
    ],
)
def test_what_deepseek_cannot_say_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        converter(PLAIN | changes, 9, rope_dim=8)


def test_a_window_that_is_switched_off_is_none():
    converter(PLAIN | {"model_type": "mistral", "sliding_window": None}, 9, rope_dim=8)
    converter(
        PLAIN | {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, 9, rope_dim=8
    )


LONG = {
    "short_factor": [1.0] * (D // 2),
    "long_factor": [2.0] * (D // 2),
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [("dynamic", {"factor": 2.0}, "DynamicNTKScaling"), ("longrope", LONG, "LongRoPEScaling")],
)
def test_ropes_of_another_form_are_refused(tmp_path, kind, options, name):
    source_of(tmp_path / "in", rope_parameters={"rope_type": kind, "rope_theta": 1e4} | options)
    with pytest.raises(
        NotImplementedError, match=f"rope: expected no scaling, .* got {name}; .* --to attnlib"
    ):
        run(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rope_dim", "turns", "truncate"), [(16, 2.0, True), (8, 2.0, True), (8, 1.5, False), (4, 1.5, False)]
)
@pytest.mark.parametrize("given", [{}, {"attention_factor": 0.7}, {"mscale": 2.0, "mscale_all_dim": 0.5}])
def test_yarn_is_told_in_deepseeks_own_form(tmp_path, rope_dim, turns, truncate, given):
    """Its pairs turn as every f-th of the source's, and a temperature is one of all channels."""
    rope = YARN | {"rope_theta": 30.0, "beta_slow": turns} | given
    old = source_of(tmp_path / "in", rope_parameters=rope)
    _, new = run(tmp_path / "in", tmp_path / "out", rank=2 * D - rope_dim + 1, rope_dim=rope_dim)
    said = config_of(tmp_path / "out")["rope_scaling"]
    assert said["rope_type"] == "yarn"
    assert said["mscale"] == said["mscale_all_dim"] == 1.0
    assert ("truncate" not in said) == truncate
    assert not {"attention_factor", "original_max_position"} & said.keys()
    inverse, wanted = (model.model.rotary_emb.inv_freq for model in (new, old))
    torch.testing.assert_close(inverse, wanted[:: D // rope_dim], rtol=1e-6, atol=0.0)
    assert new.model.rotary_emb.attention_scaling == 1.0
    attention = new.model.layers[0].self_attn
    ours = rope_of(config_of(tmp_path / "out") | {"model_type": "llama", "head_dim": rope_dim})
    assert ours == type(ours)(rope_dim, theta=30.0, scaling=ours.scaling)
    assert ours.latent_scale == pytest.approx(attention.scaling * attention.qk_head_dim**0.5)
    if rope_dim == D:
        torch.testing.assert_close(logits(new), logits(old), rtol=1e-4, atol=1e-4)


def test_yarn_of_equal_heads_is_the_same_model_in_fewer_channels_that_turn(tmp_path):
    """Keys of several heads that are alike need the channels of one; here those that do not turn are 0."""
    old = source_of(tmp_path / "in", "yarn", num_key_value_heads=2)
    with torch.no_grad():
        for block in old.model.layers:
            k = block.self_attn.k_proj.weight.view(2, 2, D // 2, WIDTH)  # heads, halves of pairs, pairs
            k[1] = k[0]
            k[:, :, 1::2] = 0
    old.save_pretrained(tmp_path / "in")
    _, new = run(tmp_path / "in", tmp_path / "out", rank=2 * 2 * D - D // 2 + 1, rope_dim=D // 2)
    torch.testing.assert_close(logits(new), logits(old), rtol=1e-4, atol=1e-4)


def test_biases_are_refused_without_a_place(tmp_path):
    source_of(tmp_path / "in", "qwen2")
    with pytest.raises(NotImplementedError, match='norm="calibrated" does not support biases'):
        run(tmp_path / "in", tmp_path / "out", rank=D, norm="calibrated")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("norm", ["exact", "calibrated"])
def test_a_device_computes_what_the_cpu_computes(tmp_path, norm):
    source_of(tmp_path / "in", num_key_value_heads=4)
    x = 1 + torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))
    options = {"rank": 40, "rope_dim": 8, "norm": norm, "calibrations": lambda _: Calibration.of([x])}
    reports, models = zip(
        *(run(tmp_path / "in", tmp_path / device, device=device, **options) for device in ("cpu", "cuda")),
        strict=True,
    )
    torch.testing.assert_close(logits(models[1]), logits(models[0]), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(*(report["layers"] for report in reports), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-7)
