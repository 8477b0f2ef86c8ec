"""Back to quality, with a minimal budget: what is written, what an interruption changes (nothing), and
refusals.
"""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import finetune_gqa
import pytest
import torch
from recovery import Result, better, close
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from variants import Preset

from attnlib.finetune import training

NAMES = ["MHA, trained on", "GQA, mean-pool", "GQA, regroup + align", "GQA, principal"]
NAMES += ["MLA, plain SVD", "MLA, whitened", "MLA, as DeepSeek"]
TOKENS = torch.arange(30).reshape(2, 15) * 7 % 100


class Finished(NamedTuple):
    """A whole run: its text, its folder, what it printed, and the models behind the folders that it wrote."""

    text: Path
    out: Path
    printed: list[str]
    models: dict[str, torch.nn.Module]


@pytest.fixture(scope="module", autouse=True)
def _minimal():
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(finetune_gqa.PRESETS, "tiny", Preset(32, 2, 8, 8, 0, 0, 0, 16, 2, 4, 1e-2))
        patched.setattr(finetune_gqa, "WINDOWS", 4)
        patched.setattr(finetune_gqa, "CALIBRATION_BATCHES", 4)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder, models, printed = tmp_path_factory.mktemp("finished"), {}, StringIO()
    path = folder / "bottles.txt"
    path.write_text("".join(f"{i} green bottles, standing on the wall\n" for i in range(2_000)))
    save_folder = finetune_gqa.save_folder

    def remember(model, out, config):
        models[out.name] = model
        save_folder(model, out, config)

    with pytest.MonkeyPatch.context() as patched, redirect_stdout(printed):
        patched.setattr(finetune_gqa, "save_folder", remember)
        run(path, folder / "out")
    return Finished(path, folder / "out", printed.getvalue().splitlines(), models)


def run(text_file, out, *more):
    finetune_gqa.main(["--text", str(text_file), "--out", str(out), "--steps", "5", "--device", "cpu", *more])


def states(out) -> dict[str, bytes]:
    """Every file with weights in it, by its path below ``out``."""
    return {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*.safetensors")}


def test_a_small_run_prints_and_writes_everything(finished):
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in finished.printed if line.startswith("|")
    ]
    assert [row[0] for row in rows[2:]] == NAMES
    assert [row[1] for row in rows[2:]] == ["1,024"] + ["512"] * 3 + ["256"] * 3
    assert [bool(row[3]) for row in rows[2:]] == [True, True, True, True, False, False, True]
    verdicts = [
        line.split(" at ")[0] for line in finished.printed if " starts at " in line or " ends at " in line
    ]
    assert verdicts == [*(f"{NAMES[n]} starts" for n in (2, 3, 5)), f"{NAMES[3]} ends"]
    assert (finished.out / "recovery.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished.out.rglob("*.tmp"))


FOLDERS = [
    ("mha", "Llama"),
    ("gqa-mean", "Llama"),
    ("gqa-aligned", "Llama"),
    ("gqa", "Llama"),
    ("mla", "DeepseekV3"),
]


@pytest.mark.parametrize(("folder", "kind"), FOLDERS)
def test_transformers_reads_the_folders_and_says_the_same(finished, folder, kind):
    theirs = AutoModelForCausalLM.from_pretrained(finished.out / folder, trust_remote_code=False)
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(TOKENS).logits, finished.models[folder](TOKENS), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("saves", [0, 3, 11])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(finished, tmp_path, monkeypatch, saves):
    """At the start and at the end of the first training, and halfway in that of a student."""
    save_state, left = training.save_state, [saves]

    def interrupt(*state):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        save_state(*state)

    with monkeypatch.context() as patched:
        patched.setattr(training, "save_state", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(finished.text, tmp_path)
    assert len(states(tmp_path)) < 9
    run(finished.text, tmp_path)
    assert len(states(finished.out)) == 11
    assert states(tmp_path) == states(finished.out)


def test_a_finished_run_trains_nothing_again(finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished.out, tmp_path / "out")
    monkeypatch.setattr(training, "take_step", None)
    run(finished.text, tmp_path / "out")
    again = capsys.readouterr().out.splitlines()[:-1]  # the last line names the folder
    assert [line.rsplit("|", 2)[0] for line in again] == [
        line.rsplit("|", 2)[0] for line in finished.printed[:-1]
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--seed", "1"],
            "first_batch_sha256: expected .*; give the same options, another --out, or delete the folder",
        ),
        (["--steps", "6"], "steps_after: expected 5, as in the run that was started in .*, got 6"),
        (["--kv-heads", "2"], "sizes: expected .*'kv_heads': 4.*, got .*'kv_heads': 2"),
        (["--rate", "0.5"], "rate_after: expected 0.0075, .*, got 0.5"),
    ],
)
def test_other_options_do_not_go_on_with_a_run(finished, more, message):
    with pytest.raises(SystemExit, match=message):
        run(finished.text, finished.out, *more)


