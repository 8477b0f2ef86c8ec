"""The training text as tokens; the last tenth of each file is held out."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..convert.checkpoint.errors import RequestError
from ..convert.text.mixture import turns
from ..convert.text.tokens import read_text, tokens_of

HELD_OUT = 10  # the last tenth of each file is held out


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training tokens ``[t]`` of all files, and the held-out tokens ``[t]`` of each file.

    ``sha256`` is the hash of the UTF-8 text; for several files, the hash of the concatenated texts.
    ``sha256_by_file`` has the hash of each file.
    """

    train: Tensor
    held_out: tuple[Tensor, ...]
    bytes_per_token: float
    sha256: str
    sha256_by_file: tuple[str, ...]

    @classmethod
    def read(cls, files: Sequence[Path], folder: Path, *, context: int) -> "Corpus":
        """Read UTF-8 files and tokenize each of them with the tokenizer in ``folder``.

        Held-out parts that are shorter than a window are joined.

        Raises:
            RequestError: a file cannot be read, or the training or held-out part is shorter than one context.
            CheckpointError: the folder has no tokenizer.
        """
        train, held_out, short, size, whole, each = [], [], [], 0, hashlib.sha256(), []
        for path in files:
            data = read_text(path)[0].encode()
            tokens = tokens_of(folder, data.decode(), samples=max(1, len(data)), length=1).flatten()
            kept = len(tokens) - len(tokens) // HELD_OUT
            train.append(tokens[:kept])
            (held_out if len(tokens) - kept > context else short).append(tokens[kept:])
            size += len(data)
            whole.update(data)
            each.append(hashlib.sha256(data).hexdigest())
        held_out += [torch.cat(short)] if short else []
        counts = [sum(map(len, train)), max(map(len, held_out))]
        total = sum(map(len, (*train, *held_out)))
        if min(counts) < context + 1:
            raise RequestError(
                f"--text: expected at least {HELD_OUT * (context + 1)} tokens, a tenth of which is held out, "
                f"got {total}; use a longer text or a shorter --context"
            )
        return cls(torch.cat(train), tuple(held_out), size / total, whole.hexdigest(), tuple(each))

    def batches(self, *, count: int, batch: int, context: int, seed: int) -> Iterator[Tensor]:
        """Yield ``count`` training batches ``[batch, context + 1]``; the same seed gives the same batches."""
        generator, window = torch.Generator().manual_seed(seed), torch.arange(context + 1)
        for _ in range(count):
            start = torch.randint(len(self.train) - context, (batch, 1), generator=generator)
            yield self.train[start + window]

    def windows(self, context: int, *, limit: int) -> Tensor:
        """Return at most ``limit`` held-out windows ``[n, context + 1]``, in equal shares of the texts.

        The windows of a text are spread evenly over its tokens. Short texts give fewer windows than others.
        """
        cut = [tokens.unfold(0, context + 1, context) for tokens in self.held_out]
        order = turns([len(windows) for windows in cut], limit)
        counts = [order.count(n) for n in range(len(cut))]
        return torch.cat(
            [
                windows[torch.arange(count) * len(windows) // max(1, count)]
                for windows, count in zip(cut, counts, strict=True)
            ]
        )
