"""What the host sends to the device in a step, at addresses that stay; and the size of splits."""

from array import array

import torch

from attnlib.cache.buffer import Buffer, split_size_of


def test_splits_are_few_and_follow_the_longest_sequence():
    assert [split_size_of(n) for n in (1, 1024, 16384, 16385, 1 << 20)] == [1024, 1024, 1024, 2048, 65536]


def test_a_buffer_stays_where_it_is():
    """Captured graphs read it: more and fewer numbers are shown at one address, as int32 or int64."""
    for typecode, dtype in (("i", torch.int32), ("q", torch.int64)):
        buffer = Buffer(typecode, 5, torch.device("cpu"))
        for values in ([1, 2, 3], [], [9, 8, 7, 6, 5], [-1]):
            shown = buffer.show(array(typecode, values))
            assert (shown.tolist(), shown.dtype) == (values, dtype)
            assert not values or shown.data_ptr() == buffer.tensor.data_ptr()
        assert buffer.tensor.tolist() == [-1, 8, 7, 6, 5]  # what is behind the numbers is left
