"""Windows of several texts: every text has its share, and nothing that is scored has calibrated."""

import json
from importlib.resources import files

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import save

from attnlib.convert import RequestError
from attnlib.convert.text.choice import Choice
from attnlib.convert.text.held_out import held_out
from attnlib.convert.text.mixture import Text, calibration_windows, turns
from attnlib.convert.text.sample import alternated, sample_texts

FOLDER = files("attnlib.convert.text").joinpath("sample_texts")
SOURCES = json.loads(FOLDER.joinpath("sources.json").read_text())
LICENCES = {"MIT", "MIT OR Apache-2.0", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "PSF-2.0", "PostgreSQL"}
LENGTH = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model whose tokens are letters; letters that it does not know are 0."""
    return save(tmp_path_factory.mktemp("mixture") / "in", "llama")


def text_of(letter: str, tokens: int) -> Text:
    return Text(letter, letter * tokens)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(LENGTH, 400), min_size=1, max_size=5), st.integers(1, 60))
def test_windows_are_shared_equally_as_far_as_texts_have_any(source, sizes, samples):
    texts = [text_of("abcde"[n], size) for n, size in enumerate(sizes)]
    windows = calibration_windows(source, texts, samples=samples, length=LENGTH)
    most = [max(1, (size - size // 5) // LENGTH) for size in sizes]
    assert sum(windows.counts) == len(windows.tokens) == min(samples, sum(most))
    assert all(count <= limit for count, limit in zip(windows.counts, most, strict=True))
    least = min((n for n, limit in zip(windows.counts, most, strict=True) if n < limit), default=samples)
    assert max(windows.counts) <= least + 1
    letters = [row.unique().tolist() for row in windows.tokens]
    assert all(len(row) == 1 for row in letters)  # no window reads two texts
    first = [row[0] for row in letters[: len(texts)]]
    assert first == [ord(text.name) for text in texts[: len(first)]]  # the first windows read all texts
    assert windows.used == tuple(n * LENGTH for n in windows.counts)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 300))
def test_all_kinds_of_the_sample_calibrate(source, samples):
    windows, reported = Choice(None, samples, LENGTH, None).windows(source)
    counts = [text["samples"] for text in reported["calibration"]["texts"]]
    assert sum(counts) == len(windows.tokens) == samples
    shares = [count / text.weight for count, text in zip(counts, sample_texts(), strict=True)]
    assert max(shares) - min(shares) <= 1
    assert samples < len(counts) or min(counts) > 0


@pytest.mark.parametrize("length", [512, 100_000])
def test_windows_may_be_longer_than_a_kind(source, length):
    """Then each of them reads several kinds."""
    windows, reported = Choice(None, 4, length, None).windows(source)
    assert windows.tokens.shape == (4, length)
    assert ("texts" in reported["calibration"]) == (length == 512)


@given(
    st.lists(st.tuples(st.sampled_from([0, 3, 50]), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(1, 99),
)
def test_turns_follow_the_weights_as_far_as_texts_have_windows(texts, total):
    most, weights = zip(*texts, strict=True)
    order = turns(most, total, weights)
    counts = [order.count(n) for n in range(len(texts))]
    assert len(order) == min(total, sum(most))
    assert all(count <= limit for count, limit in zip(counts, most, strict=True))
    able = [n for n, limit in enumerate(most) if limit]
    assert order[: len(able)] == able[:total]  # each text once, before one has a second turn
    whole = [n for n in able if counts[n] < most[n]]
    rounds = [counts[n] / weights[n] for n in whole]
    assert not rounds or max(rounds) - min(rounds) <= 1


def test_of_a_short_text_the_last_fifth_is_held_out(source):
    texts = [text_of("a", 1000), text_of("b", 100)]
    windows = calibration_windows(source, texts, samples=100, length=LENGTH)
    assert windows.counts == (800 // LENGTH, 80 // LENGTH)
    long = calibration_windows(source, [text_of("a", 10_000)], samples=8, length=LENGTH)
    assert long.counts == (8,)


def test_a_text_that_is_too_short_is_named(source):
    with pytest.raises(RequestError, match=r"expected at least length=16 tokens, got 3; .* \(in b\)"):
        calibration_windows(source, [text_of("a", 99), text_of("b", 3)], samples=2, length=LENGTH)
    with pytest.raises(RequestError, match=r"use a longer text$"):
        calibration_windows(source, [text_of("b", 3)], samples=2, length=LENGTH)


def test_sources_alternate_and_nothing_is_lost():
    sources = ["\n\n".join(f"{letter}{n}" * 30 for n in range(9)) for letter in "xyz"]
    paragraphs = alternated(sources, 100).rstrip("\n").split("\n\n")
    assert [x[0] for x in paragraphs[:12]] == [*"xxyyzzxxyyzz"]
    for letter, text in zip("xyz", sources, strict=True):
        assert [x for x in paragraphs if x[0] == letter] == text.split("\n\n")


def test_each_file_of_the_sample_is_listed_with_its_licence():
    found = {
        f"{kind.name}/{part}/{path.name}"
        for kind in FOLDER.iterdir()
        if kind.is_dir()
        for part in ("calibration", "held_out")
        for path in (kind / part).iterdir()
    }
    assert found == {x["file"] for x in SOURCES}
    terms = FOLDER.joinpath("LICENCES.txt").read_text()
    for x in SOURCES:
        assert x["version"]
        assert x["holder"]
        assert x["licence"] == "public domain" or x["licence"] in LICENCES
        assert all(name in terms for name in x["licence"].split(" OR "))


def test_no_package_both_calibrates_and_is_scored():
    """No other files of it either."""
    calibrating, scored = (
        {x["package"] for x in SOURCES if f"/{part}/" in x["file"]} for part in ("calibration", "held_out")
    )
    assert calibrating
    assert scored
    assert not calibrating & scored


def test_no_held_out_passage_is_in_a_calibration_window(source):
    """Compare runs of 40 letters in many more windows than the command uses by default."""
    windows, _ = Choice(None, 800, 512, None).windows(source)
    scored = held_out(source, windows=64).tokens[:, 1:].to(torch.uint8)
    runs = {bytes(run) for row in windows.tokens.to(torch.uint8) for run in row.unfold(0, 40, 1).tolist()}
    assert bytes(windows.tokens[9, 100:140].tolist()) in runs
    for row in scored:
        for run in row.unfold(0, 40, 20).tolist():
            assert bytes(run) not in runs or len(set(run)) < 10  # a line of dashes, or of unknown letters


def test_every_kind_has_text_for_its_default_windows():
    """Common tokenizers read at most six bytes as a token."""
    for kind in sample_texts():
        assert len(kind.calibration.encode()) > 6 * 512 * 10
        assert len(kind.held_out.encode()) > 6 * 512


def test_the_default_windows_of_a_kind_read_all_of_its_sources():
    for kind in sample_texts():
        folder = f"{kind.name.replace(' ', '_')}/calibration/"
        sources = [x["file"] for x in SOURCES if x["file"].startswith(folder)]
        assert len(sources) > 1
        begins = [FOLDER.joinpath(name).read_text().strip("\n").partition("\n")[0] for name in sources]
        assert all(begin in kind.calibration[:30_000] for begin in begins)
