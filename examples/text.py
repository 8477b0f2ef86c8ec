"""Load text for training as bytes or tokens, hold some of it out, and compute the entropy to beat."""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCAB_SIZE = 256
BLOCK = 4096  # tokens per block
BLOCKS = 10  # of every ten blocks, the last is held out


class Corpus(NamedTuple):
    """A text split into ``train`` ``[groups, 9 * block]`` and ``held_out`` ``[groups, block]`` tokens.

    Of every ten blocks, the last is held out. Tokens are bytes (uint8), unless another encoding was used.
    ``bytes_per_token`` is the mean over the whole text, and ``sha256`` the hash of the text.
    """

    name: str
    train: Tensor
    held_out: Tensor
    sha256: str
    bytes_per_token: float = 1.0

    @property
    def size(self) -> int:
        """The number of tokens in the corpus, including those held out."""
        return self.train.numel() + self.held_out.numel()

    def unigram_entropy(self) -> float:
        """Return the bits per byte of the best unigram model, which knows only how often each byte occurs."""
        everything = torch.cat((self.train.flatten(), self.held_out.flatten()))
        p = torch.bincount(everything.int(), minlength=VOCAB_SIZE).double() / self.size
        return -torch.special.xlogy(p, p).sum().item() / torch.log(torch.tensor(2.0)).item()

    def batches(self, *, count: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
        """Yield ``count`` batches ``[batch, context + 1]`` int64 of training text, determined by ``seed``."""
        groups, size = self.train.shape
        _check_fits("context", context, size)
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(context + 1)
        for _ in range(count):
            group = torch.randint(groups, (batch, 1), generator=generator)
            start = torch.randint(size - context, (batch, 1), generator=generator)
            yield self.train[group, start + window].long()

    def held_out_windows(self, context: int, *, limit: int) -> Tensor:
        """Return up to ``limit`` windows ``[n, context + 1]`` int64, spread evenly over the held-out text."""
        _check_fits("context", context, self.held_out.shape[1])
        windows = self.held_out.unfold(1, context + 1, context).flatten(0, 1)
        spread = torch.arange(min(limit, len(windows))) * len(windows) // min(limit, len(windows))
        return windows[spread].long()


def byte_tokens(data: bytes) -> Tensor:
    """Return each byte as a token: uint8 ``[t]``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load(path: Path | None = None, *, tokens_of: Callable[[bytes], Tensor] = byte_tokens) -> Corpus:
    """Load a file as a corpus, by default the top-level modules of Python's standard library, sorted by name.

    ``tokens_of`` encodes the whole text as integer tokens ``[t]``.

    Raises:
        ValueError: the text is too short to hold some of it out.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        name, data = f"{len(files)} standard-library modules", b"".join(file.read_bytes() for file in files)
    else:
        name, data = path.name, path.read_bytes()
    need = BLOCK * BLOCKS
    tokens = tokens_of(data) if data else torch.empty(0)
    groups = len(tokens) // need
    if not groups:
        unit = "bytes" if tokens_of is byte_tokens else "tokens"
        raise ValueError(
            f"text: expected at least {need} {unit}, got {len(tokens)} ({name}); use a longer --text"
        )
    parts = tokens[: groups * need].view(groups, -1)
    digest = hashlib.sha256(data).hexdigest()
    return Corpus(name, parts[:, :-BLOCK], parts[:, -BLOCK:], digest, len(data) / len(tokens))


def _check_fits(name: str, context: int, size: int) -> None:
    if not 1 <= context < size:
        raise ValueError(f"{name}: expected 1 to {size - 1} tokens, got {context}; use a shorter context")


def encode(text: str) -> Tensor:
    """Return ``text`` as byte tokens ``[t]`` int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)
