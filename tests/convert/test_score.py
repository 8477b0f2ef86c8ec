"""``python -m attnlib score``: a folder against itself, scores by definition, in stores, and refusals."""

import hashlib
import json
import re

import pytest
import torch
from model_helpers import TEXT, load, model_of, save
from safetensors.torch import load_file, save_file

from attnlib.__main__ import main
from attnlib.checkpoint_files.folder import read_folder
from attnlib.convert.checkpoint.errors import RequestError
from attnlib.convert.score import command
from attnlib.convert.score.pair import scored
from attnlib.convert.score.stores import NAMES, Store, usual
from attnlib.convert.score.texts import scored_texts, scored_windows

TARGETS = {
    "gqa": ("--to", "gqa", "--kv-heads", "2"),
    "mla": ("--to", "mla", "--rank", "12", "--rope-dim", "4"),
    "attnlib": ("--to", "attnlib", "--rank", "12", "--rope-dim", "4"),
    "attnlib by need": ("--to", "attnlib", "--cache", "50%", "--layers", "gqa"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "in", "llama", attention_bias=False)


@pytest.fixture(scope="module")
def smaller(source):
    """Results of the source by target."""
    made = {}

    def result(name):
        if name not in made:
            made[name] = source.with_name(name)
            words = ("convert", source, made[name], *TARGETS[name], "--no-calibration", "--quiet")
            assert main([*map(str, words), "--no-check-logits"]) == 0
        return made[name]

    return result


@pytest.fixture
def texts(tmp_path):
    """A text of several windows, one that ends inside a window, and one of a few tokens."""
    made = {"long": TEXT[:600], "middle": TEXT[700:900], "short": TEXT[1000:1011]}
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in made]


def score(capsys, *words, code=0):
    """The scores that the command prints as JSON, or its error."""
    given = ("score", *words) if code else ("score", *words, "--json")
    assert main([*map(str, given)]) == code
    out, error = capsys.readouterr()
    return error if code else json.loads(out)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_folder_scores_nothing_against_itself(tmp_path, texts, kind, capsys):
    source = save(tmp_path / "in", kind)
    found = score(capsys, source, source, *texts)
    rows = [found, *found["by_text"]]
    assert [row["kl_nats"] for row in rows] == [0.0] * 4
    assert all(row["perplexity_before"] == row["perplexity_after"] > 1 for row in rows)
    assert found["cache_bytes_per_token"]["before"] == found["cache_bytes_per_token"]["after"]


def test_a_copy_scores_nothing(tmp_path, source, texts, capsys):
    words = ("convert", source, tmp_path / "out", "--to", "gqa", "--kv-heads", "8", "--quiet")
    assert main([*map(str, words)]) == 0
    assert score(capsys, source, tmp_path / "out", *texts)["kl_nats"] == 0


def by_definition(source, result, text, *, length):
    """KL divergence and perplexities of whole models of transformers, over windows without padding."""
    ids = [0 if x == "?" else ord(x) for x in text]
    windows = [[0, *ids[n : n + length - 1]] for n in range(0, len(ids), length - 1)]
    kl, lost = [], [[], []]
    for window in windows:
        tokens = torch.tensor([window])
        with torch.no_grad():
            old, new = (load(x)(tokens).logits[0].double().log_softmax(-1) for x in (source, result))
        kl.append((old.exp() * (old - new)).sum(-1))
        for some, said in zip(lost, (old, new), strict=True):
            some.append(-said[:-1].gather(-1, tokens[0, 1:, None])[:, 0])
    return [float(torch.cat(kl).mean()), *(float(torch.cat(some).mean().exp()) for some in lost)]


@pytest.mark.parametrize("length", [33, 64])
def test_scores_are_those_of_whole_models(source, smaller, texts, capsys, length):
    """Padding counts nowhere."""
    found = score(capsys, source, smaller("gqa"), *texts, "--samples", 99, "--length", length)
    assert found["tokens"] > sum(len(path.read_text()) for path in texts)
    for row in found["by_text"]:
        [path] = [path for path in texts if path.name == row["name"]]
        wanted = by_definition(source, smaller("gqa"), path.read_text(), length=length)
        got = [row["kl_nats"], row["perplexity_before"], row["perplexity_after"]]
        assert got == pytest.approx(wanted, rel=1e-4)
    divergences = [row["kl_nats"] for row in found["by_text"]]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] > divergences[-1]


