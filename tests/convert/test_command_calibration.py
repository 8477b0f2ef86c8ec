"""What the command calibrates on: a bundled sample where nothing is said, a text, or nothing; and how it says
so.
"""

import hashlib
import json
import shutil

import pytest
from checkpoint_helpers import contents
from family_models import make
from model_helpers import TEXT, add_tokenizer, save
from transformers import GPT2Config, GPT2LMHeadModel

from attnlib.__main__ import main
from attnlib.convert.text import choice
from attnlib.convert.text.held_out import BEHIND
from attnlib.convert.text.layerwise import TextCalibration
from attnlib.convert.text.sample import sample_texts
from attnlib.convert.wording import in_options

KINDS = ["code", "dialogue", "documentation", "languages", "mathematics", "old prose", "prose", "reference"]
SHORT = ("--samples", 3, "--length", 16)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama") / "in", "llama", attention_bias=False)


def run(source, out, *options, to=("gqa", "--kv-heads", 2)):
    return main([str(x) for x in ("convert", source, out, "--to", *to, *options)])


def report_of(out):
    return json.loads((out / "conversion_report.json").read_text())


def calibration_of(out):
    return report_of(out)["settings"]["calibration"]


@pytest.mark.parametrize(
    "to", [("gqa", "--kv-heads", 2), ("mla", "--rank", 16, "--rope-dim", 4)], ids=lambda to: to[0]
)
def test_without_a_text_the_sample_is_taken_and_named(source, tmp_path, to, capsys):
    assert run(source, tmp_path / "out", "--samples", 8, "--length", 16, to=to) == 0
    sha256 = hashlib.sha256("".join(x.calibration for x in sample_texts()).encode()).hexdigest()
    texts = [
        {"name": x.name, "sha256": hashlib.sha256(x.calibration.encode()).hexdigest(), "samples": 1}
        for x in sample_texts()
    ]
    said = {"text": choice.SAMPLE, "text_sha256": sha256, "samples": 8, "length": 16, "texts": texts}
    assert calibration_of(tmp_path / "out") == said
    printed, bar = capsys.readouterr()
    assert f"calibrated on: 8 x 16 tokens of the bundled sample ({', '.join(KINDS)}), sha256 " in printed
    assert f"{sha256[:12]}; text like the model's training data gives better results: --text FILE" in printed
    rows = report_of(tmp_path / "out")["measures"]["by_text"]
    assert sorted(row["name"] for row in rows) == KINDS
    table = printed.split("by text, worst first:")[1].splitlines()[1:9]
    assert [line[2:].split("  ")[0] for line in table] == [row["name"] for row in rows]
    assert "for random inputs" not in printed
    assert "calibrating on the bundled sample: 100%" in bar
    assert "24/24" in bar  # samples x layers
    assert "comparing: 100%" in bar
    assert "6/6" in bar  # layers of source and result
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report = report_of(tmp_path / "out")
    assert to[0] == "mla" or (report["settings"]["merge"], report["settings"]["grouping"]) == (
        "principal",
        "similar",
    )


def test_the_sample_is_a_text_like_any(source, tmp_path):
    for kind in sample_texts():
        (tmp_path / kind.name).write_text(kind.calibration)
    texts = [tmp_path / name for name in KINDS]
    assert run(source, tmp_path / "a", *SHORT) == 0
    assert run(source, tmp_path / "b", *SHORT, "--text", *texts) == 0
    a, b = (contents(tmp_path / name) for name in "ab")
    for name in ("conversion_report.json", "conversion_report.png"):  # held-out text differs
        assert a.pop(name, 0) != b.pop(name, 1)
    assert a == b


