"""``python -m attnlib finetune``: what it writes, what an interruption changes (nothing), and what it
refuses.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from healing_folders import SIZES, TEXT, add_tokenizer, contents, heal, make_half, make_original
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import attnlib
from attnlib.__main__ import main
from attnlib.convert.checkpoint.writing import only_one
from attnlib.finetune import command, run, training
from attnlib.finetune.run import PICTURE, REPORT, STATE


@pytest.fixture(scope="module")
def healed(folders, tmp_path_factory):
    """What the command makes of the half by default: of 8 steps, 2 layer by layer."""
    out = tmp_path_factory.mktemp("healed") / "out"
    assert heal(folders, out, *USUAL) == 0
    return out


USUAL = ("--layerwise", 0.25, "--save-every", 3)


def weights(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def steps(folder):
    return list(csv.DictReader((folder / "log.csv").read_text().splitlines()))


def test_the_result_is_the_source_with_other_attention_weights(folders, healed):
    _, found = AutoModelForCausalLM.from_pretrained(healed, output_loading_info=True)
    assert not any(found.values()), found
    old, new = weights(folders / "half"), weights(healed)
    assert {name: x.shape for name, x in old.items()} == {name: x.shape for name, x in new.items()}
    assert {name for name in old if not old[name].equal(new[name])} == {
        name for name in old if "self_attn" in name
    }
    for name in ("config.json", "tokenizer.json"):
        assert (healed / name).read_bytes() == (folders / "half" / name).read_bytes()
    assert (healed / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert not list(healed.parent.glob("out.*"))  # neither a lock nor a work folder


@pytest.mark.parametrize(
    "size", [("--kv-heads", 1), ("--cache", "60%", "--rope-dim", 4)], ids=["heads", "latents"]
)
@pytest.mark.parametrize("options", [(), ("--lora", 2)])
def test_attnlibs_own_form_is_healed_too(folders, tmp_path, size, options, capfd):
    own = (
        "convert",
        folders / "original",
        tmp_path / "own",
        "--to",
        "attnlib",
        *size,
        "--no-calibration",
        "--quiet",
    )
    assert main([str(x) for x in own]) == 0, capfd.readouterr()
    out = tmp_path / "out"
    asked = ("finetune", tmp_path / "own", out, "--teacher", folders / "original", "--text", folders / "text")
    known = ("--steps", 30, "--context", 16, "--batch", 4, "--layerwise", 0.5, "--save-every", 15, "--quiet")
    assert main([str(x) for x in (*asked, *known, *options)]) == 0
    bits = json.loads((out / REPORT).read_text())["held_out_bits_per_byte"]
    assert bits["after"] < bits["before"]
    assert (out / "config.json").read_bytes() == (tmp_path / "own" / "config.json").read_bytes()
    old, new = weights(tmp_path / "own"), weights(out)
    assert {name: x.shape for name, x in old.items()} == {name: x.shape for name, x in new.items()}
    tokens = torch.arange(3, 19)[None]
    assert attnlib.load_pretrained(out)(tokens).logits.isfinite().all()


def test_losses_fall_and_are_written_down(folders, tmp_path):
    out = tmp_path / "out"
    assert heal(folders, out, "--steps", 60, "--layerwise", 0.5, "--save-every", 30) == 0
    rows, report = steps(out), json.loads((out / REPORT).read_text())
    assert [int(row["step"]) for row in rows] == [*range(1, 61)]
    assert [bool(row["kl"]) for row in rows] == [False] * 30 + [True] * 30
    apart, together = rows[:30], rows[30:]
    assert mean(apart[-5:], "attention") < 0.6 * mean(apart[:5], "attention")
    assert mean(together[-5:], "kl") < 0.9 * mean(together[:5], "kl")
    assert [bool(row["held_out"]) for row in rows] == [step in (29, 59) for step in range(60)]
    bits, curve = report["held_out_bits_per_byte"], report["curve_bits_per_byte"]
    assert bits["before"] == curve[0][1]
    assert bits["after"] == pytest.approx(curve[-1][1], rel=1e-5)
    assert [point[0] for point in curve] == [0, 30, 60]
    assert report["held_out_perplexity"]["after"] == pytest.approx(
        2 ** bits["after"]
    )  # a byte is a token here
    assert report["parameters"]["trained"] == sum(
        x.numel() for name, x in weights(out).items() if "self_attn" in name
    )


def mean(rows, name):
    return sum(float(row[name]) for row in rows) / len(rows)


def test_held_out_text_is_not_learnt(folders, tmp_path, healed):
    """Another end of the text changes what is measured, and no weight."""
    for name in ("half", "original"):
        shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / "text").write_text(TEXT[:-60] + "".join(reversed(TEXT[-60:])))
    assert heal(tmp_path, tmp_path / "out", *USUAL) == 0
    assert all(x.equal(weights(healed)[name]) for name, x in weights(tmp_path / "out").items())
    ours, theirs = (json.loads((out / REPORT).read_text()) for out in (tmp_path / "out", healed))
    assert ours["held_out_bits_per_byte"] != theirs["held_out_bits_per_byte"]


@pytest.mark.parametrize("options", [(), ("--train", "all"), ("--lora", 2)])
def test_checkpointing_and_parts_of_a_batch_change_no_more_than_rounding(folders, tmp_path, options):
    for out, more in (("plain", ()), ("checkpointed", ("--checkpointing",)), ("parts", ("--accumulate", 2))):
        assert heal(folders, tmp_path / out, *USUAL, *options, *more) == 0
    plain = weights(tmp_path / "plain")
    for out in ("checkpointed", "parts"):
        for name, x in weights(tmp_path / out).items():
            torch.testing.assert_close(x, plain[name], rtol=1e-4, atol=1e-5)
    changed = {name for name, x in weights(folders / "half").items() if not x.equal(plain[name])}
    assert changed == {name for name in plain if "self_attn" in name or options == ("--train", "all")}


def test_all_weights_train_on_the_text_too(folders, tmp_path):
    assert (
        heal(
            folders,
            tmp_path / "out",
            "--objective",
            "text",
            "--train",
            "all",
            "--steps",
            30,
            "--layerwise",
            0.1,
        )
        == 0
    )
    rows = steps(tmp_path / "out")
    assert mean(rows[-5:], "text") < 0.9 * mean(rows[5:10], "text")


def test_a_half_precision_source_stays_one(folders, tmp_path):
    make_half(folders / "original", tmp_path / "half", torch.bfloat16)
    shutil.copytree(folders / "original", tmp_path / "original")
    (tmp_path / "text").write_text(TEXT)
    assert heal(tmp_path, tmp_path / "out", "--precision", "bf16") == 0
    assert {x.dtype for x in weights(tmp_path / "out").values()} == {torch.bfloat16}
    kept = "model.layers.0.mlp.up_proj.weight"
    assert weights(tmp_path / "out")[kept].equal(weights(tmp_path / "half")[kept])


@pytest.mark.parametrize("options", [(), ("--train", "all"), ("--lora", 2)], ids=str)
def test_room_is_asked_for_what_is_written(folders, tmp_path, monkeypatch, options, capsys):
    """Beside the weights, a state has two Adam moments, in fp32 whatever the folder's dtype."""
    make_half(folders / "original", tmp_path / "half", torch.bfloat16)
    asked, written, honest = [], [], run.write_model

    def measure(settings, state, made):
        honest(settings, state, made)
        for tensors in (load_file(state), weights(made)):
            written.append(sum(x.nbytes for x in tensors.values() if x.ndim))  # but for the counts of steps

    monkeypatch.setattr(run, "require_room", lambda *found: asked.append(found[1:3]))
    monkeypatch.setattr(run, "write_model", measure)
    options = (*options, "--steps", 1, "--teacher", folders / "original", "--text", folders / "text")
    assert heal(tmp_path, tmp_path / "out", *options) == 0, capsys.readouterr().err
    assert asked == [(written[0], max(written))]


