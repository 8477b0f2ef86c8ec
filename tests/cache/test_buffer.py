"""What the host sends to the device in a step, at addresses that stay; and the size of splits."""

from attnlib.cache.buffer import split_size_of


def test_splits_are_few_and_follow_the_longest_sequence():
    assert [split_size_of(n) for n in (1, 1024, 16384, 16385, 1 << 20)] == [1024, 1024, 1024, 2048, 65536]
