"""``python -m attnlib convert``: what stock transformers makes of its results, every exit code, runs that
stop.
"""

import json
import re
import resource
import shutil
import sys

import pytest
import torch
from checkpoint_helpers import contents
from model_helpers import SIZES, TEXT, load, logits, save
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attnlib import CAUSAL, GroupedQueryAttention, Rope
from attnlib.__main__ import main
from attnlib.checkpoint_files.folder import read_folder
from attnlib.checkpoint_files.header import TensorEntry, make_header
from attnlib.convert import Calibration, VerificationError, command, mha_to_gqa
from attnlib.convert.check import budget, lost, stock_check
from attnlib.convert.checkpoint import conversion, writing
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.checkpoint.source_rope import rope_of
from attnlib.convert.heads import converter as converters
from attnlib.convert.latent.attended import attended
from attnlib.convert.text import choice
from attnlib.convert.text.held_out import BEHIND, SAMPLE, held_out
from attnlib.convert.text.layerwise import TextCalibration
from attnlib.convert.text.mixture import Text
from attnlib.convert.text.tokens import tokens_of
from attnlib.convert.weights import split

KINDS = ("llama", "mistral", "qwen2", "qwen3")
REPORT = "conversion_report.json"
SMALL_SHARDS = ("--max-shard-size", "12KB")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A source of each kind with 8 KV heads, and "grouped", a Llama with 4."""
    made = {kind: save(tmp_path_factory.mktemp(kind) / "in", kind) for kind in KINDS}
    return made | {"grouped": save(tmp_path_factory.mktemp("grouped") / "in", "llama", 4)}


# What a refusal begins with: an option, a file or folder, a tensor, or a layer.
BEGINNING = re.compile(
    r"(--[a-z-]+( [a-z]+)?|OUT|layer "
    r"[0-9]+|/[^:]*|[a-z.]+\.json|model[0-9a-z-]*\.safetensors|model\.[a-z0-9_.]+)"
    r"([, ].*)?:"
    r"|expected all weights of|interrupted|.* need transformers|.*Input/output error|\[Errno"
)


@pytest.fixture(autouse=True)
def refusals(monkeypatch):
    """Every refusal that a test meets begins with what it is about."""
    seen, honest = [], command._failed
    monkeypatch.setattr(
        command, "_failed", lambda reason, *rest: seen.append(reason) or honest(reason, *rest)
    )
    yield seen
    for reason in seen:
        assert BEGINNING.match(reason), reason


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return ("--text", tmp_path / "text", "--samples", "4", "--length", "20")


def run(source, out, *options, kv_heads=2):
    """The exit code of a conversion to GQA; without a calibration if no option speaks of one."""
    heads = () if kv_heads is None else ("--kv-heads", kv_heads)
    if not {"--text", "--samples", "--no-calibration"} & {*options}:
        options = (*options, "--no-calibration")
    return main([str(x) for x in ("convert", source, out, "--to", "gqa", "--quiet", *heads, *options)])


def report_of(out):
    return json.loads((out / REPORT).read_text())


def tensors_of(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def replace_tensors(folder, tensors):
    """Put ``tensors`` in place of all that a folder has."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", [*KINDS, "grouped"])