def test_a_text_of_ones_own_is_not_the_sample(source, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    assert run(source, tmp_path / "out", *SHORT, "--text", tmp_path / "text") == 0
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()
    assert calibration_of(tmp_path / "out") == {"text_sha256": sha256, "samples": 3, "length": 16}
    printed, bar = capsys.readouterr()
    assert f"calibrated on: 3 x 16 tokens of --text (sha256 {sha256[:12]})" in printed
    assert "calibrating: 100%" in bar


def test_no_calibration_goes_by_the_weights_alone(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TextCalibration, "__init__", lambda *_, **__: pytest.fail("a text was run"))
    assert run(source, tmp_path / "out", "--no-calibration") == 0
    assert calibration_of(tmp_path / "out") == "no text, only the weights"
    settings = report_of(tmp_path / "out")["settings"]
    assert (settings["merge"], settings["grouping"]) == ("mean", "neighbours")
    printed, bar = capsys.readouterr()
    assert "calibrated on: no text, only the weights" in printed
    assert "for random inputs" in printed
    assert "calibrating" not in bar


@pytest.mark.parametrize("option", ["--quiet", "--no-check-logits"])
def test_a_bar_of_a_comparison_is_seen_where_there_is_one(source, tmp_path, capsys, option):
    assert run(source, tmp_path / "out", *SHORT, option) == 0
    bars = capsys.readouterr().err
    assert "comparing" not in bars
    assert ("calibrating" in bars) == (option != "--quiet")


@pytest.mark.parametrize("options", [(), ("--samples", 2)])
def test_what_merges_nothing_is_not_calibrated(source, tmp_path, capsys, monkeypatch, options):
    monkeypatch.setattr(TextCalibration, "__init__", lambda *_, **__: pytest.fail("a text was run"))
    (tmp_path / "in").mkdir()
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=90)).save_pretrained(
        tmp_path / "gpt2"
    )
    for name, source_of, heads in (("a", source, 8), ("b", tmp_path / "gpt2", 4)):
        assert run(source_of, tmp_path / name, *options, to=("gqa", "--kv-heads", heads)) == 0
        assert calibration_of(tmp_path / name) == "nothing, as no heads are merged"
        printed, bar = capsys.readouterr()
        assert "calibrated on: nothing, as no heads are merged" in printed
        assert "comparing" in bar


def test_the_length_is_no_more_than_the_model_reads(source, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "SAMPLES", 2)
    assert run(source, tmp_path / "out") == 0
    assert calibration_of(tmp_path / "out")["length"] == 128  # max_position_embeddings


def test_by_default_it_is_128_pieces_of_512_tokens(source, tmp_path, monkeypatch):
    longer = save(tmp_path / "in", "llama", max_position_embeddings=4096)
    (tmp_path / "text").write_text(TEXT * 50)
    for files, samples in ((None, 80), ([tmp_path / "text"], 128)):
        chosen = choice.Choice(files, None, None, None)
        assert chosen.windows(longer)[0].tokens.shape == (samples, 512)
        assert chosen.windows(source)[0].tokens.shape == (samples, 128)


