"""Private temporary folders for libraries that read files only by name; no other user can write there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def private_folder(files: Mapping[str, bytes | bytearray]) -> Iterator[Path]:
    """Yield a temporary folder that contains only ``files``, and delete it afterwards."""
    with TemporaryDirectory(prefix="attnlib-") as name:
        folder = Path(name)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        yield folder
