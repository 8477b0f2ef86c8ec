"""The shape of every statistic, and the width of rows of packed calls."""

import pytest
import torch

from attnlib import CAUSAL
from attnlib.call.call import Call, Packing, checked
from attnlib.call.statistic import Statistic, checked_statistic, first_column

Q, K = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
LSE, ROWS = torch.zeros(2, 4, 3), torch.arange(2)


@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        (Statistic("maxima"), (2, 4, 3)),
        (Statistic("mass", LSE), (2, 4, 5)),
        (Statistic("rows", LSE, ROWS), (2, 4, 2, 5)),
        (Statistic("heads", LSE, at=torch.zeros(2, 3, 7).int()), (2, 3, 7)),
    ],
)
def test_shapes(wanted, shape):
    call = checked(Call(Q, CAUSAL, k=K, v=first_column(K)))
    assert checked_statistic(call, wanted).result(Q, K).shape == shape
    assert wanted.result(Q.half(), K).dtype == torch.float32
    assert wanted.result(Q.double(), K).dtype == torch.float64


@pytest.mark.parametrize(
    ("limit", "offsets", "width"), [(9, [0, 2, 5], 9), (None, [0, 2, 5], 3), (None, [0], 0)]
)
def test_the_width_of_packed_rows(limit, offsets, width):
    offsets = torch.tensor(offsets).int()
    call = checked(
        Call(Q[0], CAUSAL, k=K[0], v=first_column(K[0]), packing=Packing(offsets, offsets, None, limit))
    )
    assert checked_statistic(call, Statistic("rows", LSE[0], ROWS)).width == width
    assert checked_statistic(call, Statistic("mass", LSE[0])).width == 0
