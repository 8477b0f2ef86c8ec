"""One thread, one seed, NaN in uninitialised memory, and hypothesis without deadlines."""

import pytest
import torch
from hypothesis import Phase, settings

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("attnlib", max_examples=30, deadline=None, derandomize=True, phases=PHASES)
settings.load_profile("attnlib")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _every_test_starts_alike():
    """The same random numbers whatever ran before; memory that nobody wrote holds NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
