"""The training text as tokens; the last tenth is held out."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..convert.checkpoint.errors import RequestError
from ..convert.text.tokens import read_text, tokens_of

HELD_OUT = 10  # the last tenth of the text is held out


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training tokens ``[t]`` and held-out tokens ``[t]``; ``sha256`` is the hash of the UTF-8 text."""

    train: Tensor
    held_out: Tensor
    bytes_per_token: float
    sha256: str

    @classmethod
    def read(cls, files: Sequence[Path], folder: Path, *, context: int) -> "Corpus":
        """Read and concatenate UTF-8 files and tokenize them with the tokenizer in ``folder``.

        Raises:
            RequestError: a file cannot be read, or the training or held-out part is shorter than one context.
            CheckpointError: the folder has no tokenizer.
        """
        text = "".join(read_text(path)[0] for path in files)
        data = text.encode()
        tokens = tokens_of(folder, text, samples=max(1, len(data)), length=1).flatten()
        kept = len(tokens) - len(tokens) // HELD_OUT
        if min(kept, len(tokens) - kept) < context + 1:
            raise RequestError(
                f"--text: expected at least {HELD_OUT * (context + 1)} tokens, a tenth of which is held out, "
                f"got {len(tokens)}; use a longer text or a shorter --context"
            )
        sha256 = hashlib.sha256(data).hexdigest()
        return cls(tokens[:kept], tokens[kept:], len(data) / len(tokens), sha256)

    def batches(self, *, count: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
        """Yield ``count`` training batches ``[batch, context + 1]``; the same seed gives the same batches."""
        generator, window = torch.Generator().manual_seed(seed), torch.arange(context + 1)
        for _ in range(count):
            start = torch.randint(len(self.train) - context, (batch, 1), generator=generator)
            yield self.train[start + window]

    def windows(self, context: int, *, limit: int) -> Tensor:
        """Return at most ``limit`` held-out windows ``[n, context + 1]``, spread evenly over the tokens."""
        windows = self.held_out.unfold(0, context + 1, context)
        count = min(limit, len(windows))
        return windows[torch.arange(count) * len(windows) // count]
