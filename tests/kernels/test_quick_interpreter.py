"""The interpreter that the tests run on computes what Triton's own does."""

import pytest
import torch
from helpers import OPTIONS, assert_same_bits, make
from kernel_helpers import INTERPRETED
from quick_interpreter import quick_interpreter
from triton.runtime import interpreter

from attnlib import attention_with_lse


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 in the environment")
def test_the_bits_are_those_of_the_plain_interpreter(quickened):
    problem = make(1, 19, 23, 2, 1, 24, options=OPTIONS, dtype=torch.float16)
    dout, dlse = problem.directions()

    def results() -> list[torch.Tensor]:
        return [
            *problem.to(torch.float16)
            .with_gradients(attention_with_lse, dout, dlse, backend="triton")
            .values()
        ]

    ours, dtypes = results(), interpreter._get_np_dtype
    quickened.close()
    try:
        assert interpreter._get_np_dtype is not dtypes
        plain = results()
    finally:
        quickened.enter_context(quick_interpreter())
    assert_same_bits(*zip(ours, plain, strict=True))
