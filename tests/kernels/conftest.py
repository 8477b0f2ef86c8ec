"""Kernels run on a GPU with `-m gpu`, and without one under TRITON_INTERPRET=1, in a process of its own."""

import pytest
from kernel_helpers import INTERPRETED

from attnlib.backends._triton.launch import planned
from attnlib.dispatch import PREPARED


@pytest.fixture(autouse=True)
def _plans_anew():
    """Tests put other tiles into the tables."""
    planned.cache_clear()
    PREPARED.forget()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if not INTERPRETED and item.path.parent.name == "kernels":
            item.add_marker("gpu")
