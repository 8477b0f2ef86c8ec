"""One thread, one seed, NaN in uninitialised memory; hypothesis without deadlines; and what is behind `-m
slow`.
"""

import gc
import re
from itertools import groupby

import pytest
import torch
from hypothesis import Phase, is_hypothesis_test, settings
from shares import covering, is_of_share

from attnlib.backends._triton.launching import direct
from attnlib.dispatch.select import FIRST_CALL
from attnlib.internal import probes

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("attnlib", max_examples=20, deadline=None, derandomize=True, phases=PHASES)
settings.load_profile("attnlib")
MANY = 200
torch.set_num_threads(1)


def pytest_addoption(parser):
    text = "launch kernels as where no private function of Triton or torch has passed its trial"
    parser.addoption("--public-launches", action="store_true", help=text)
    parser.addoption("--share", metavar="N/M", help="run one test in M, chosen by a hash of its name")


def pytest_configure(config):
    gc.disable()  # until the tests are collected: no garbage, and a million objects to look through for it
    if config.getoption("--public-launches"):
        probes.ANSWERS[direct.DIRECT] = direct.Direct(plain=False, described=False)
        probes.ANSWERS[direct.STREAMS] = direct.PUBLIC
    if not torch.cuda.is_available():
        probes.is_first(FIRST_CALL)  # else the first test that asks about an sm_90 would try functions on it


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
    """`-m slow` runs every property test with at least MANY examples, and the cases that a covering leaves
    out.
    """
    for item in _uncovered(items):
        item.add_marker("slow")
    if re.search(r"(?<!not )\bslow\b", config.option.markexpr):
        for item in items:
            if is_hypothesis_test(item.obj):
                _ask_for_many(item)
    if share := config.getoption("--share"):
        outside = [item for item in items if not is_of_share(item.nodeid, share)]
        config.hook.pytest_deselected(items=outside)
        items[:] = [item for item in items if item not in {*outside}]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def _uncovered(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of every test marked ``covering(n)``, the cases without which the others hold every n values
    together.
    """
    found = []
    marked = [item for item in items if item.get_closest_marker("covering") and hasattr(item, "callspec")]
    for _, group in groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        (together,) = cases[0].get_closest_marker("covering").args
        kept = covering(
            [{name: id(x) for name, x in case.callspec.params.items()} for case in cases], together
        )
        found += [case for n, case in enumerate(cases) if n not in kept]
    return found


def _ask_for_many(item: pytest.Item) -> None:
    item.add_marker("slow")
    # A state machine's settings are public; those of a decorated function hypothesis keeps under a name of
    # its own.
    owner, name = (item.cls, "settings") if hasattr(item.cls, "settings") else (item.obj, SETTINGS_OF_A_TEST)
    asked = getattr(owner, name)
    setattr(owner, name, settings(asked, max_examples=max(MANY, asked.max_examples)))


SETTINGS_OF_A_TEST = "_hypothesis_internal_use_settings"