@pytest.mark.parametrize("files", [2, 3])
def test_several_texts_share_the_windows_and_are_each_scored(source, tmp_path, capsys, files):
    """Two files of one name get numbers."""
    paths = [tmp_path / "0/a.txt", tmp_path / "1/a.txt", tmp_path / "2/b.txt"][:files]
    for n, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(TEXT[n:])
    names = ["a.txt (1)", "a.txt (2)", "b.txt"][:files]
    options = ("--samples", 6, "--length", 16)
    assert run(source, tmp_path / "out", *options, "--text", *paths) == 0
    texts = calibration_of(tmp_path / "out")["texts"]
    assert [(text["name"], text["samples"]) for text in texts] == [(name, 6 // files) for name in names]
    measures = report_of(tmp_path / "out")["measures"]
    assert measures["text"] == BEHIND
    assert sorted(row["name"] for row in measures["by_text"]) == names
    assert f"calibrated on: 6 x 16 tokens of --text ({', '.join(names)}; sha256 " in capsys.readouterr().out
    assert run(source, tmp_path / "again", *options, "--text", paths[0], "--text", *paths[1:]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


@pytest.mark.parametrize(
    "to", [("gqa", "--kv-heads", 2), ("mla", "--rank", 16, "--rope-dim", 4)], ids=lambda to: to[0]
)
def test_a_source_without_a_tokenizer_says_what_to_do(source, tmp_path, to, capsys):
    shutil.copytree(source, tmp_path / "in")
    for path in (tmp_path / "in").glob("*token*"):
        path.unlink()
    assert run(tmp_path / "in", tmp_path / "out", to=to) == 3
    error = capsys.readouterr().err
    assert "in: expected the model's own tokenizer, to read the text, got none; copy it there" in error
    assert "--no-calibration converts without a text" in error
    assert run(tmp_path / "in", tmp_path / "out", "--no-calibration", to=to) == 0


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen2_moe", "gemma3_text", "qwen2_vl", "cohere2", "phi3", "lfm2", "qwen3_next"]
)
def test_families_are_calibrated_by_default(tmp_path, kind, capsys):
    """With fewer heads that are not equal, so that every layer is merged."""
    make(kind).save_pretrained(tmp_path / "in")
    add_tokenizer(tmp_path / "in")
    text = "".join(chr(33 + n % 25) for n in range(400))  # tokens that the model has
    (tmp_path / "text").write_text(text)
    options = ("--text", tmp_path / "text", "--samples", 2, "--length", 16)
    assert run(tmp_path / "in", tmp_path / "out", *options) == 0
    assert report_of(tmp_path / "out")["measures"]["loaded_by"]
    bars = capsys.readouterr().err
    for title in ("calibrating", "comparing"):
        shown = [line for line in bars.split("\r") if line.startswith(f"{title}:")]
        assert "100%" in shown[-1]
        assert all("%" in line for line in shown)  # as there is none beyond the end
    assert ("6/6" in shown[-1]) == (kind == "lfm2")  # two layers of three have attention, and all are run


REFUSED = {
    "--text: does not apply with --no-calibration": ("--no-calibration", "--text", "x"),
    "--samples, --length: does not apply": ("--no-calibration", "--samples", 3, "--length", 3),
    "--keep-calibration: does not apply": ("--no-calibration", "--keep-calibration", "x"),
    "--keep-calibration: expected a folder": ("--keep-calibration", "{tmp}/file"),
    "--samples: expected a positive count, got 0": ("--samples", 0),
    "--length: expected a positive count, got -1": ("--length", -1),
    "--text: expected a readable file": ("--text", "{tmp}"),
    "--text: expected UTF-8": ("--text", "{tmp}/latin"),
    "--text: expected at least --length 30 tokens, got 4": ("--text", "{tmp}/file", "--length", 30),
    "--kv-heads: expected a divisor": ("--kv-heads", 3),
    "--align: expected ": ("--merge", "principal", "--align", "all"),
    "--reach: expected at least 1": ("--reach", 0),
    "--max-shard-size: expected": ("--max-shard-size", "0"),
    "OUT: expected a folder outside the source": ("out={source}/in/out",),
    "OUT: expected a writable parent folder": ("out={tmp}/no/out",),
    "OUT: expected a folder or an unused path": ("out={tmp}/file",),
    "OUT: expected an empty or new folder": ("out={tmp}/full",),
    "OUT: --overwrite replaces only folders with": ("out={tmp}/full", "--overwrite"),
}


@pytest.mark.parametrize("begins", REFUSED)
def test_refusals_begin_with_an_option(source, tmp_path, begins, capsys, monkeypatch):
    monkeypatch.setattr(TextCalibration, "_next", lambda *_: pytest.fail("a layer was run"))
    (tmp_path / "file").write_text("text")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    options = [str(x).format(tmp=tmp_path, source=source.parent) for x in REFUSED[begins]]
    out = next((x.removeprefix("out=") for x in options if x.startswith("out=")), tmp_path / "out")
    assert run(source, out, *(x for x in options if not x.startswith("out="))) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"python -m attnlib convert: {begins}"), error
    assert not list(tmp_path.glob("out*"))


def test_messages_in_options():
    for message, wanted in {
        "rank: expected 2": "--rank: expected 2",
        "--to mla: rope_dim: expected 2": "--rope-dim: expected 2",
        "layer 3: merge: expected 2": "layer 3: --merge: expected 2",
        'x: use merge="principal-values", which': "x: use --merge principal-values, which",
        "model.safetensors: the rank: 3": "model.safetensors: the rank: 3",
        "x; pass allow_nonfinite=True": "x; pass --allow-nonfinite",
        "x: expected length=30 tokens": "x: expected --length 30 tokens",
        "strength=3": "strength=3",
    }.items():
        assert in_options(message) == wanted