def test_another_text_or_world_does_not_go_on_with_a_run(finished, tmp_path, monkeypatch):
    out, other = tmp_path / "out", tmp_path / finished.text.name
    out.mkdir()
    told = json.loads((finished.out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps(told | {"world_size": 2}))
    with pytest.raises(
        SystemExit, match=r"world_size: expected 2, as in the run that was started in .*, got 1"
    ):
        run(finished.text, out)
    tail = finished.text.read_text()[:-5] + "roof\n"  # no batch and no point of a curve need have seen it
    other.write_text(tail)
    with pytest.raises(SystemExit, match="text_sha256: expected"):
        run(other, finished.out)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="WORLD_SIZE: expected 1, got 2; this example trains in one process"):
        run(finished.text, finished.out)


def test_the_state_of_another_model_is_refused(finished, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(finished.out, out)
    (out / "state" / "gqa.safetensors").write_bytes((out / "state" / "mla.safetensors").read_bytes())
    with pytest.raises(
        SystemExit, match=r"gqa.safetensors: expected the state of this model, got other tensors .*; delete"
    ):
        run(finished.text, out)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_source_is_converted_with_its_own_tokens(text_file, tmp_path, tokenizer):
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(source)
    if tokenizer:
        letters = sorted(set(text_file.read_text()))
        model = Tokenizer(
            WordLevel({letter: 299 - i for i, letter in enumerate(letters)}, unk_token=letters[0])
        )
        model.pre_tokenizer = Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(source)
    run(text_file, out, "--source", str(source))
    assert not (out / "state" / "mha.safetensors").exists()  # nothing to train
    assert (out / "gqa" / "tokenizer.json").exists() == tokenizer
    assert json.loads((out / "gqa" / "config.json").read_text())["num_key_value_heads"] == 2
    begun = json.loads((out / "settings.json").read_text())
    assert sorted(begun["source_sha256"]) == sorted(file.name for file in source.iterdir())


def test_a_short_run_does_not_unlearn_what_the_original_knew(finished, monkeypatch, tmp_path):
    """Its yardstick starts at the rate at which the original's training ended, and no step goes faster."""
    rates = []

    def note(student, teacher, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"])
        return {"loss": 0.0}

    shutil.copytree(finished.out, tmp_path / "out")
    (tmp_path / "out" / "state" / "mha-on.safetensors").unlink()
    monkeypatch.setattr(training, "take_step", note)
    run(finished.text, tmp_path / "out")
    ended = finetune_gqa.FINAL_RATE * finetune_gqa.PRESETS["tiny"].learning_rate
    assert len(rates) == 5
    assert max(rates) == pytest.approx(ended)


def test_verdicts_follow_the_figures():
    good, poor = Result("A", [(0, 2.5), (9, 2.0199)], 1, None), Result("B", [(0, 2.6), (9, 2.0)], 1, None)
    assert better(good, poor).endswith("2.6000: better")
    assert better(poor, good).endswith("2.5000: NOT better")
    assert better(good, good).endswith("NOT better")
    assert close(good, poor).endswith("+0.99%: within 1%")
    assert close(good._replace(curve=[(0, 2.5), (9, 2.03)]), poor).endswith("+1.50%: NOT within 1%")
