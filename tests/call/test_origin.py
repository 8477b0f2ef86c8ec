"""A piece of a call that says where it begins computes what the whole would, to the bit of dropout."""

import pytest
from origin_cases import SIZES, cases, check_gradients, check_keys, check_packed_keys, make_call

BACKENDS = pytest.mark.parametrize("name", ["reference", "torch"])


@pytest.mark.covering(2)
@BACKENDS
@SIZES
@pytest.mark.parametrize(("as_tensor", "bounds"), [(False, True), (True, False)])
@cases
def test_pieces_of_the_keys_merge_to_the_whole(name, s, t, mask, options, as_tensor, bounds):
    check_keys(make_call(s, t, mask, options), name, as_tensor=as_tensor, bounds=bounds)


@pytest.mark.covering(2)
@BACKENDS
@SIZES
@cases
def test_pieces_of_packed_keys_merge_to_the_whole(name, s, t, mask, options):
    check_packed_keys(make_call(s, t, mask, options), name)


@pytest.mark.covering(2)
@BACKENDS
@SIZES
@cases
def test_pieces_of_queries_heads_and_sequences_have_their_gradients(name, s, t, mask, options):
    check_gradients(make_call(s, t, mask, options), name)