def test_stock_transformers_loads_the_result_whole(tmp_path, sources, kind, text):
    options = ("--merge", "energy", "--align", "values", "--grouping", "similar")
    assert run(sources[kind], tmp_path / "out", *options, *text, *SMALL_SHARDS) == 0
    model = load(tmp_path / "out")
    assert model.config.num_key_value_heads == 2
    assert model.config.head_dim == SIZES["head_dim"]
    assert model.model.layers[2].self_attn.k_proj.weight.shape == (8, 24)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (sources[kind], tmp_path / "out")
    )
    assert after == before | {"num_key_value_heads": 2, "head_dim": 4}
    assert logits(tmp_path / "out").isfinite().all()
    kept = {name: x for name, x in tensors_of(sources[kind]).items() if "self_attn" not in name}
    found = tensors_of(tmp_path / "out")
    assert all(found[name].equal(x) for name, x in kept.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv_heads", "dtype"), [(8, "float32"), (4, "bfloat16")])
def test_a_group_equal_source_gives_identical_logits(tmp_path, kind, kv_heads, dtype):
    """From MHA and from GQA; tied embeddings in Qwen 3. A product of fewer than 16 columns may round
    differently.
    """
    source = save(tmp_path / "in", kind, kv_heads, equal=2, dtype=dtype, head_dim=8, hidden_size=32)
    assert run(source, tmp_path / "out") == 0
    assert torch.equal(logits(tmp_path / "out"), logits(source))
    report = report_of(tmp_path / "out")
    assert max(value for layer in report["layers"] for name, value in layer.items() if name != "layer") == 0
    measures = report["measures"]
    assert (
        measures["largest_logit_difference"] < 2**-16 * measures["largest_logit"]
    )  # read in place: rounding


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "options", [(), ("--merge", "energy", "--align", "all", "--grouping", "similar")], ids=str
)
def test_a_folder_is_converted_as_layers_are(tmp_path, sources, kind, options, text):
    assert run(sources[kind], tmp_path / "out", *options, *text) == 0
    tokens = tokens_of(sources[kind], TEXT, samples=4, length=20)
    calibrations = TextCalibration(read_model(read_folder(sources[kind])), tokens)
    old, new = tensors_of(sources[kind]), tensors_of(tmp_path / "out")
    named = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    for index in range(3):
        prefix = f"model.layers.{index}.self_attn."
        state = {name.removeprefix(prefix): x for name, x in old.items() if name.startswith(prefix)}
        options_of = {"bias": "k_proj.bias" in state, "output_bias": "o_proj.bias" in state}
        layer = GroupedQueryAttention(
            24, 8, num_kv_heads=8, head_dim=4, mask=CAUSAL, rope=Rope(4), **options_of
        )
        layer.load_state_dict(state)
        wanted = mha_to_gqa(layer, 2, calibration=calibrations(index), **named).state_dict()
        assert all(new[prefix + name].equal(x) for name, x in wanted.items())


def test_the_report_says_what_was_done(tmp_path, sources, text, capsys):
    command_line = ["convert", sources["llama"], tmp_path / "out", "--to", "gqa", "--kv-heads", 2, *text]
    assert main([str(x) for x in command_line]) == 0
    report = report_of(tmp_path / "out")
    assert report["cache_bytes_per_token"] == {"before": 3 * 2 * 8 * 4 * 4, "after": 3 * 2 * 2 * 4 * 4}
    assert report["settings"]["calibration"].keys() == {"text_sha256", "samples", "length"}
    assert report["settings"]["kv_heads"] == 2
    assert report["settings"]["merge"] == "principal"
    assert all(
        row.keys() == {"layer", *converters.ERRORS} and row["key_error"] > 0.1 for row in report["layers"]
    )
    measures = report["measures"]
    assert measures["tokens"] == 8 * 128
    assert measures["text"] == BEHIND
    assert measures["kl_nats"] > 0
    printed, bar = capsys.readouterr()
    assert "verifying: 100%" in bar
    worst = max(max(row["key_error"], row["value_error"]) for row in report["layers"])
    assert "cache bytes per token: 768 before, 192 after" in printed
    assert f"{worst:.3g} in layer" in printed
    paths = {"source": sources["llama"], "out": tmp_path / "out", "texts": [tmp_path / "text"]}
    assert lost.lost(measures, **paths) in printed
    assert f"report: {tmp_path / 'out' / REPORT}" in printed