def test_latent_layers_learn_and_the_constants_of_their_norms_stay(folders, tmp_path):
    sizes = {name: x for name, x in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    latent = {
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    config = DeepseekV3Config(**sizes, **latent, first_k_dense_replace=2, attention_bias=True)
    torch.manual_seed(1)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_a_layernorm.weight.fill_(2.0**12)
    model.save_pretrained(tmp_path / "latent")
    for name in ("original", "half"):
        shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / "text").write_text(TEXT)
    assert heal(tmp_path, tmp_path / "out", source="latent") == 0  # whose tokenizer is the original's
    old, new = weights(tmp_path / "latent"), weights(tmp_path / "out")
    same = {name for name in old if "self_attn" in name and old[name].equal(new[name])}
    assert same == {"model.layers.0.self_attn.kv_a_layernorm.weight"}


def test_adapters_of_normalized_heads(folders, tmp_path):
    """The projections of such latents are not linear, but those of their heads are, and learn."""
    sizes = {**SIZES, "head_dim": 8}
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(tmp_path / "source")
    shutil.copytree(folders / "original", tmp_path / "original")
    for file in (tmp_path / "original").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "source")
    options = ("--to", "attnlib", "--rank", "8", "--no-calibration", "--quiet")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "latent"), *options]) == 0
    (tmp_path / "text").write_text(TEXT)
    assert heal(tmp_path, tmp_path / "out", "--lora", 2, source="latent") == 0
    old, new = weights(tmp_path / "latent"), weights(tmp_path / "out")
    changed = {name.partition("self_attn.layer.")[2] for name in old if not old[name].equal(new[name])}
    assert {"q_proj.heads.weight", "kv_a_proj_with_mqa.heads.weight", "o_proj.weight"} <= changed
    assert not changed & {"q_proj.weight", "kv_a_proj_with_mqa.weight"}


