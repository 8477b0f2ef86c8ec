"""Real text as bytes or tokens: where it comes from, how it is split, and what a model must beat."""

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCAB_SIZE = 256
BLOCK = 4096  # tokens
BLOCKS = 10  # in a group: the last one is held out


class Corpus(NamedTuple):
    """Tokens in groups of ten blocks: ``train`` ``[groups, 9 * block]`` and ``held_out`` ``[groups, block]``.

    Tokens are bytes, uint8, unless somebody else encoded the text. ``bytes_per_token`` is the mean over all
    of it, and ``sha256`` that of the text itself.
    """

    name: str
    train: Tensor
    held_out: Tensor
    sha256: str
    bytes_per_token: float = 1.0

    @property
    def size(self) -> int:
        """How many tokens both parts have."""
        return self.train.numel() + self.held_out.numel()

    def unigram_entropy(self) -> float:
        """Bits per byte of the best model that knows nothing but how often each byte occurs."""
        everything = torch.cat((self.train.flatten(), self.held_out.flatten()))
        p = torch.bincount(everything.int(), minlength=VOCAB_SIZE).double() / self.size
        return -torch.special.xlogy(p, p).sum().item() / torch.log(torch.tensor(2.0)).item()

    def batches(self, *, count: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
        """``count`` batches ``[batch, context + 1]`` int64 of training text; the same ones for the same
        seed.
        """
        groups, size = self.train.shape
        _check_fits("context", context, size)
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(context + 1)
        for _ in range(count):
            group = torch.randint(groups, (batch, 1), generator=generator)
            start = torch.randint(size - context, (batch, 1), generator=generator)
            yield self.train[group, start + window].long()

    def held_out_windows(self, context: int, *, limit: int) -> Tensor:
        """At most ``limit`` windows ``[n, context + 1]`` int64 of held-out text, spread evenly over it."""
        _check_fits("context", context, self.held_out.shape[1])
        windows = self.held_out.unfold(1, context + 1, context).flatten(0, 1)
        spread = torch.arange(min(limit, len(windows))) * len(windows) // min(limit, len(windows))
        return windows[spread].long()


def byte_tokens(data: bytes) -> Tensor:
    """Each byte as a token: uint8 ``[t]``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load(path: Path | None = None, *, tokens_of: Callable[[bytes], Tensor] = byte_tokens) -> Corpus:
    """The corpus of a file, or of the top-level modules of Python's standard library, in the order of their
    names.

    ``tokens_of`` makes integer tokens ``[t]`` of the whole text.

    Raises:
        ValueError: there is too little text to hold some out.
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
    """``text`` as byte tokens ``[t]`` int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)
