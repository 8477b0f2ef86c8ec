"""Kernels run on a GPU with `-m gpu`, and without one under TRITON_INTERPRET=1, in a process of its own."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from kernel_helpers import INTERPRETED
from quick_interpreter import quick_interpreter

from attnlib.backends._triton.dense import tables
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache
from attnlib.dispatch.select import CALL_CACHE

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def quickened():
    """Closed, it leaves the interpreter as Triton ships it."""
    with ExitStack() as stack:
        if INTERPRETED:
            stack.enter_context(quick_interpreter())
        yield stack


@pytest.fixture(autouse=True)
def _plans_anew():
    """Tests put other tiles into the tables."""
    plan_cache.cache_clear()
    CALL_CACHE.clear()


@pytest.fixture
def small(request, monkeypatch):
    """Tiles so small that a short call has many."""
    block_m, block_n, grain = request.param
    monkeypatch.setattr(tables, "GRAIN", grain)
    for name in ("forward", "backward_keys", "backward_queries"):
        monkeypatch.setattr(tables, name, lambda case, *, keys: LaunchConfig(block_m, block_n, 1, 4))
    return block_m, block_n


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if not INTERPRETED and FOLDER in item.path.parents:
            item.add_marker("gpu")
