"""The main job, with a minimal budget: its table, its picture, its weights, and its refusals."""

import compose_lm
import pytest
import torch
import variants
from safetensors.torch import save_file


def run(text_file, out, *more):
    compose_lm.main(
        ["--text", str(text_file), "--out", str(out), "--new-tokens", "5", "--device", "cpu", *more]
    )


def test_a_small_run_writes_everything(text_file, tmp_path, capsys, small_preset):
    run(text_file, tmp_path / "out", "--margin", "-9", "--steps", "3")
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    names, cells = [name.strip() for name in rows[0]], [[cell.strip() for cell in row] for row in rows[2:]]
    assert names[0] == "variant"
    assert [row[0] for row in cells] == ["MHA", "GQA", "MQA", "MLA"]
    measured, formula = names.index("cache B/token"), names.index("by formula")
    assert [row[measured] for row in cells] == [row[formula] for row in cells] == ["512", "256", "128", "160"]
    assert (tmp_path / "out" / "compose_lm.png").read_bytes().startswith(b"\x89PNG")
    for variant in variants.VARIANTS:
        model, name, preset = variants.load(tmp_path / "out" / f"{variant}.safetensors")
        assert (name, preset) == (variant, small_preset._replace(steps=3))
        assert model.lm_head.weight is model.embed.weight


def test_learning_too_little_fails(text_file, tmp_path, small_preset):
    with pytest.raises(
        SystemExit, match=r"held-out bits/byte: expected at most .*, got mqa .*; train longer"
    ):
        run(text_file, tmp_path, "--variants", "mqa")


def test_learning_beats_byte_frequencies(text_file, tmp_path, small_preset):
    run(text_file, tmp_path, "--variants", "mla", "--steps", "100", "--margin", "0.1")


def test_a_cache_of_another_size_than_the_formula_fails(text_file, tmp_path, monkeypatch, small_preset):
    monkeypatch.setattr(compose_lm, "cache_bytes", lambda *a, page_size: 7)
    with pytest.raises(SystemExit, match="cache of 0 tokens: expected 7 bytes by formula, measured 0"):
        run(text_file, tmp_path, "--variants", "mqa")


def test_another_cached_continuation_fails(text_file, tmp_path, monkeypatch, small_preset):
    decode = compose_lm.decode_cached
    monkeypatch.setattr(compose_lm, "decode_cached", lambda *a: (decode(*a) + 1) % 256)
    with pytest.raises(SystemExit, match="cached and uncached greedy decoding differ: sequence 0 diverges"):
        run(text_file, tmp_path, "--variants", "mqa")


def test_missing_and_short_texts_fail_in_words(tmp_path):
    short = tmp_path / "short"
    short.write_text("too little")
    with pytest.raises(SystemExit, match="text: expected at least 40960 bytes, got 10"):
        run(short, tmp_path)
    with pytest.raises(SystemExit, match="No such file"):
        run(tmp_path / "none", tmp_path)


def test_other_weights_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"expected weights that compose_lm.py saved, got metadata \[\]"):
        variants.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"variant: expected one of .*, got 'mhla'"):
        variants.make_model("mhla", variants.PRESETS["tiny"])


def test_curves_that_coincide_show_markers_of_all_variants(monkeypatch, tmp_path, small_preset):
    figure, drawn = pytest.importorskip("matplotlib.figure").Figure, []
    monkeypatch.setattr(figure, "savefig", lambda self, *a, **k: drawn.append(self.axes[0]))
    result = compose_lm.Result("mha", 1, [4.0, 3.0] * 40, 3.0, [(0, 0), (16, 512)], 32.0, 1.0, 1.0)
    results = [result._replace(variant=name) for name in variants.VARIANTS]
    corpus = type("Corpus", (), {"name": "a text"})
    compose_lm.draw(results, corpus, small_preset._replace(steps=80), 4.5, tmp_path / "x.png")
    lines = drawn[0].lines[: len(results)]
    marks = [set(range(len(x.get_xdata()))[x.get_markevery()[0] :: x.get_markevery()[1]]) for x in lines]
    assert all(len(mine) >= 4 for mine in marks)
    assert len(set.union(*marks)) == sum(map(len, marks))  # no two at the same step
    assert len({line.get_marker() for line in lines}) == len({line.get_color() for line in lines}) == 4
