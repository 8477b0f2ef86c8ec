"""What ``python -m attnlib convert`` shows: bars with titles, a picture, and a command to go on with."""

import json
import re
import shlex

import pytest
from model_helpers import TEXT, save

from attnlib.__main__ import main
from attnlib.convert import picture
from attnlib.convert.picture import Start, draw

SHORT = ("--samples", 4, "--length", 20)
SHOWN = re.compile(r"(?:^|\r|\n)([a-z ]+): +100%\|[^|]*\| ([0-9.kM]+)/([0-9.kM]+) \[[^,]*, +([^]]+)/s\]")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("a model") / "in", "llama", attention_bias=False)


def run(source, out, *options, to=("gqa", "--kv-heads", 2)):
    (out.parent / "text").write_text(TEXT)
    given = ("convert", source, out, "--to", *to, "--text", out.parent / "text", *SHORT, *options)
    return main([str(x) for x in given])


def bars(shown):
    """The title and unit of each bar that reached its end, in order."""
    found = [(title, rate) for title, done, total, rate in SHOWN.findall(shown) if done == total]
    return [(title, "B" if rate.endswith("B") else rate.lstrip("0123456789.? ")) for title, rate in found]


def test_bytes_and_layers_have_bars_of_their_own(source, tmp_path, capsys):
    assert run(source, tmp_path / "out") == 0
    assert bars(capsys.readouterr().err) == [
        ("hashing", "B"),
        ("calibrating", "samples x layers"),
        ("converting", "layers"),
        ("writing", "B"),
        ("verifying", "B"),
        ("comparing", "layers"),
    ]


def test_a_budget_has_bars_to_its_end(source, tmp_path, capsys):
    to = ("attnlib", "--cache", "50%", "--layers", "gqa")
    assert run(source, tmp_path / "out", to=to) == 0
    shown = bars(capsys.readouterr().err)
    assert shown[:4] == [
        ("hashing", "B"),
        ("calibrating", "samples x layers"),
        ("measuring", "layers"),
        ("comparing logits", "comparisons"),
    ]


def test_a_resumed_run_counts_layers_that_are_written(source, tmp_path, monkeypatch, capsys):
    from attnlib.convert.checkpoint import conversion

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_rest", stop)
        assert run(source, tmp_path / "out", "--max-shard-size", "12KB") == 130
    capsys.readouterr()
    assert run(source, tmp_path / "out", "--max-shard-size", "12KB") == 0
    assert {("converting", "layers"), ("writing", "B")} <= {*bars(capsys.readouterr().err)}


def test_quiet_is_quiet(source, tmp_path, capsys):
    assert run(source, tmp_path / "out", "--quiet", to=("attnlib", "--cache", "50%", "--layers", "gqa")) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("linked", [False, True])
def test_the_suggested_command_can_be_run(source, tmp_path, monkeypatch, linked, capsys):
    """Its paths are the ones of the conversion, quoted for a shell."""
    folder = tmp_path / "two words"
    folder.mkdir()
    if linked:
        cache = folder / "models--some--model"
        (cache / "blobs").mkdir(parents=True)
        snapshot = cache / "snapshots/abc"
        snapshot.mkdir(parents=True)
        for path in source.iterdir():
            (cache / "blobs" / path.name).write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    given = snapshot if linked else source
    assert run(given, folder / "out", *(["--follow-links"] if linked else [])) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "attnlib finetune" in line]
    words = shlex.split(line)
    assert ("&&" in words) == linked
    if linked:
        assert words[:4] == ["cp", "-rL", str(snapshot), f"{snapshot}-files"]
        words = words[5:]
        given = f"{snapshot}-files"
    text = folder / "text"
    assert words == [
        *("python", "-m", "attnlib", "finetune", f"{folder / 'out'}", f"{folder / 'out'}-healed"),
        *("--teacher", f"{given}", "--text", f"{text}"),
    ]
    if not linked:
        more = ["--steps", "2", "--context", "16", "--batch", "2", "--device", "cpu", "--quiet"]
        assert main(words[3:] + more) == 0


@pytest.fixture
def drawn(monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures, savefig = [], figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *x, **y: (figures.append(self), savefig(self, *x, **y))
    )
    return figures


@pytest.mark.parametrize(
    ("to", "label"),
    [
        (("gqa", "--kv-heads", 2), None),
        (("attnlib", "--cache", "50%", "--layers", "gqa"), "before: 8"),
        (("attnlib", "--rank", 16), "before: 64 keys and values"),
    ],
    ids=["gqa", "heads", "latents"],
)
def test_the_picture_shows_the_start(source, tmp_path, drawn, to, label):
    assert run(source, tmp_path / "out", "--quiet", to=to) == 0
    assert (tmp_path / "out" / picture.PICTURE).read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    report = json.loads((tmp_path / "out/conversion_report.json").read_text())
    measures, cache = report["measures"], report["cache_bytes_per_token"]
    before, after = measures["perplexity_before"], measures["perplexity_after"]
    title = figure.get_suptitle()
    assert title.startswith("in, ")
    assert "thousand weights: " in title
    assert f"{cache['after'] / cache['before']:.0%} of the cache" in title
    assert f"perplexity {before:.3g} before and {after:.3g} after" in title
    pairs = {axes.get_title(): [bar.get_height() for bar in axes.patches] for axes in figure.axes[-2:]}
    assert pairs["cache, bytes per token"] == [cache["before"], cache["after"]]
    assert pairs["perplexity"] == pytest.approx([before, after])
    labels = {text.get_text() for axes in figure.axes for text in getattr(axes.get_legend(), "texts", [])}
    assert label is None or label in labels


def test_a_picture_without_a_comparison(tmp_path, drawn):
    report = {
        "layers": [{"layer": 0, "key_error": 0.1}],
        "settings": {},
        "cache_bytes_per_token": {"before": 64, "after": 16},
        "measures": {},
    }
    draw(report, tmp_path, Start("a model", 7_000_000_000, 8, 64))
    assert drawn[0].get_suptitle() == "a model, 7 billion weights: 25% of the cache"
    report["measures"] = {"perplexity_before": 9.0, "perplexity_after": None}
    draw(report, tmp_path, Start("a model", 700, 8, 64))
    assert (
        drawn[1]
        .get_suptitle()
        .endswith("700 weights: 25% of the cache, perplexity 9 before and too large after")
    )
