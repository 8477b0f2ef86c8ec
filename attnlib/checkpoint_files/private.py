"""Make private temporary folders, for libraries that can read files only by their path."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def private_folder(files: Mapping[str, bytes | bytearray]) -> Iterator[Path]:
    """Yield a temporary folder with ``files`` that no other user can change, and delete it afterwards."""
    with TemporaryDirectory(prefix="attnlib-") as name:
        folder = Path(name)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        yield folder