def test_measures_are_those_of_the_two_models(tmp_path, sources, text):
    assert run(sources["llama"], tmp_path / "out", *text) == 0
    tokens = held_out(sources["llama"], [Text("a", TEXT)], used=[80]).tokens
    with torch.no_grad():
        old, new = (load(folder)(tokens).logits.double() for folder in (sources["llama"], tmp_path / "out"))
    measures = report_of(tmp_path / "out")["measures"]
    assert measures["largest_logit_difference"] == pytest.approx(float((old - new).abs().max()), rel=1e-5)
    kl = torch.nn.functional.kl_div(
        new.log_softmax(-1), old.log_softmax(-1), reduction="none", log_target=True
    )
    assert measures["kl_nats"] == pytest.approx(float(kl.sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "lm_head.weight"),
        ("llama", "model.norm.weight"),
        ("qwen3", "model.embed_tokens.weight"),
        ("qwen2", "model.layers.1.mlp.up_proj.weight"),
        ("mistral", "model.layers.2.input_layernorm.weight"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.0.self_attn.k_proj.bias"),
    ],
)
@pytest.mark.parametrize("shape", [None, (3, 5)], ids=["missing", "mismatched"])
def test_a_source_without_a_weight_is_refused_before_it_is_read(
    tmp_path, sources, kind, name, shape, monkeypatch, capsys
):
    """transformers would fill it in with random numbers and say so in a log."""
    shutil.copytree(sources[kind], tmp_path / "in")
    tensors = tensors_of(sources[kind])
    del tensors[name]
    replace_tensors(tmp_path / "in", tensors if shape is None else tensors | {name: torch.ones(shape)})
    monkeypatch.setattr(conversion, "scan", lambda *_: pytest.fail("all of the source was read"))
    assert run(tmp_path / "in", tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_head_that_is_the_embedding_is_not_missing(tmp_path, sources):
    assert "lm_head.weight" not in tensors_of(sources["qwen3"])
    assert run(sources["qwen3"], tmp_path / "out") == 0
    assert report_of(tmp_path / "out")["verified"] is True


def test_a_source_that_lacks_many_weights_says_how_many(tmp_path, sources, capsys):
    shutil.copytree(sources["llama"], tmp_path / "in")
    tensors = tensors_of(sources["llama"])
    replace_tensors(tmp_path / "in", {name: x for name, x in tensors.items() if "mlp" not in name})
    assert run(tmp_path / "in", tmp_path / "out") == 3
    assert "missing model.layers.0.mlp.down_proj.weight, " in (error := capsys.readouterr().err)
    assert "and 4 more; transformers would initialize them randomly" in error


def test_without_text_the_report_says_so(tmp_path, sources):
    assert run(sources["llama"], tmp_path / "out") == 0
    report = report_of(tmp_path / "out")
    assert report["settings"]["calibration"] == "no text, only the weights"
    assert report["measures"]["text"] == SAMPLE


def test_the_other_target_is_latent_attention(tmp_path, text, capsys):
    """What it computes is tested with its converter."""
    source = save(tmp_path / "in", "llama", 4, attention_bias=False)
    options = ("--to", "mla", "--rope-dim", "4", "--reach", "64", *text)
    assert (
        run(
            source,
            tmp_path / "out",
            *options,
            "--rank",
            "16",
            "--q-rank",
            "9",
            "--norm",
            "exact",
            kv_heads=None,
        )
        == 0
    )
    assert load(tmp_path / "out").config.kv_lora_rank == 16
    assert load(tmp_path / "out").config.q_lora_rank == 9
    report = report_of(tmp_path / "out")
    assert {"rank": 16, "rope_dim": 4, "q_rank": 9, "reach": 64}.items() <= report["settings"].items()
    assert report["cache_bytes_per_token"]["after"] == 3 * (16 + 4) * 4
    assert run(source, tmp_path / "out2", *options, "--rank", "0", kv_heads=None) == 2
    assert capsys.readouterr().err.count("\n") == 1
    plain = [source, tmp_path / "plain", *options, "--rank", "16"]  # whose norm more loaders read
    assert main([str(x) for x in ("convert", *plain)]) == 0
    assert "drop biases" not in capsys.readouterr().out
    assert "drop biases" in command.summary(report, tmp_path)
    assert "of a rope under latents" not in command.summary(report, tmp_path)
    assert not [name for name in tensors_of(tmp_path / "plain") if name.endswith("bias")]
    assert report_of(tmp_path / "plain")["settings"]["norm"] == "calibrated"


def test_a_rope_that_other_loaders_take_for_another_is_said(tmp_path, text, capsys):
    turns = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    turns |= {"original_max_position_embeddings": 32}
    source = save(tmp_path / "in", "llama", 4, rope_parameters=turns)
    given = (source, tmp_path / "out", "--to", "mla", "--rank", 16, "--rope-dim", 4, "--reach", 64, *text)
    assert main([str(x) for x in ("convert", *given)]) == 0
    assert "llama.cpp misread Llama3 rope scaling of latent models" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_calibrated_norm_is_off_by_what_the_report_says(tmp_path, text, dtype):
    """Measured with transformers on the calibration's tokens, in fp32 of the stored weights.

    The report leaves out how weights are rounded: of down and up each by ``rounding`` at most, and both once
    more by what a norm of rounded latents makes of it. fp32 itself, through three layers, loses less than
    1e-4 of an error.
    """
    source = save(tmp_path / "in", "llama", 4, attention_bias=False, dtype=dtype)
    options = ("--to", "mla", "--rope-dim", "4", "--reach", "64", "--rank", "16", "--norm", "calibrated")
    assert run(source, tmp_path / "out", *options, *text, kv_heads=None) == 0
    tokens = tokens_of(source, TEXT, samples=4, length=20)
    old, new = load(source).float(), load(tmp_path / "out").float()
    inputs = inputs_of(old, tokens)
    layers = zip(
        report_of(tmp_path / "out")["layers"], old.model.layers, new.model.layers, inputs, strict=True
    )
    for row, *layer, x in layers:
        before, after = (block.self_attn for block in layer)
        heads = split(before.state_dict(), head_dim=4, rope=rope_of(old.config.to_dict()))
        weights = attended(heads, Calibration.of([x]), scale=0.5).weights
        with torch.no_grad():
            latents = after.kv_a_proj_with_mqa(x)[..., :16]
            normed = after.kv_a_layernorm(latents)
            values = after.kv_b_proj(normed).unflatten(-1, (8, -1))[..., -4:]
            wanted = before.v_proj(x).unflatten(-1, (-1, 4)).repeat_interleave(2, -2)
        read = [torch.einsum("bthd,mhd->bthm", e.double(), heads.o) for e in (values - wanted, wanted)]
        lost, whole = ((e.square().sum((2, 3)).flatten() @ weights).sqrt() for e in read)
        z, passed = (y[..., :15].flatten(0, 1).double() * weights.sqrt()[:, None] for y in (latents, normed))
        changed = (
            z - passed * (z * passed).sum() / passed.square().sum()
        ).norm()  # but for one factor of all
        within = 1e-4 * row["value_error"] + 4 * row["rounding"]
        assert row["value_error"] == pytest.approx(float(lost / whole), abs=within)
        assert row["norm_error"] == pytest.approx(float(changed / z.norm()), abs=within)
        assert row["value_error"] > 0.1 > 5 * within


def inputs_of(model, tokens):
    """What the attention of each layer reads, ``[samples, length, m]``."""
    inputs = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named: inputs.append(named["hidden_states"]), with_kwargs=True
        )
    with torch.no_grad():
        model(tokens)
    return inputs


