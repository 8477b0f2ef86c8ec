"""The text: held-out blocks are interleaved, batches repeat, and too little text is refused."""

import pytest
import text
import torch


def numbered(path, blocks: int):
    """A file whose every block consists of its own number."""
    path.write_bytes(b"".join(bytes([i % 256]) * text.BLOCK for i in range(blocks)))
    return text.load(path)


def test_every_tenth_block_is_held_out(tmp_path):
    corpus = numbered(tmp_path / "text", 25)
    assert corpus.held_out.unique().tolist() == [9, 19]
    assert corpus.train.unique().tolist() == [*range(9), *range(10, 19)]
    assert corpus.size == 20 * text.BLOCK


def test_unigram_entropy(tmp_path):
    assert numbered(tmp_path / "text", 10).unigram_entropy() == pytest.approx(
        torch.tensor(10.0).log2().item()
    )


def test_batches_are_windows_and_repeat():
    corpus = text.load()
    first = list(corpus.batches(count=3, batch=4, context=16, seed=1))
    again = list(corpus.batches(count=3, batch=4, context=16, seed=1))
    assert all(batch.shape == (4, 17) for batch in first)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    everything = bytes(corpus.train.flatten().tolist())
    assert bytes(first[2][3].tolist()) in everything


def test_held_out_windows_are_spread(tmp_path):
    windows = numbered(tmp_path / "text", 20).held_out_windows(128, limit=10)
    assert windows.shape == (10, 129)
    assert windows.unique().tolist() == [9, 19]


def test_too_little_text(tmp_path):
    with pytest.raises(
        ValueError, match=r"text: expected at least 40960 bytes, got 36864 \(text\); use a longer"
    ):
        numbered(tmp_path / "text", 9)
    with pytest.raises(ValueError, match="context: expected 1 to 4095 tokens, got 4096"):
        numbered(tmp_path / "text", 10).held_out_windows(4096, limit=1)
