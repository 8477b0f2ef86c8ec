"""A text as tokens: what is held out is in no batch, and nothing is lost between the two."""

import hashlib

import pytest
from healing_folders import TEXT

from attnlib.convert import RequestError
from attnlib.finetune.corpus import Corpus


@pytest.fixture
def corpus(folders):
    return Corpus.read([folders / "text"], folders / "original", context=16)


def test_the_last_tenth_is_held_out(corpus):
    codes = [ord(letter) if letter != " " else 32 for letter in TEXT]
    (held_out,) = corpus.held_out
    assert [*corpus.train.tolist(), *held_out.tolist()] == codes
    assert len(held_out) == len(TEXT) // 10
    assert corpus.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert corpus.bytes_per_token == 1


def test_batches_are_pieces_of_the_text_to_learn_and_the_same_ones_every_time(corpus):
    options = {"count": 40, "batch": 3, "context": 16}
    batches = [*corpus.batches(seed=1, **options)]
    pieces = {tuple(piece) for piece in corpus.train.unfold(0, 17, 1).tolist()}
    assert all(batch.shape == (3, 17) for batch in batches)
    assert {tuple(row) for batch in batches for row in batch.tolist()} <= pieces
    assert all(
        ours.equal(theirs) for ours, theirs in zip(batches, corpus.batches(seed=1, **options), strict=True)
    )
    assert not batches[0].equal(next(corpus.batches(seed=2, **options)))


def test_windows_are_spread_over_what_is_held_out_and_predict_each_token_once(corpus):
    every = corpus.windows(16, limit=1000)
    assert every[:, 1:].flatten().equal(corpus.held_out[0][1 : every[:, 1:].numel() + 1])
    assert corpus.windows(16, limit=2).equal(every[[0, len(every) // 2]])


def test_of_each_file_the_last_tenth_is_held_out(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(TEXT[:500]), second.write_text("é" + TEXT[501:])
    corpus = Corpus.read([first, second], folders / "original", context=16)
    ours, theirs = ([ord(letter) for letter in path.read_text()] for path in (first, second))
    assert [x.tolist() for x in corpus.held_out] == [ours[450:], theirs[-(len(theirs) // 10) :]]
    assert corpus.train[1:450].tolist() == ours[1:450]
    assert corpus.train[451:].tolist() == theirs[1 : -(len(theirs) // 10)]
    assert len(corpus.train) + sum(map(len, corpus.held_out)) == len(TEXT)
    assert corpus.sha256 == hashlib.sha256((TEXT[:500] + "é" + TEXT[501:]).encode()).hexdigest()
    assert corpus.sha256_by_file == tuple(hashlib.sha256(x.read_bytes()).hexdigest() for x in (first, second))
    assert corpus.bytes_per_token == pytest.approx((len(TEXT) + 1) / len(TEXT))
    with pytest.raises(
        RequestError, match="--text: expected at least 640 tokens, a tenth of which is held out, got 500"
    ):
        Corpus.read([first], folders / "original", context=63)


def test_many_short_files_are_held_out_together(folders, tmp_path):
    paths = [tmp_path / str(n) for n in range(20)]
    for n, path in enumerate(paths):
        path.write_text(chr(65 + n) * 20)
    corpus = Corpus.read(paths, folders / "original", context=16)
    assert [x.tolist() for x in corpus.held_out] == [[65 + n // 2 for n in range(40)]]
    assert len(corpus.train) == 18 * 20
    paths[0].write_text("z" * 1000)
    corpus = Corpus.read(paths, folders / "original", context=16)
    assert [len(x) for x in corpus.held_out] == [100, 38]
    with pytest.raises(RequestError, match="got 380;"):
        Corpus.read(paths[1:], folders / "original", context=38)


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_files_have_equal_shares_of_the_windows(folders, tmp_path, limit):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a" * 500), second.write_text("b" * 1000)
    corpus = Corpus.read([first, second], folders / "original", context=16)
    letters = [chr(row.unique().item()) for row in corpus.windows(16, limit=limit)]
    most = {"a": 49 // 16, "b": 99 // 16}
    wanted = {1: "a", 2: "ab", 5: "aaabb", 1000: "a" * most["a"] + "b" * most["b"]}
    assert "".join(letters) == wanted[limit]