@pytest.mark.parametrize("with_text", [True, False])
def test_the_summary_is_of_the_result(tmp_path, text, capsys, with_text):
    """Plain SVD, which the report has for comparison, loses more than anything else, as rope hardly turns."""
    slow = {"rope_type": "linear", "factor": 100.0, "rope_theta": 1e4}
    source = save(tmp_path / "in", "llama", 4, attention_bias=False, rope_parameters=slow)
    options = ["--to", "mla", "--rope-dim", 4, "--reach", 1, "--rank", 14]
    options += text if with_text else ("--no-calibration",)
    assert main([str(x) for x in ("convert", source, tmp_path / "out", *options)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "largest layer error" in line]
    rows = report_of(tmp_path / "out")["layers"]
    own = ("key_error", "value_error", "rope_error", "norm_error", "rounding")
    value, layer, name = max((row[name], row["layer"], name) for row in rows for name in own)
    baseline = rows[layer][f"svd_{name}"]
    assert line.startswith(
        f"largest layer error: {name} {value:.3g} in layer {layer} (plain SVD: {baseline:.3g})"
    )
    assert line.endswith("for random inputs") == (not with_text)
    if with_text:
        assert value < max(row[f"svd_{part}_error"] for row in rows for part in ("key", "value"))


def test_a_baseline_that_loses_is_no_loss_of_the_result():
    lossless = {"key_error": 0.0, "rounding": 1e-8}
    assert lost.nothing_lost({"0": lossless | {"svd_key_error": 0.5}})
    assert not lost.nothing_lost({"0": lossless | {"rope_error": 0.5}})
    assert not lost.nothing_lost({"0": lossless, "1": {"key_error": None}})


@pytest.mark.parametrize("how", ["nan", "fp8"])
def test_weights_without_a_latent_form(tmp_path, how, capsys):
    source = save(tmp_path / "in", "llama", 4, attention_bias=False)
    tensors = tensors_of(source)
    name = "model.layers.1.self_attn.k_proj.weight"
    if how == "nan":
        tensors[name][0, 0] = torch.nan
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    replace_tensors(source, tensors)
    options = ("--to", "mla", "--rank", "16", "--rope-dim", "4", "--allow-nonfinite")
    assert run(source, tmp_path / "out", *options, kv_heads=None) == 3
    assert "layer 1: k_proj.weight: expected" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_as_many_heads_as_there_are_is_a_copy(tmp_path, sources):
    assert run(sources["grouped"], tmp_path / "out", kv_heads=4) == 0
    old, new = tensors_of(sources["grouped"]), tensors_of(tmp_path / "out")
    assert old.keys() == new.keys()
    assert all(new[name].equal(x) for name, x in old.items())
    assert report_of(tmp_path / "out")["config_changes"] == {}


def test_tensors_that_no_model_has_are_copied_and_listed(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "in")
    names = ("model.layers.1.self_attn.rotary.table", "model.extra.weight")
    replace_tensors(tmp_path / "in", tensors_of(sources["llama"]) | {name: torch.ones(3) for name in names})
    assert run(tmp_path / "in", tmp_path / "out") == 0
    report = report_of(tmp_path / "out")
    assert report["measures"]["unexpected_as_in_source"] == sorted(names)
    assert report["attention_tensors_copied_as_they_are"] == [names[0]]
    assert all(tensors_of(tmp_path / "out")[name].equal(torch.ones(3)) for name in names)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_what_no_loader_would_load_is_not_made(tmp_path, kind, capsys):
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=90, n_positions=64))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = BertModel(BertConfig(**sizes, vocab_size=90), add_pooling_layer=True)
    model.save_pretrained(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 2
    assert f"--kv-heads: expected 4, got 2; stock loaders of {kind} cannot load" in capsys.readouterr().err
    assert run(tmp_path / "in", tmp_path / "out", kv_heads=4) == 0
    measures = report_of(tmp_path / "out")["measures"]
    assert measures.get("largest_logit_difference") == (0 if kind == "gpt2" else None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "--kv-heads: required with --to gqa, got none"),
        (("--kv-heads", "3"), "--kv-heads: expected a divisor of the 8 KV heads, got 3"),
        (("--kv-heads", "16"), "expected a divisor of the 8 KV heads, got 16"),
        (("--kv-heads", "0"), "convert: --kv-heads: "),
        (("--kv-heads", "2", "--rank", "4", "--reach", "9"), "--rank: does not apply to --to gqa"),
        (("--to", "mla"), "--rank: required with --to mla"),
        (("--to", "mla", "--rank", "4", "--align", "none"), "--align: does not apply to --to mla"),
        (
            ("--kv-heads", "2", "--length", "9", "--no-calibration"),
            "--length: does not apply with --no-calibration; leave it out",
        ),
        (("--kv-heads", "2", "--text", "/nowhere"), "--text: expected a readable file"),
    ],
)
def test_requests_that_are_wrong(tmp_path, sources, options, reason, capsys):
    assert run(sources["llama"], tmp_path / "out", *options, kv_heads=None) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("python -m attnlib convert: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("grouped", ("--rank", "30"), "--rank: expected at most 29, the rank of the whole latent, got 30"),
        ("grouped", ("--rank", "1"), "--rank: expected at least 2, got 1"),
        ("grouped", ("--rank", "9", "--rope-dim", "3"), "--rope-dim: expected an even divisor of 4"),
        (
            "grouped",
            ("--rank", "9", "--rope-dim", "4", "--q-rank", "99"),
            "--q-rank: expected at most 25, the rank of",
        ),
        ("grouped", ("--rank", "9", "--reach", "0"), "--reach: expected at least 1, got 0"),
        (
            "grouped",
            ("--rank", "9", "--norm", "calibrated"),
            "layer 0: k_proj.bias, o_proj.bias, q_proj.bias",
        ),
        ("dynamic", ("--rank", "9"), "got DynamicNTKScaling; use --to attnlib"),
        (
            "llama",
            ("--rank", "9", "--norm", "calibrated", "--no-calibration"),
            "--norm: calibrated needs a calibration on text, got weights alone; use --norm exact",
        ),
    ],
)
def test_latent_options_are_checked_before_anything_is_read(
    tmp_path, sources, text, source, options, reason, monkeypatch, capsys
):
    """Neither weights nor text: both take long."""
    if source == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        sources = {
            "dynamic": save(tmp_path / "dynamic", "llama", 4, attention_bias=False, rope_parameters=scaling)
        }
    monkeypatch.setattr(conversion, "scan", lambda *_: pytest.fail("all of the source was read"))
    monkeypatch.setattr(choice, "read_text", lambda *_: pytest.fail("the text was read"))
    request = ("--to", "mla", "--rope-dim", "4", *options, *(() if "--no-calibration" in options else text))
    assert run(sources[source], tmp_path / "out", *request, kv_heads=None) == 2
    assert reason in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