def test_a_text_scores_the_same_beside_others(source, smaller, texts, capsys):
    together = score(capsys, source, smaller("gqa"), *texts)["by_text"]
    for path in texts:
        [alone] = score(capsys, source, smaller("gqa"), path)["by_text"]
        [row] = [row for row in together if row["name"] == path.name]
        assert row == {name: pytest.approx(x, rel=1e-5) if name != "name" else x for name, x in alone.items()}


@pytest.mark.parametrize("store", [None, "fp32", "int8"])
@pytest.mark.parametrize("target", TARGETS)
def test_results_of_every_target_have_scores(source, smaller, texts, capsys, target, store):
    given = () if store is None else ("--store", store)
    found = score(capsys, source, smaller(target), *texts, *given)
    cache = found["cache_bytes_per_token"]
    assert 0 < cache["after"] < cache["before"] == 3 * 2 * 8 * 4 * 4
    plain = score(capsys, source, smaller(target), *texts)
    assert found["kl_nats"] == pytest.approx(plain["kl_nats"], rel=1e-4 if store != "int8" else 0.3)
    if store == "int8":
        assert found["kl_nats"] != pytest.approx(plain["kl_nats"], rel=1e-4)
        assert cache["after"] < plain["cache_bytes_per_token"]["after"]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_a_smaller_store_loses_more(tmp_path, kind):
    """A model loses nothing in fp32, little in bf16, more in int8 and fp8; mistral has a window."""
    source = read_folder(save(tmp_path / "in", kind))
    windows = scored_windows(source.folder, scored_texts([]), samples=2, length=64)
    lost = {
        name: scored(source, source, windows, store=Store.of(name, torch.float32))["kl_nats"]
        for name in NAMES
    }
    assert abs(lost["fp32"]) < 1e-8 < lost["fp16"] < lost["bf16"] < lost["int8"] < lost["fp8"] < 1


def test_a_store_has_the_dtype_of_the_model():
    assert [usual(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)] == [
        "fp16",
        "bf16",
        "bf16",
    ]
    assert Store.of("int8", torch.float16) == ("int8", torch.float16, torch.int8)
    assert Store.of("fp32", torch.float16) == ("fp32", torch.float32, None)


def test_the_summary_names_the_worst_text_first(source, smaller, texts, capsys):
    assert main([*map(str, ("score", source, smaller("gqa"), *texts))]) == 0
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "cache bytes per token: 768 before, 192 after"
    assert re.fullmatch(
        r"KL divergence [\d.e-]+ nats, perplexity [\d.,]+ before and [\d.,]+ after, on 726 tokens", lines[1]
    )
    assert lines[2].startswith("by text, worst first:")
    divergences = [float(line.split()[1]) for line in lines[3:]]
    assert len(divergences) == 3
    assert divergences == sorted(divergences, reverse=True)
    assert error == ""  # a short run shows no bar


@pytest.mark.parametrize("store", [(), ("--store", "int8")], ids=str)
def test_a_long_run_shows_a_bar_to_its_end(source, texts, capsys, monkeypatch, store):
    monkeypatch.setattr(command, "SHORT", 0)
    words = [*map(str, ("score", source, source, *texts, *store))]
    assert main(words) == 0
    assert re.search(r"scoring: 100%\|", capsys.readouterr().err)
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_texts_that_the_result_has_seen_are_named(tmp_path, source, texts, capsys):
    out = tmp_path / "out"
    words = ("convert", source, out, *TARGETS["gqa"], "--quiet", "--samples", 4, "--length", 20, "--text")
    for seen in (texts[:1], texts[:2]):
        assert main([*map(str, (*words, *seen, "--overwrite"))]) == 0
        assert score(capsys, source, out, *texts)["seen_by_result"] == [path.name for path in seen]
    assert main([*map(str, ("score", source, out, *texts))]) == 0
    assert capsys.readouterr().out.endswith(
        "calibrated or trained on: long, middle; other texts may lose more\n"
    )
    (out / "finetune_report.json").write_text(
        json.dumps({"text_sha256_by_file": [hashlib.sha256(texts[2].read_bytes()).hexdigest()]})
    )
    (out / "conversion_report.json").write_text("no JSON")
    assert score(capsys, source, out, *texts)["seen_by_result"] == ["short"]


