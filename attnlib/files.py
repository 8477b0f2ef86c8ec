"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place once the block ends well, so that nobody reads half of one.

    It is on the disk before it takes that place.

    Raises:
        OSError: ``path`` is a folder, or the new file cannot be moved there.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write, got a folder")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
