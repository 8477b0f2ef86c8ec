"""A small model of each variant, and a small text to learn."""

import pytest
import variants
from small_models import SMALL, make
from variants import VARIANTS


@pytest.fixture(params=VARIANTS)
def model(request):
    return make(request.param)


@pytest.fixture
def small_preset(monkeypatch):
    """The presets named "tiny" are the small one, for tests of whole commands."""
    monkeypatch.setitem(variants.PRESETS, "tiny", SMALL)
    return SMALL


@pytest.fixture
def text_file(tmp_path):
    line = "".join(f"{i} green bottles, standing on the wall\n" for i in range(2_000))
    path = tmp_path / "bottles.txt"
    path.write_text(line)
    return path
