"""What ``python -m attnlib convert`` says of faults: each error names its cause, and its advice works."""

import json
import os
import re
import shutil

import pytest
import torch
from healing_folders import TEXT as BOTTLES
from healing_folders import add_tokenizer, heal, make_half, make_original
from model_helpers import TEXT, save
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from attnlib.__main__ import main
from attnlib.convert import command, picture
from attnlib.convert.checkpoint import conversion, progress, writing
from attnlib.convert.text.layerwise import TextCalibration

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 130}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 130, "n_positions": 64}
POSITIONS = {"max_position_embeddings": 64}
GEMMA = {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
WIDTH = {"intermediate_size": 48}
FAMILIES = {
    "bert": lambda: BertModel(BertConfig(**SIZES | WIDTH | POSITIONS)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, **POSITIONS)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | WIDTH | POSITIONS)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES | WIDTH | POSITIONS | GEMMA)),
}
TARGETS = {
    "gqa": ("gqa", "--kv-heads", 2),
    "mla": ("mla", "--rank", 16, "--rope-dim", 4),
    "own heads": ("attnlib", "--kv-heads", 2),
    "own latents": ("attnlib", "--rank", 16),
    "own budget": ("attnlib", "--cache", "80%"),
    "own budget of heads": ("attnlib", "--cache", "80%", "--layers", "gqa"),
}
# The targets that an error may suggest, and the words with which it does.
SUGGESTIONS = {
    "gqa": "--to gqa",
    "own heads": "--kv-heads N",
    "own latents": "(--rank N",
    "own budget": "or --cache SIZE)",
    "own budget of heads": "--cache SIZE --layers gqa",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, make in FAMILIES.items():
        make().save_pretrained(folder / name)
        add_tokenizer(folder / name)
    save(folder / "llama", "llama", attention_bias=False)
    (folder / "text").write_text(TEXT)
    return folder


@pytest.fixture
def changed(models, tmp_path):
    """A copy of a source whose config.json has other fields."""

    def change(source="llama", **fields):
        shutil.copytree(models / source, tmp_path / "in")
        path = tmp_path / "in/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return tmp_path / "in"

    return change


def run(source, out, *options, to=TARGETS["gqa"]):
    given = ("convert", source, out, "--to", *to, "--quiet", *options)
    return main([str(x) for x in given])


def short(models):
    return ("--text", models / "text", "--samples", 4, "--length", 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_error_suggests_converts_the_model(models, tmp_path, family, capsys):
    errors = {}
    for target, to in TARGETS.items():
        code = run(models / family, tmp_path / target, *short(models), to=to)
        errors[target] = capsys.readouterr().err if code else None
        assert code in (0, 2, 3)
    for error in filter(None, errors.values()):
        assert error.count("\n") == 1
        if family == "bert":
            assert "no target makes the cache of this model type smaller" in error
        advice = error.partition("; use ")[2]
        assert {target for target, words in SUGGESTIONS.items() if words in advice} == {
            target for target in SUGGESTIONS if errors[target] is None
        }


FAULTS = {
    "an activation": ({"hidden_act": "silly"}, "hidden_act: expected an activation .*, got silly; compare"),
    "no positions": (
        {"max_position_embeddings": 0},
        "max_position_embeddings: expected .* 1, got 0; compare",
    ),
    "fewer than none": ({"max_position_embeddings": -5}, "max_position_embeddings: .*, got -5; compare"),
    "a word for a count": (
        {"max_position_embeddings": "x"},
        "max_position_embeddings: expected int, got str x",
    ),
    "no words": ({"vocab_size": 0}, "vocab_size: expected .* 1, got 0; compare"),
    "null": ({"hidden_act": None}, "hidden_act: expected str, got null; compare"),
    "a token": ({"bos_token_id": "x"}, "bos_token_id: expected int or null, got str x; compare"),
    "a dtype": ({"dtype": "float99"}, "dtype: expected a dtype of torch, .*, got float99; compare"),
    "a number for a class": ({"architectures": [3]}, r"architectures: expected a list of names.* got \[3\]"),
    "padding": ({"pad_token_id": 500}, "transformers cannot build a model from it: .*Padding_idx"),
}


@pytest.mark.parametrize("target", ["gqa", "own budget of heads"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_config_names_its_key(models, changed, tmp_path, fault, target, capsys):
    fields, wanted = FAULTS[fault]
    source = changed(**fields)
    for options in (short(models), ("--no-calibration",)):
        assert run(source, tmp_path / "out", *options, to=TARGETS[target]) == 3
        error = capsys.readouterr().err
        assert re.search(f"convert: config.json: {wanted}", error), error
        assert error.count("\n") == 1
        assert "--no-calibration" not in error  # it would not help
        assert "tokenizer" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_other_names_of_an_activation_are_known(models, changed, tmp_path, capsys):
    source = changed("gpt2", activation_function="silly")
    assert run(source, tmp_path / "out", to=TARGETS["own heads"]) == 3
    assert "config.json: activation_function: expected an activation" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_no_reason_to_do_without_a_text(models, changed, tmp_path, capsys):
    source = changed(intermediate_size=50)
    assert run(source, tmp_path / "out", *short(models)) == 3
    error = capsys.readouterr().err
    assert "mismatched model.layers.0.mlp.down_proj.weight" in error
    assert "--no-calibration" not in error


def test_nan_is_no_reason_to_do_without_a_text(models, changed, tmp_path, capsys):
    source = changed()
    [shard] = [
        path for path in source.glob("*.safetensors") if "layers.0.mlp.down" in str(load_file(path).keys())
    ]
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, shard, {"format": "pt"})
    assert run(source, tmp_path / "out", *short(models), to=TARGETS["own budget of heads"]) == 3
    error = capsys.readouterr().err
    assert "layer 1, over text: " in error
    assert "weights up to this layer are NaN, infinite or too large" in error
    assert "--no-calibration" not in error


def test_a_calibrated_norm_needs_a_tokenizer(models, tmp_path, capsys):
    shutil.copytree(models / "llama", tmp_path / "in")
    for path in (tmp_path / "in").glob("*token*"):
        path.unlink()
    to = (*TARGETS["mla"], "--norm", "calibrated")
    assert run(tmp_path / "in", tmp_path / "out", to=to) == 3
    error = capsys.readouterr().err
    assert "expected the model's own tokenizer" in error
    assert error.rstrip().endswith("; --no-calibration with --norm exact converts without a text")
    to = (*TARGETS["mla"], "--norm", "exact")
    assert run(tmp_path / "in", tmp_path / "out", "--no-calibration", to=to) == 0


def test_a_tokenizer_class_of_the_config_is_named(models, changed, tmp_path, capsys):
    source = changed(tokenizer_class="NoSuchTokenizer")
    (source / "tokenizer_config.json").unlink()
    assert run(source, tmp_path / "out", *short(models)) == 3
    assert (
        "config.json: tokenizer_class: expected a tokenizer of transformers, got NoSuchT"
        in capsys.readouterr().err
    )


def test_keys_that_name_code_do_not_stop_attnlibs_form(models, changed, tmp_path):
    source = changed(auto_map={"AutoConfig": "x.y"}, attn_implementation="unknown")
    assert run(source, tmp_path / "out", "--no-calibration", to=TARGETS["own heads"]) == 0


def test_a_model_without_a_head_is_refused_before_its_calibration(tmp_path, monkeypatch, capsys):
    GPT2Model(GPT2Config(**GPT2)).save_pretrained(tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    monkeypatch.setattr(TextCalibration, "_next", lambda *_: pytest.fail("a layer was run"))
    assert run(tmp_path / "in", tmp_path / "out", to=TARGETS["own budget"]) == 3
    error = capsys.readouterr().err
    assert "--cache: expected a language model with a head" in error
    assert "use --kv-heads or --rank, or --no-calibration" in error
    assert run(tmp_path / "in", tmp_path / "out", "--no-calibration", to=TARGETS["own budget"]) == 0


@pytest.mark.parametrize("full", [False, True], ids=["read-only", "in use"])
def test_a_target_is_looked_at_before_the_calibration(models, tmp_path, monkeypatch, full, capsys):
    """A layer budget calibrates before the conversion starts."""
    monkeypatch.setattr(TextCalibration, "_next", lambda *_: pytest.fail("a layer was run"))
    if full:
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").touch()
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write anywhere
    options = (*short(models), "--overwrite") if full else short(models)
    code = run(models / "llama", tmp_path / "out", *options, to=TARGETS["own budget of heads"])
    assert code == (2 if full else 1)
    error = capsys.readouterr().err
    assert (
        "OUT: --overwrite replaces only" if full else "OUT: expected a writable parent folder, got"
    ) in error
    assert full or "which is read-only; choose another OUT, or make it writable" in error
    assert "resume" not in error


def test_a_result_that_is_read_only_is_not_replaced(models, tmp_path, monkeypatch, capsys):
    assert run(models / "llama", tmp_path / "out", "--no-calibration") == 0
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path / "out"))
    monkeypatch.setattr(conversion, "scan", lambda *_: pytest.fail("the source was read"))
    assert run(models / "llama", tmp_path / "out", "--no-calibration", "--overwrite") == 1
    assert "OUT: expected a result that may be replaced, got" in capsys.readouterr().err


def test_finetune_says_the_same_of_a_read_only_target(tmp_path, monkeypatch, capsys):
    make_half(make_original(tmp_path / "original"), tmp_path / "half")
    (tmp_path / "text").write_text(BOTTLES)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert heal(tmp_path, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "OUT: expected a writable parent folder, got" in error
    assert "resume" not in error


def test_finetune_says_that_a_vocabulary_of_the_config_is_wrong(tmp_path, capsys):
    make_half(make_original(tmp_path / "original"), tmp_path / "half")
    (tmp_path / "text").write_text(BOTTLES)
    for folder in ("half", "original"):
        path = tmp_path / folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 50}))
    assert heal(tmp_path, tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert "[130, 32] for [50, 32]" in error
    assert "tokenizer" not in error


def test_finetune_says_that_an_activation_is_unknown(tmp_path, capsys):
    make_half(make_original(tmp_path / "original"), tmp_path / "half")
    (tmp_path / "text").write_text(BOTTLES)
    path = tmp_path / "half/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "silly"}))
    assert heal(tmp_path, tmp_path / "out") == 3
    assert "config.json: hidden_act: expected an activation" in capsys.readouterr().err


@pytest.mark.parametrize("interrupted", [True, False])
def test_what_remains_is_said_once(models, tmp_path, monkeypatch, interrupted, capsys):
    def fail(*_):
        raise KeyboardInterrupt if interrupted else OSError(5, "Input/output error")

    monkeypatch.setattr(conversion, "_write_rest", fail)
    assert run(models / "llama", tmp_path / "out", *short(models)) == (130 if interrupted else 1)
    error = capsys.readouterr().err
    assert error.count("run the same command again to resume") == 1
    assert error.count("finished work is kept") == error.count("finished calibrations are kept") == 1
    assert error.count("out.partial-") == error.count("out.calibration-") == 1


def test_a_summary_names_loaders_once(models, tmp_path):
    assert run(models / "llama", tmp_path / "out", *short(models)) == 0
    report = json.loads((tmp_path / "out/conversion_report.json").read_text())
    report["settings"] |= {"norm": "exact", "rope_scaling": "Llama3"}
    summary = command.summary(report, tmp_path / "out")
    assert summary.count("loaders: transformers reads the result") == 1
    assert "drop biases" in summary
    assert "misread Llama3" in summary


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--merge", "principal", "--align", "all"), "--align: expected none with --merge principal"),
        (("--norm", "calibrated", "--no-calibration"), "--norm: calibrated needs a calibration"),
    ],
)
def test_words_have_no_quotes(models, tmp_path, options, wanted, capsys):
    to = TARGETS["mla" if "--norm" in options else "gqa"]
    assert run(models / "llama", tmp_path / "out", *options, to=to) == 2
    error = capsys.readouterr().err
    assert wanted in error
    assert not re.search("[\"']", error)


