"""How much is compared by default: less of larger models, more on a GPU."""

from types import SimpleNamespace

import pytest

from attnlib.convert.check.budget import windows_for


def of(parameters):
    """A checkpoint of so many weights, in two tensors."""
    entries = [SimpleNamespace(shape=(parameters // 2000, 1000)) for _ in range(2)]
    return SimpleNamespace(tensors={str(n): SimpleNamespace(entry=entry) for n, entry in enumerate(entries)})


@pytest.mark.parametrize(
    ("parameters", "cpu", "gpu"),
    [
        (10**8, 8, 8),
        (5 * 10**8, 3, 8),
        (19 * 10**8, 1, 8),
        (2 * 10**9, 0, 8),
        (7 * 10**10, 0, 2),
        (10**12, 0, 0),
    ],
)
def test_larger_models_read_less(parameters, cpu, gpu):
    assert windows_for(of(parameters), "cpu") == cpu
    assert windows_for(of(parameters), "cuda") == gpu