def test_a_norm_that_cannot_be_without_biases_has_them(tmp_path, sources, text):
    options = ("--to", "mla", "--rope-dim", "4", "--rank", "9")
    for out, asked in (("biased", text), ("untold", ("--no-calibration",))):
        source = (
            sources["grouped"] if out == "biased" else save(tmp_path / "in", "llama", 4, attention_bias=False)
        )
        assert run(source, tmp_path / out, *options, *asked, kv_heads=None) == 0
        assert report_of(tmp_path / out)["settings"]["norm"] == "exact"


def test_biases_of_nothing_need_no_place(tmp_path, sources, text):
    shutil.copytree(sources["grouped"], tmp_path / "in")
    tensors = tensors_of(sources["grouped"])
    replace_tensors(
        tmp_path / "in", {name: 0 * x if name.endswith("bias") else x for name, x in tensors.items()}
    )
    options = ("--to", "mla", "--rope-dim", "4", "--rank", "9", "--norm", "calibrated", *text)
    assert run(tmp_path / "in", tmp_path / "out", *options, kv_heads=None) == 0


@pytest.mark.parametrize(
    "options", [("--merge", "learned"), ("--max-shard-size", "5XB"), ("--kv-heads", "two")]
)
def test_options_that_argparse_refuses(tmp_path, sources, options, capsys):
    with pytest.raises(SystemExit) as error:
        run(sources["llama"], tmp_path / "out", *options)
    assert error.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "wanted"),
    [("5GB", 5e9), ("500 MiB", 500 * 2**20), ("1.5kb", 1500), ("77", 77), ("2GiB", 2**31)],
)
def test_sizes(size, wanted):
    assert command._bytes(size) == wanted


