"""Folders of one's own, for libraries that read files by name only: nobody else can change or add
anything.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def private_folder(files: Mapping[str, bytes | bytearray]) -> Iterator[Path]:
    """A folder that holds these files and nothing else, and is gone afterwards."""
    with TemporaryDirectory(prefix="attnlib-") as name:
        folder = Path(name)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        yield folder