def test_a_folder_of_files_is_one_text(tmp_path, source, capsys):
    for name in ("a/one.txt", "a/two.txt", "b/one.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT[:300])
    (tmp_path / "a/.hidden").write_bytes(b"\xff")
    files = (tmp_path / "a", tmp_path / "b/one.txt", tmp_path / "a/one.txt")
    found = score(capsys, source, source, *files, "--samples", 1, "--length", 32)
    assert {row["name"] for row in found["by_text"]} == {"a", "one.txt (2)", "one.txt (3)"}
    assert found["tokens"] == 4 * 32


def test_without_files_the_held_out_sample_is_scored(source, capsys):
    found = score(capsys, source, source, "--samples", 1, "--length", 32)
    assert len(found["by_text"]) == 8
    assert found["tokens"] == 8 * 32


def other_folder(tmp_path, source, what):
    """A folder that is no result of the source, or not a whole one."""
    folder = tmp_path / "other"
    if what == "vocabulary":
        return save(folder, "llama", vocab_size=140)
    made = save(folder, "llama", attention_bias=False)
    if what == "tokenizer":
        path = made / "tokenizer.json"
        changed = json.loads(path.read_text())
        words = changed["model"]["vocab"]
        words["!"], words["A"] = words["A"], words["!"]
        path.write_text(json.dumps(changed))
    for path in made.glob("*.safetensors") if what in ("nan", "missing") else ():
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("layers.1.self_attn.v_proj.weight")]:
            if what == "missing":
                del tensors[name]
            else:
                tensors[name][:] = torch.nan
        save_file(tensors, path, metadata={"format": "pt"})
    if what == "missing":
        index = json.loads((made / "model.safetensors.index.json").read_text())
        del index["weight_map"]["model.layers.1.self_attn.v_proj.weight"]
        (made / "model.safetensors.index.json").write_text(json.dumps(index))
    return made


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("vocabulary", 3, "RESULT: expected vocab_size 130 as in SOURCE, got 140; as SOURCE,"),
        ("tokenizer", 3, "RESULT: expected a tokenizer with the tokens of SOURCE, got other tokens"),
        ("missing", 3, "got missing model.layers.1.self_attn.v_proj.weight"),
        ("nan", 4, "RESULT: expected finite logits, got NaN or infinity on"),
    ],
)
def test_another_model_is_refused(tmp_path, source, texts, capsys, what, code, said):
    other = other_folder(tmp_path, source, what)
    assert said in score(capsys, source, other, *texts, code=code)


def test_a_source_that_is_not_finite_is_refused(tmp_path, source, texts, capsys):
    other = other_folder(tmp_path, source, "nan")
    error = score(capsys, other, source, *texts, code=3)
    assert "SOURCE: expected a language model with finite logits" in error


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("gone",), 2, "FILE: expected a readable file, got"),
        (("binary",), 2, "FILE: expected UTF-8 in"),
        (("empty",), 2, "FILE: expected at least 1 tokens in empty, got 0; use a longer text"),
        (("folder",), 2, "FILE: expected text files in the folder"),
        (("long", "--length", 129), 2, "--length: expected 2 to 128 tokens"),
        (("long", "--length", 1), 2, "--length: expected 2 to 128 tokens"),
        (("long", "--samples", 0), 2, "--samples: expected a positive count, got 0"),
    ],
)
def test_a_wrong_request_names_the_remedy(tmp_path, source, texts, capsys, words, code, said):
    (tmp_path / "binary").write_bytes(b"abc\xff")
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    file, *options = words
    error = score(capsys, source, source, tmp_path / file, *options, code=code)
    assert error.startswith(f"python -m attnlib score: {said}")
    assert error.count("\n") == 1


def test_a_missing_folder_is_a_checkpoint_that_cannot_be_scored(tmp_path, source, capsys):
    assert "expected a folder with a checkpoint" in score(capsys, source, tmp_path / "gone", code=3)


def test_an_interrupted_score_exits_as_a_shell_expects(source, texts, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "scored", stop)
    assert "interrupted" in score(capsys, source, source, *texts, code=130)


def test_a_model_without_a_paged_cache_says_so(tmp_path, texts, capsys, monkeypatch):
    from attnlib.convert.score import rounded

    def refuse(*_, **__):
        raise NotImplementedError("model: expected layers that keep keys and values, got 'other'")

    monkeypatch.setattr(rounded, "RoundedCache", refuse)
    source = save(tmp_path / "in", "llama")
    error = score(capsys, source, source, *texts, "--store", "int8", code=2)
    assert "int8: expected a model with a paged cache, got in:" in error
    with pytest.raises(RequestError):
        scored_texts([tmp_path / "gone"])


def test_the_models_of_these_tests_differ():
    """A score of 0 means something only if weights are not all the same."""
    assert model_of("llama").model.layers[0].self_attn.k_proj.weight.std() > 0.1