def test_an_earlier_result_is_replaced_only_if_asked_for(tmp_path, sources, capsys):
    assert run(sources["llama"], tmp_path / "out") == 0
    assert run(sources["llama"], tmp_path / "out", kv_heads=4) == 2
    assert "overwrite" in capsys.readouterr().err
    assert run(sources["llama"], tmp_path / "out", "--overwrite", kv_heads=4) == 0
    assert load(tmp_path / "out").config.num_key_value_heads == 4


def damage(folder, how):
    """Make a source that cannot be converted."""
    config = json.loads((folder / "config.json").read_text())
    if how == "no folder":
        shutil.rmtree(folder)
    elif how == "cut off":
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "other sizes":
        (folder / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    elif how == "unknown rope":
        (folder / "config.json").write_text(
            json.dumps(config | {"rope_parameters": {"rope_type": "longrope"}})
        )
    elif how == "unreadable":
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": "small"}))
    elif how == "nan":
        tensors = tensors_of(folder)
        tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
        replace_tensors(folder, tensors)


@pytest.mark.parametrize("how", ["no folder", "cut off", "other sizes", "unknown rope", "unreadable", "nan"])
def test_checkpoints_that_are_bad(tmp_path, sources, how, capsys):
    shutil.copytree(sources["llama"], tmp_path / "in")
    damage(tmp_path / "in", how)
    assert run(tmp_path / "in", tmp_path / "out") == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_not_finite_may_be_copied(tmp_path, sources, capsys):
    shutil.copytree(sources["llama"], tmp_path / "in")
    tensors = tensors_of(sources["llama"])
    tensors["model.norm.weight"][0] = torch.inf
    replace_tensors(tmp_path / "in", tensors)
    assert run(tmp_path / "in", tmp_path / "out") == 3
    assert run(tmp_path / "in", tmp_path / "out", "--allow-nonfinite") == 0
    assert report_of(tmp_path / "out")["measures"]["logits"] == "none: the source's logits are not finite"
    damage(tmp_path / "in", "nan")
    assert run(tmp_path / "in", tmp_path / "out2", "--allow-nonfinite") == 3
    assert "layer 1: k_proj.weight: expected finite weights" in (error := capsys.readouterr().err)
    assert "run the same command again" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "out",
    ]  # of out2 there is not even a part


