"""Students with index branches: these learn alone first, then the model learns over the keys they choose."""

import csv
import json

import pytest
import torch
from healing_folders import contents, heal
from safetensors.torch import load_file
from torch import nn

import attnlib
from attnlib.__main__ import main
from attnlib.finetune import run, sparse, training
from attnlib.finetune.distillation import Speaker, differences
from attnlib.finetune.folders import attention_layers
from attnlib.finetune.recipe import Recipe
from attnlib.finetune.run import PICTURE, REPORT
from attnlib.finetune.settings import INDEX_RATE, SPARSE_RATE, Settings
from attnlib.indexing import Chosen
from tests.finetune.test_recipe import PLACES

KEYS = 4
USUAL = ("--layerwise", 0.5, "--save-every", 3, "--index-rate", 1e-2)


def make_sparse(folders, out, select=f"top={KEYS},heads=2"):
    given = ("convert", folders / "original", out, "--to", "attnlib", "--select", select, "--no-calibration")
    assert main([*map(str, given), "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def places(folders):
    """The folder with the original, its text, and ``sparse``: the same with index branches."""
    if not (folders / "sparse").exists():
        make_sparse(folders, folders / "sparse")
    return folders


@pytest.fixture(scope="module")
def healed(places, tmp_path_factory):
    out = tmp_path_factory.mktemp("healed") / "out"
    assert heal(places, out, *USUAL, source="sparse") == 0
    return out


def report_of(out):
    return json.loads((out / REPORT).read_text())


def changed(folder, out):
    old, new = (load_file(x / "model.safetensors") for x in (folder, out))
    return {name for name, x in old.items() if not x.equal(new[name])}


def speaker(folder):
    model = attnlib.load_pretrained(folder)
    attention = attention_layers(model)
    return Speaker(model, attention, lambda x: model(x).logits, sparse.branches_of(attention))


def test_only_index_branches_learn_alone(places, tmp_path):
    options = ("--steps", 30, "--layerwise", 1, "--save-every", 15, "--index-rate", 3e-2)
    assert heal(places, tmp_path / "out", *options, source="sparse") == 0
    names = changed(places / "sparse", tmp_path / "out")
    assert names
    assert all(".indexer." in name for name in names)
    recall = report_of(tmp_path / "out")["mass_recall"]
    assert recall["after"] > recall["before"] + 0.05


def test_all_attention_learns_over_the_chosen_keys(places, healed):
    names = changed(places / "sparse", healed)
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert {f"model.layers.{n}.self_attn.layer.{part}.weight" for n in range(2) for part in parts} <= names
    assert all("self_attn" in name for name in names)
    report, rows = report_of(healed), list(csv.DictReader((healed / "log.csv").read_text().splitlines()))
    assert report["held_out_bits_per_byte"].keys() == {"original", "before", "after", "window"}
    assert report["mass_recall"].keys() == {"before", "after", "window"}
    assert report["curve_mass_recall"][0] == [0, report["mass_recall"]["before"]]
    assert report["mass_recall"]["after"] == pytest.approx(report["curve_mass_recall"][-1][1], rel=1e-5)
    assert report["settings"]["index_rate"] == 1e-2
    assert [bool(row["kl"]) for row in rows] == [False] * 4 + [True] * 4
    assert all(float(row["index"]) > 0 for row in rows)
    assert [bool(row["recall"]) for row in rows] == [bool(row["held_out"]) for row in rows]
    assert (healed / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_the_summary_lists_the_window_and_the_recall(places, tmp_path, capsys):
    given = ("finetune", places / "sparse", tmp_path / "out", "--teacher", places / "original")
    small = ("--text", places / "text", "--steps", 2, "--batch", 2, "--context", 16, "--windows", 2)
    assert main([str(x) for x in (*given, *small)]) == 0
    shown = capsys.readouterr().out
    assert ", window " in shown
    assert "mass recall of the chosen keys: before 0." in shown


def test_other_students_are_reported_as_ever(folders, tmp_path):
    assert heal(folders, tmp_path / "out") == 0
    report = report_of(tmp_path / "out")
    assert not {"mass_recall", "curve_mass_recall"} & report.keys()
    assert not {"index_rate", "keys"} & report["settings"].keys()
    assert (tmp_path / "out" / "log.csv").read_text().splitlines()[0].endswith(",held_out")


class Stopped(BaseException):
    """What nobody catches."""


@pytest.mark.parametrize("count", [2, 4, 7])  # alone, at the first step over chosen keys, and later
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(places, tmp_path, healed, monkeypatch, count):
    left, function = [count], training.take_step

    def stop(*arguments):
        if not left[0]:
            raise Stopped
        left[0] -= 1
        return function(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(training, "take_step", stop)
        with pytest.raises(Stopped):
            heal(places, tmp_path / "out", *USUAL, source="sparse")
    assert heal(places, tmp_path / "out", *USUAL, source="sparse") == 0
    assert contents(tmp_path / "out") == contents(healed)


@pytest.mark.parametrize("more", [("--checkpointing",), ("--accumulate", 2)])
def test_checkpointing_and_parts_of_a_batch_change_no_more_than_rounding(places, tmp_path, healed, more):
    assert heal(places, tmp_path / "out", *USUAL, *more, source="sparse") == 0
    plain, other = (load_file(x / "model.safetensors") for x in (healed, tmp_path / "out"))
    for name, x in plain.items():
        torch.testing.assert_close(other[name], x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "precision"), [(("--kv-heads", 2), "bf16"), (("--rank", 24), "fp32")], ids=["heads", "latents"]
)
def test_other_conversions_learn_too(folders, tmp_path, size, precision):
    given = ("convert", folders / "original", tmp_path / "own", "--to", "attnlib", "--no-calibration")
    select = ("--select", "top=2,block_size=2,heads=2", "--quiet")
    assert main([str(x) for x in (*given, *size, *select)]) == 0
    asked = ("finetune", tmp_path / "own", tmp_path / "out", "--teacher", folders / "original", "--quiet")
    small = ("--text", folders / "text", "--steps", 4, "--batch", 2, "--context", 16, "--windows", 2)
    assert main([str(x) for x in (*asked, *small, "--precision", precision, "--rate", 1e-3)]) == 0
    assert len(changed(tmp_path / "own", tmp_path / "out")) > 8


def test_index_branches_learn_over_chosen_keys_in_bf16(places, tmp_path):
    """Though they choose without gradients first, from weights that autocast has converted."""
    options = ("--steps", 2, "--layerwise", 0, "--precision", "bf16", "--rate", 1e-2)
    assert heal(places, tmp_path / "out", *options, source="sparse") == 0
    branches = {x for x in load_file(places / "sparse" / "model.safetensors") if ".indexer." in x}
    assert branches <= changed(places / "sparse", tmp_path / "out")


def test_losses_train_what_is_theirs(places):
    """Index branches get the gradients of their loss alone, and all other weights those without them."""
    student, teacher, tokens = (
        speaker(places / "sparse"),
        speaker(places / "original"),
        torch.arange(3, 20)[None],
    )
    teacher.branches = []
    recipe = Recipe(4, 1, 16, 1e-3, 4, layerwise=0.5, index_rate=1e-3)
    with student, teacher:
        alone = sparse.losses(student, teacher, tokens, recipe, 0)
        alone["loss"].backward()
        for name, x in student.model.named_parameters():
            assert (x.grad is not None) == (".indexer." in name), name
        student.model.zero_grad()
        found = sparse.losses(student, teacher, tokens, recipe, 2)
        found["loss"].backward()
        both = {name: x.grad.clone() for name, x in student.model.named_parameters()}
        student.model.zero_grad()
        differences(student, teacher, tokens).loss(0, "teacher").backward()
    for name, x in student.model.named_parameters():
        if ".indexer." in name:
            assert x.grad is None
            assert both[name].any()
        else:
            torch.testing.assert_close(both[name], x.grad)


@torch.no_grad()
def test_recall_is_the_share_of_dense_probabilities(places):
    student, tokens = speaker(places / "sparse"), torch.randint(10, 120, (2, 17))
    with student:
        _, found = sparse.measure(student, sparse.by_index, KEYS, tokens)
    x, expected = student.model.model.embed_tokens(tokens[:, :-1]), []
    for block in student.model.model.layers:
        layer, normed = block.self_attn.layer, block.input_layernorm(x)
        chosen = layer.choose(normed)
        p = layer.weights(normed, over="none", rows=torch.arange(16), selected=Chosen(None)).mean(1)
        expected.append(p.gather(-1, chosen.indices[:, :, 0].clamp(min=0).long()).sum(-1)[:, KEYS:].mean(1))
        x = x + layer(normed, selected=chosen)
        x = x + block.mlp(block.post_attention_layernorm(x))
    torch.testing.assert_close(found, torch.stack(expected).mean(0))


@pytest.mark.parametrize("keys", [1, 4, 8])
def test_a_window_has_the_first_and_the_last_keys(keys):
    lists = sparse.window(keys)(nn.Identity(), torch.empty(2, 20, 3)).indices
    assert lists.shape == (2, 20, 1, keys)
    first = max(1, keys // 4)
    for i, row in enumerate(lists[1, :, 0].tolist()):
        seen = [j for j in row if j >= 0]
        assert sorted(seen) == sorted(
            {*range(min(first, i + 1)), *range(max(first, i - keys + first + 1), i + 1)}
        )


def test_each_stage_has_a_rate_of_its_own():
    recipe = Settings(**PLACES, keys=4, steps=100).recipe
    rates = [recipe.rate_at(step) for step in range(100)]
    assert max(rates[:50]) == pytest.approx(INDEX_RATE)
    assert max(rates[50:]) == pytest.approx(SPARSE_RATE)
    assert rates[49] < 0.1 * INDEX_RATE
    assert rates[99] < 0.1 * SPARSE_RATE


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("half", ("--index-rate", 1e-3), "--index-rate: expected index branches in"),
        ("sparse", ("--lora", 2), "--lora: expected none for index branches"),
        ("sparse", ("--context", KEYS), "--context: expected more than the 4 keys"),
        ("sparse", ("--index-rate", 0), "--index-rate: expected a positive number"),
    ],
)
def test_options_that_do_not_fit_are_refused(places, tmp_path, monkeypatch, capsys, source, options, reason):
    monkeypatch.setattr(run, "load", None)
    assert heal(places, tmp_path / "out", *options, source=source) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