class Stopped(BaseException):
    """What nobody catches."""


@pytest.mark.parametrize(
    ("options", "where", "count"),
    [
        (USUAL, "take_step", 1),  # before the first state
        (USUAL, "take_step", 5),  # between two, in the steps end to end
        (USUAL, "save_state", 1),  # with a line in the log that the state knows nothing of
        (USUAL, "write_model", 0),  # when all is learnt
        ((*USUAL, "--lora", 2), "take_step", 4),
    ],
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    folders, tmp_path, healed, monkeypatch, options, where, count
):
    module, left = (run if where == "write_model" else training), [count]
    function = getattr(module, where)

    def stop(*arguments):
        if not left[0]:
            raise Stopped
        left[0] -= 1
        return function(*arguments)

    whole, out = tmp_path / "whole" / "out", tmp_path / "stopped" / "out"
    for folder in (whole, out):
        folder.parent.mkdir()
    if options == USUAL:
        whole = healed
    else:
        assert heal(folders, whole, *options) == 0
    with monkeypatch.context() as patched:
        patched.setattr(module, where, stop)
        with pytest.raises(Stopped):
            heal(folders, out, *options)
    assert not out.exists()
    taken = []
    monkeypatch.setattr(
        training, "take_step", lambda *x, original=training.take_step: taken.append(1) or original(*x)
    )
    assert heal(folders, out, *options) == 0
    assert len(taken) == 8 - {"take_step": 3 * (count // 3), "save_state": 3, "write_model": 8}[where]
    assert contents(out) == contents(whole)
    assert not list(out.parent.glob("out.*"))


def test_an_interruption_says_how_to_go_on(folders, tmp_path, monkeypatch, capsys):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "take_step", interrupt)
    assert heal(folders, tmp_path / "out") == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    [left] = tmp_path.glob("out.partial-*")
    assert (
        left / "checkpoint"
    ).is_dir()  # or a conversion to the same place would take it for done, and remove it


def test_a_state_that_is_damaged_is_refused(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "write_model", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert heal(folders, tmp_path / "out") == 130
    [left] = tmp_path.glob("out.partial-*")
    (left / STATE).write_bytes(b"no tensors")
    assert heal(folders, tmp_path / "out") == 3
    assert "state.safetensors: expected the state of a training run, got" in capsys.readouterr().err


def test_other_options_begin_another_run(folders, tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_state", interrupt)
    for seed in (0, 1, 1):
        assert heal(folders, tmp_path / "out", "--seed", seed) == 130
    assert len(list(tmp_path.glob("out.partial-*"))) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda to: make_original(to, vocab_size=140),
            "vocab_size: expected 140 as in the teacher .*, got 130",
        ),
        (lambda to: make_original(to, num_hidden_layers=1), "num_hidden_layers: expected 1 .* got 2"),
        (lambda to: make_original(to, hidden_size=16), "hidden_size: expected 16 .* got 32"),
        (
            lambda to: add_tokenizer(make_original(to), shift=1),
            "tokenizer: expected the same tokens as in the teacher",
        ),
        (lambda to: lose_a_weight(make_original(to)), "missing model.norm.weight"),
        (lambda to: make_original(to) and spoil(to), "expected finite weights, got"),
        (lambda to: to.mkdir(), "expected model.safetensors or"),
        (  # finetune itself has no --follow-links
            lambda to: linked(make_original(to) / "config.json"),
            "got a link; for a download cache use `hf download --local-dir` or follow_links .convert ",
        ),
    ],
    ids=["vocabulary", "layers", "width", "tokenizer", "missing", "nan", "empty", "link"],
)
def test_another_teacher_is_refused_before_weights_are_loaded(
    folders, tmp_path, monkeypatch, capsys, make, message
):
    shutil.copytree(folders / "half", tmp_path / "half")
    (tmp_path / "text").write_text(TEXT)
    make(tmp_path / "teacher")
    monkeypatch.setattr(run, "load", None)
    assert heal(tmp_path, tmp_path / "out", teacher="teacher") == 3
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("at", [0, len(TEXT)])
def test_a_token_outside_the_vocabulary_is_refused_before_weights_are_loaded(
    folders, tmp_path, monkeypatch, capsys, at
):
    for name in ("original", "half"):
        shutil.copytree(folders / name, tmp_path / name)
        add_tokenizer(tmp_path / name, shift=10)  # of 130 tokens, "~" is number 136
    (tmp_path / "text").write_text(TEXT[:at] + "~" + TEXT[at:])
    monkeypatch.setattr(run, "load", None)
    assert heal(tmp_path, tmp_path / "out") == 3
    assert "tokenizer: expected tokens below vocab_size=130, got 136" in capsys.readouterr().err