def test_logits_that_differ_though_nothing_was_lost(tmp_path, monkeypatch, capsys):
    """Fault 134. Keys of the merged heads change places, and the errors are still 0."""
    source = save(tmp_path / "in", "llama", equal=2)
    honest = converters.merge_heads
    monkeypatch.setattr(converters, "merge_heads", lambda *x: _swapped(honest(*x)))
    monkeypatch.setattr(converters, "_errors", lambda *_: dict.fromkeys(converters.ERRORS, 0.0))
    assert run(source, tmp_path / "out") == 4
    error = capsys.readouterr().err
    assert "logits: expected those of the source, as the layer errors are those of a lossless" in error
    assert error.count("\n") == 1
    report = report_of(tmp_path / "out")
    assert (report["verified"], report["check"]) == (False, "failed")
    assert "logits" in report["reason"]
    load(tmp_path / "out")


def _swapped(merged):
    merged.heads.k.copy_(merged.heads.k.flip(0))
    return merged


@pytest.mark.parametrize("name", ["q_norm.weight", "o_proj.bias"])
def test_a_result_that_transformers_would_not_load_whole(tmp_path, sources, monkeypatch, capsys, name):
    """A tensor too many in every layer, and one too few."""
    honest, needed = converters.join, "bias" in name

    def broken(heads, state):
        new = honest(heads, state)
        return {key: x for key, x in new.items() if key != name} if needed else new | {name: torch.ones(4)}

    monkeypatch.setattr(converters, "join", broken)
    assert run(sources["llama"], tmp_path / "out") == 4
    error = capsys.readouterr().err
    what = "missing" if needed else "unexpected"
    assert (
        f"expected a folder that transformers loads completely, got {what} model.layers.0.self_attn.{name}"
        in error
    )
    assert report_of(tmp_path / "out")["verified"] is False


def test_a_tensor_of_another_shape_is_no_result(tmp_path, sources):
    shutil.copytree(sources["llama"], tmp_path / "out")
    tensors = tensors_of(sources["llama"])
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(39, 24)
    replace_tensors(tmp_path / "out", tensors)
    with pytest.raises(
        VerificationError, match=r"mismatched model\.layers\.1\.mlp\.up_proj\.weight \[39, 24\] for"
    ):
        stock_check.StockCheck(sources["llama"], logits=False)(tmp_path / "out", {})


