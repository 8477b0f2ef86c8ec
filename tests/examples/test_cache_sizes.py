"""The example checks the formula against the allocator, and notices when they differ."""

import math
import sys

import cache_sizes
import pytest

from attnlib.sizes import Setting, chip, model
from attnlib.sizes.files import draw


def test_it_prints_the_table_and_writes_the_picture(tmp_path, capsys):
    cache_sizes.main(["--model", "gpt-oss-20b", "--out", str(tmp_path / "new")])
    text = capsys.readouterr().out
    assert "attention in all layers" in text
    assert text.count("bytes in a real cache") == 5
    assert (tmp_path / "new" / "cache_sizes.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_prints_the_table_and_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r"pip install 'attnlib\[demo\]'"):
        cache_sizes.main(["--model", "gpt-2", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert "attention in all layers" in text
    assert text.count("bytes in a real cache") == 4


def test_it_counts_what_the_cache_uses():
    setting = Setting(contexts=(100, 40), batches=(4, 3), page_size=16)
    assert cache_sizes.check(model("llama-2-7b"), setting) == 3 * 112 * 2**19


def test_it_notices_a_wrong_formula(monkeypatch):
    monkeypatch.setattr(cache_sizes, "cache_bytes", lambda *_, **__: 17)
    with pytest.raises(SystemExit, match=r"MHA at 4,096 tokens: expected 17 bytes by formula, got \d"):
        cache_sizes.check(model("gpt-2"), Setting())


def test_an_unknown_model_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        cache_sizes.main(["--model", "gpt-22"])
    assert ended.value.code == 2
    assert "did you mean 'gpt-2'?" in capsys.readouterr().err


def test_the_picture_has_binary_ticks_and_names_its_chip(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: (save(self, *a, **k), drawn.append(self)))
    own = model("llama-2-7b")
    draw(own, [own], Setting(chip=chip("a100-80gb"), contexts=(4096,)), tmp_path / "x.png")
    [figure] = drawn
    [axes], [legend] = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["MHA (the model itself)"]
    assert [text.get_text() for text in axes.texts] == [
        "a100-80gb: 61.95 GiB for the cache beside 12.55 GiB of weights"
    ]
    assert axes.lines[1].get_ydata()[0] == 80 * 10**9 - 2 * 6_738_415_616
    assert axes.get_ylabel() == "cache of 1 sequence"
    assert axes.lines[0].get_ydata()[-1] == 4096 * 2**19
    for axis, name in ((axes.xaxis, "4K"), (axes.yaxis, "1 GiB")):
        ticks, labels = axis.get_ticklocs(), [label.get_text() for label in axis.get_ticklabels()]
        assert all(math.frexp(tick)[0] == 0.5 for tick in ticks)  # powers of two
        if axis is axes.yaxis:
            assert all(label.split()[0] in {"1", "4", "16", "64", "256"} for label in labels)
        assert name in labels
    assert dict(zip(labels, ticks, strict=True))["1 GiB"] == 2**30