def test_the_text_is_read_as_utf_8_in_any_locale(folders, tmp_path, monkeypatch, capsys):
    honest = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="ascii": honest(path, encoding))
    (tmp_path / "text").write_text("é" + TEXT, "utf-8")
    assert heal(folders, tmp_path / "out", "--text", tmp_path / "text", "--steps", 1) == 0
    (tmp_path / "text").write_bytes(b"wall" + "é".encode("latin-1") + TEXT.encode())
    assert heal(folders, tmp_path / "other", "--text", tmp_path / "text") == 2
    assert (
        f"--text: expected UTF-8 in {tmp_path / 'text'}, got an invalid byte at byte 4"
        in capsys.readouterr().err
    )


def linked(path):
    path.rename(path.with_name("blob")).with_name(path.name).symlink_to("blob")


def lose_a_weight(folder):
    change(folder, lambda tensors: tensors.pop("model.norm.weight"))


def spoil(folder):
    change(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", 0), "--steps: expected a positive count, got 0"),
        (("--batch", 3, "--accumulate", 2), "--batch: expected a multiple of 2"),
        (("--context", 400), "--text: expected at least 4010 tokens"),
        (("--text", "/nowhere"), "--text: expected a readable file"),
        (("--device", "cuda"), "--device: expected cpu"),
        (("--tensorboard",), "--tensorboard: expected TensorBoard"),
        (("--lora", 4), "--lora needs peft: pip install peft"),
    ],
)
def test_a_wrong_request_ends_before_weights_are_loaded(
    folders, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.setattr(run, "load", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert heal(folders, tmp_path / "out", *options) == 2
    assert f"python -m attnlib finetune: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_run_at_a_time(folders, tmp_path, capsys):
    with only_one(tmp_path / "out"):
        assert heal(folders, tmp_path / "out") == 2
    assert (
        "out: expected no other run, and another run writes there; wait until it ends"
        in capsys.readouterr().err
    )


def test_a_place_that_is_taken_is_refused(folders, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert heal(folders, tmp_path) == 2
    assert "OUT: expected an empty folder or nothing there yet" in capsys.readouterr().err
    assert heal(folders, folders / "half" / "inside") == 2
    assert heal(folders, folders / "original") == 2
    assert heal(folders, tmp_path / "no" / "out") == 2
    assert "OUT: expected its parent to be a folder" in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_the_run(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "take_step", lambda *_: {"loss": float("nan")})
    assert heal(folders, tmp_path / "out") == 4
    assert "loss: expected a number, got nan in step 1; lower the rate" in capsys.readouterr().err


def test_tensorboard_is_told_what_the_log_is(folders, tmp_path, monkeypatch):
    class Writer:
        def __init__(self, folder, purge_step):
            self.told = told
            assert purge_step == 1

        def add_scalar(self, name, value, step):
            self.told[name, step] = value

        def flush(self):
            pass

        close = flush

    told = {}
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    assert heal(folders, tmp_path / "out", *USUAL, "--tensorboard") == 0
    rows = steps(tmp_path / "out")
    written = {
        (name, int(row["step"])): float(x) for row in rows for name, x in row.items() if x and name != "step"
    }
    assert told == written


def test_the_summary_names_what_was_lost_and_found(folders, tmp_path, capsys):
    args = [
        str(x) for x in ("finetune", folders / "half", tmp_path / "out", "--teacher", folders / "original")
    ]
    args += [
        "--text",
        str(folders / "text"),
        "--steps",
        "1",
        "--batch",
        "1",
        "--context",
        "16",
        "--device",
        "cpu",
    ]
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("original", "before", "after", "perplexity", REPORT))
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    tokens, run = report["held_out_tokens"], report["run"]
    assert tokens == 16 * report["settings"]["windows"]
    assert f"held-out text ({tokens:,} tokens), bits per byte: original" in printed
    assert (run["device"], run["ranks"], run["steps"]) == ("cpu", 1, 1)
    assert 0 < run["step_seconds"] < run["seconds"]
    assert run["tokens_per_second"] == pytest.approx(16 / run["step_seconds"], rel=0.1)
    speed = f"{run['tokens_per_second']:,.0f} tokens per second"
    assert f"time: 0 min {round(run['seconds'])} s on cpu, 1 steps at {speed}" in printed


def test_all_that_takes_long_has_a_bar(folders, tmp_path, capsys):
    given = ["finetune", folders / "half", tmp_path / "out", "--teacher", folders / "original", "--text"]
    given += [folders / "text", "--steps", 4, "--context", 16, "--batch", 2, "--device", "cpu"]
    assert main([str(x) for x in given]) == 0
    shown = capsys.readouterr().err
    for title in (
        *("hashing the source", "hashing the teacher", "loading the original", "loading the converted model"),
        *("scoring the original", "scoring the student", "scoring the result", "loading the result"),
        *("writing the result", "verifying", "out"),
    ):
        bars = [line for line in re.split("[\r\n]", shown) if line.startswith(f"{title}: ")]
        assert bars, title
        assert title.startswith("scoring") or "100%" in bars[-1], bars


def test_quiet_is_quiet(folders, tmp_path, capsys):
    assert heal(folders, tmp_path / "out") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "said"), [(59.6, "1 min 0 s"), (3.2, "0 min 3 s"), (7384, "2 h 3 min")])
def test_a_duration(seconds, said):
    assert command._duration(seconds) == said
