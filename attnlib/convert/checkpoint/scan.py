"""Read the source once before writing: hash every file and find tensors with NaN or infinities."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ...checkpoint_files.finite import count_nonfinite
from ...checkpoint_files.folder import Checkpoint, SourceFile, buffer_for
from .at_once import read_at_once


def scan(
    checkpoint: Checkpoint, advance: Callable[[int], object]
) -> tuple[dict[str, dict[str, int | str]], dict[str, dict[str, int]]]:
    """Return size and sha256 of each file, and the ``nan`` and ``inf`` counts of tensors with such values.

    ``advance`` is called with the number of bytes after each read. The hashes are stored in
    ``checkpoint.hashes``.
    """
    read = read_at_once(partial(_read, checkpoint), checkpoint.files, advance)
    inputs, nonfinite = {}, {}
    for file, (sha256, counts) in zip(checkpoint.files, read, strict=True):
        checkpoint.hashes[file.name] = sha256
        inputs[file.name] = {"size": file.size, "sha256": sha256}
        nonfinite |= counts
    return inputs, nonfinite


def _read(
    checkpoint: Checkpoint, file: SourceFile, advance: Callable[[int], object]
) -> tuple[str, dict[str, dict[str, int]]]:
    """Return a file's sha256, and the counts of NaN and infinite values for each tensor that has any."""
    digest, buffer, nonfinite = hashlib.sha256(), buffer_for(file.size), {}
    with ThreadPoolExecutor(1) as hashing:
        for name, start, end, dtype in _stretches(checkpoint, file):
            for part in file.chunks(start, end - start, buffer):
                hashed = hashing.submit(digest.update, part)
                counts = count_nonfinite(torch.frombuffer(part, dtype=dtype)) if name else {}
                if counts:
                    nonfinite[name] = dict(Counter(nonfinite.get(name, {})) + Counter(counts))
                hashed.result()
                advance(len(part))
    return digest.hexdigest(), nonfinite


def _stretches(
    checkpoint: Checkpoint, file: SourceFile
) -> Iterator[tuple[str | None, int, int, torch.dtype]]:
    """Yield the byte ranges of a file in order; bytes outside of tensors have None as their name."""
    position = 0
    for name, tensor in checkpoint.tensors.items():
        if tensor.file is file:
            start, end = tensor.entry.start, tensor.entry.start + tensor.entry.nbytes
            if start > position:
                yield None, position, start, torch.uint8
            yield name, start, end, tensor.entry.dtype
            position = end
    yield None, position, file.size, torch.uint8
