"""The stand-ins of indices: no protocol of Python goes through them unnoticed, and errors name a line."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from attnlib import QUERY_OFFSET, TraceError, mask_mod
from attnlib.tracing.stand_ins import line_of_error

# What Python may ask of an object, as expressions of an index i and of a tensor x.
PROTOCOLS = {
    "bool": lambda i, x: bool(i),
    "chained comparison": lambda i, x: 0 < i < 3,
    "int": lambda i, x: int(i),
    "float": lambda i, x: float(i),
    "complex": lambda i, x: complex(i),
    "index": lambda i, x: [1, 2, 3][i],
    "iteration": lambda i, x: list(i),
    "unpacking": lambda i, x: (lambda *args: args)(*i),
    "len": lambda i, x: len(i),
    "contains": lambda i, x: 3 in i,
    "hash": lambda i, x: {i: 1},
    "str": lambda i, x: str(i),
    "format": lambda i, x: f"{i:>4}",
    "round": lambda i, x: round(i),
    "floor": lambda i, x: math.floor(i),
    "ceil": lambda i, x: math.ceil(i),
    "trunc": lambda i, x: math.trunc(i),
    "divmod": lambda i, x: divmod(i, 2),
    "reflected divmod": lambda i, x: divmod(2, i),
    "numpy's functions": lambda i, x: np.sin(i),
    "numpy's arrays": lambda i, x: np.asarray(i),
    "item": lambda i, x: i.item(),
    "a tensor of it": lambda i, x: torch.tensor(i),
    "assignment": lambda i, x: x.__setitem__(0, i),
    "deletion": lambda i, x: x.__delitem__(0),
    "an attribute": lambda i, x: i.shape,
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_protocol_goes_through(name):
    """Each is refused where it stands, and not taken for a number that happens to be known."""
    with pytest.raises(TraceError, match=r"test_stand_ins\.py:\d+: "):
        mask_mod(lambda b, h, i, j, x: PROTOCOLS[name](i, x) is not None, torch.ones(3))


def test_first_query_stays_itself():
    """Copied or pickled, as masks and layers with it are."""
    assert repr(QUERY_OFFSET) == "QUERY_OFFSET"
    for copied in (
        copy.copy(QUERY_OFFSET),
        copy.deepcopy([QUERY_OFFSET])[0],
        pickle.loads(pickle.dumps(QUERY_OFFSET)),
    ):
        assert copied is QUERY_OFFSET


def test_an_error_is_of_the_innermost_line_that_is_not_torchs():
    def raises(error):
        return torch.einsum("i,i", torch.zeros(2), torch.zeros(error))  # raises in a file of torch

    try:
        raises(3)
    except RuntimeError as error:
        line = line_of_error(error.__traceback__)
    assert line == f"{__file__}:{raises.__code__.co_firstlineno + 1}"
    assert line_of_error(type("Empty", (), {"tb_next": None})) is None