def test_a_part_of_a_shard_does_not_count_as_used_space(models, tmp_path, monkeypatch):
    """A killed run leaves it. Free space is what a disk of this size has beside the files."""
    monkeypatch.setattr(conversion, "_write_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    options = ("--no-calibration", "--max-shard-size", "20KB")
    assert run(models / "llama", tmp_path / "out", *options) == 130
    monkeypatch.undo()
    [work] = tmp_path.glob("out.partial-*")
    last = sorted((work / "checkpoint").glob("*.safetensors"))[-1]
    done = json.loads((work / progress.PROGRESS).read_text())
    del done["shards"][last.name]
    (work / progress.PROGRESS).write_text(json.dumps(done))
    orphan = work / "checkpoint" / f".{last.name}.tmp"
    orphan.write_bytes(bytes(10**6))

    def usage(_):
        free = 200_000 + (0 if orphan.exists() else 10**6)
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)

    monkeypatch.setattr(writing, "MARGIN", 20.0)  # the rest of this small model would fit anywhere
    monkeypatch.setattr(writing.shutil, "disk_usage", usage)
    assert run(models / "llama", tmp_path / "out", *options) == 0


def test_a_part_of_a_calibration_does_not_count_as_used_space(models, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextCalibration, "_next", stop)
        assert run(models / "llama", tmp_path / "out", *short(models)) == 130
    [kept] = tmp_path.glob("out.calibration-*")
    orphan = kept / ".layer-00000.safetensors.tmp"
    orphan.write_bytes(bytes(10**6))

    def usage(_):
        free = 10**9 if not orphan.exists() else 10
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)

    monkeypatch.setattr(writing.shutil, "disk_usage", usage)
    assert run(models / "llama", tmp_path / "out", *short(models)) == 0


def test_a_state_of_an_earlier_run_is_not_asked_for_twice(tmp_path, monkeypatch):
    from attnlib.finetune import run as running
    from attnlib.finetune import training

    make_half(make_original(tmp_path / "original"), tmp_path / "half")
    (tmp_path / "text").write_text(BOTTLES)
    asked, honest, step = [], running.require_room, training.take_step
    monkeypatch.setattr(running, "require_room", lambda *x: asked.append(x[1:]) or honest(*x))

    def stop(*arguments):
        if arguments[5] == 6:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "take_step", stop)
        assert heal(tmp_path, tmp_path / "out") == 130
    assert heal(tmp_path, tmp_path / "out") == 0
    (first, *rest), (again, *others) = asked
    assert first > again == 0
    assert rest == others


def test_a_result_in_place_has_its_picture(models, tmp_path, monkeypatch):
    """A kill after the final rename leaves nothing to do."""
    pytest.importorskip("matplotlib")

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    monkeypatch.setattr(progress, "remove", kill)  # the first call after the rename
    with pytest.raises(Killed):
        run(models / "llama", tmp_path / "out", "--no-calibration")
    assert (tmp_path / "out" / picture.PICTURE).exists()
    assert (tmp_path / "out/conversion_report.json").exists()
