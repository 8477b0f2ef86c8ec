"""A piece of a call that says where it begins computes what the whole would, in kernels too."""

import pytest
from kernel_helpers import INTERPRETED
from origin_cases import OPTIONS, check_gradients, check_keys, check_packed_keys, make_call

from attnlib import CAUSAL, Mask

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its tensors are on a CPU; set TRITON_INTERPRET=1")


# Few of the cases of tests/call/test_origin.py, since each takes seconds under the interpreter.
@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [CAUSAL, Mask(3, 2), Mask(None, -1, prefix=6)], ids=str)
@pytest.mark.parametrize("options", ["alibi and softcap", "dropout"])
def test_pieces_of_keys_queries_heads_and_sequences(mask, options):
    call = make_call(9, 13, mask, OPTIONS[options])
    check_keys(call, "triton", as_tensor=True, bounds=True)
    check_packed_keys(call, "triton")
    check_gradients(call, "triton")
