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
    assert [*corpus.train.tolist(), *corpus.held_out.tolist()] == codes
    assert len(corpus.held_out) == len(TEXT) // 10
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
    assert every[:, 1:].flatten().equal(corpus.held_out[1 : every[:, 1:].numel() + 1])
    assert corpus.windows(16, limit=2).equal(every[[0, len(every) // 2]])


def test_files_are_read_one_after_another(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(TEXT[:500]), second.write_text("é" + TEXT[501:])
    corpus = Corpus.read([first, second], folders / "original", context=16)
    assert len(corpus.train) + len(corpus.held_out) == len(TEXT)
    assert corpus.bytes_per_token == pytest.approx((len(TEXT) + 1) / len(TEXT))
    with pytest.raises(
        RequestError, match="--text: expected at least 640 tokens, a tenth of which is held out, got 500"
    ):
        Corpus.read([first], folders / "original", context=63)
