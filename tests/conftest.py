"""One thread, one seed, NaN in uninitialised memory; hypothesis without deadlines, and patient with `-m slow`."""

import re

import pytest
import torch
from hypothesis import Phase, is_hypothesis_test, settings

from attnlib.backends._triton import launch

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("attnlib", max_examples=30, deadline=None, derandomize=True, phases=PHASES)
settings.load_profile("attnlib")
MANY = 200
torch.set_num_threads(1)


def pytest_addoption(parser):
    text = "launch kernels as with a Triton and a torch whose private parts are unknown"
    parser.addoption("--public-launches", action="store_true", help=text)


def pytest_configure(config):
    if config.getoption("--public-launches"):
        launch.KNOWN = ()
        launch.current_device = torch.cuda.current_device
        launch.current_stream = lambda device: torch.cuda.current_stream(device).cuda_stream


@pytest.fixture(autouse=True)
def _every_test_starts_alike():
    """The same random numbers whatever ran before; memory that nobody wrote holds NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(config, items):
    """`-m slow` runs every property test with at least MANY examples, whatever number it asks for by itself."""
    if not re.search(r"(?<!not )\bslow\b", config.option.markexpr):
        return
    for item in items:
        if not is_hypothesis_test(item.obj):
            continue
        item.add_marker("slow")
        # A state machine's settings are public; those of a decorated function hypothesis keeps under a name of its own.
        owner, name = (item.cls, "settings") if hasattr(item.cls, "settings") else (item.obj, SETTINGS_OF_A_TEST)
        asked = getattr(owner, name)
        setattr(owner, name, settings(asked, max_examples=max(MANY, asked.max_examples)))


SETTINGS_OF_A_TEST = "_hypothesis_internal_use_settings"