def test_names_are_checked_without_memory_for_weights(tmp_path):
    """An embedding of 4 GB, in a file with a hole."""
    config = LlamaConfig(**SIZES | {"vocab_size": 2**20, "hidden_size": 1024}, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    entries = {name: TensorEntry(x.dtype, tuple(x.shape), 0) for name, x in model.named_parameters()}
    header, placed = make_header(entries)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(max(entry.start + entry.nbytes for entry in placed.values()))
    config.save_pretrained(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert stock_check.StockCheck(tmp_path, logits=False)(tmp_path, {}).keys() == {"loaded_by"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_large_models_are_loaded_in_name_only(tmp_path, sources, monkeypatch):
    monkeypatch.setattr(budget, "CPU_WORK", 1e6)
    monkeypatch.setattr(stock_check, "compare", lambda *_, **__: pytest.fail("logits of a large model"))
    assert run(sources["llama"], tmp_path / "out") == 0
    measures = report_of(tmp_path / "out")["measures"]
    assert measures.keys() == {"loaded_by"}
    monkeypatch.undo()
    monkeypatch.setattr(budget, "CPU_WORK", 1e6)
    assert run(sources["llama"], tmp_path / "out", "--overwrite", "--check-logits") == 0
    assert report_of(tmp_path / "out")["measures"]["tokens"] == 128
    monkeypatch.undo()
    assert run(sources["llama"], tmp_path / "out", "--overwrite", "--no-check-logits") == 0
    assert report_of(tmp_path / "out")["measures"].keys() == {"loaded_by"}


@pytest.mark.parametrize(("free", "code"), [(10, 5), (None, 1)])
def test_results_that_cannot_be_written(tmp_path, sources, monkeypatch, capsys, free, code):
    if free is not None:
        monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, free))
    else:
        monkeypatch.setattr(writing.os, "fsync", failing)
    assert run(sources["llama"], tmp_path / "out") == code
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def failing(*_):
    raise OSError(5, "Input/output error")


def test_without_transformers_there_is_no_conversion(tmp_path, sources, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(sources["llama"], tmp_path / "out") == 2
    assert "need transformers: pip install 'attnlib[hf]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts the conversion of layer 2, until it is called."""
    honest = converters.merge_heads
    calls = []

    def merge(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*arguments)

    monkeypatch.setattr(converters, "merge_heads", merge)
    return calls


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(tmp_path, sources, text, interrupted, capsys):
    assert run(sources["llama"], tmp_path / "out", *text, *SMALL_SHARDS) == 130
    assert "interrupted; " in (error := capsys.readouterr().err)
    assert "run the same command again to resume" in error
    assert not (tmp_path / "out").exists()
    [unfinished] = tmp_path.glob("out.partial-*")
    assert len(list((unfinished / "checkpoint").glob("*.safetensors"))) > 3
    before = len(interrupted)
    assert run(sources["llama"], tmp_path / "out", *text, *SMALL_SHARDS) == 0
    assert len(interrupted) - before == 2  # layer 0 for the plan, and layer 2
    assert run(sources["llama"], tmp_path / "whole", *text, *SMALL_SHARDS) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", [("--samples", "3"), ("--length", "10"), "text", None])
def test_another_text_is_another_conversion(tmp_path, sources, text, interrupted, change):
    assert run(sources["llama"], tmp_path / "out", *text, *SMALL_SHARDS) == 130
    if change == "text":
        (tmp_path / "text").write_text(TEXT[1:])
    changed = () if change is None else text if change == "text" else text + change
    before = len(interrupted)
    assert run(sources["llama"], tmp_path / "out", *changed, *SMALL_SHARDS) == 0
    assert len(interrupted) - before == 3


def test_no_keep_leaves_nothing(tmp_path, sources, interrupted, capsys):
    assert run(sources["llama"], tmp_path / "out", "--no-keep", *SMALL_SHARDS) == 130
    assert list(tmp_path.iterdir()) == []
    assert "resume" not in capsys.readouterr().err
