"""Atomic file writes: a file is written completely or not at all."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` if the block succeeds, so that nobody reads half a file.

    The file is created in the folder of ``path``, and is flushed to disk before it replaces ``path``.

    Raises:
        OSError: ``path`` is a folder, its folder does not exist, or the file cannot be created or moved.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write, got a folder")
    if not path.parent.exists():
        message = f"{os.strerror(errno.ENOENT)} to write {path.name} into; make it first"
        raise FileNotFoundError(errno.ENOENT, message, str(path.parent))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch()  # raises Python's own error if this is not permitted
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and strings to a safetensors file, completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except SafetensorError as error:  # safetensors raises this in place of OSError
            raise OSError(f"{path}: expected a file that can be written, got {error}") from error
