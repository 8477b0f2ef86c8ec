"""An original and its half, made once."""

import pytest
from healing_folders import TEXT, make_half, make_original


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A folder with ``original``, ``half`` and ``text``."""
    folder = tmp_path_factory.mktemp("healing")
    make_half(make_original(folder / "original"), folder / "half")
    (folder / "text").write_text(TEXT)
    return folder
