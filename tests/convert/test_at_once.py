"""Files read side by side: in order, told of one at a time, and left together."""

from threading import Barrier, Event

import pytest

from attnlib.convert.checkpoint.at_once import FILES, read_at_once


def test_results_keep_their_order_and_every_byte_is_told():
    together, told = Barrier(FILES), []

    def read(file, advance):
        together.wait(timeout=60)  # all of them are read at once
        for _ in range(100):
            advance(file)
        return -file

    assert read_at_once(read, range(FILES), told.append) == [-file for file in range(FILES)]
    assert sorted(told) == sorted(100 * [*range(FILES)])


def test_no_files():
    assert read_at_once(None, [], None) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_when_one_cannot_be_read_the_others_end(error):
    """And those that wait are not begun."""
    begun, failed, ended = [], Event(), []

    def read(file, advance):
        begun.append(file)
        if file == 1:
            failed.set()
            raise error
        try:
            failed.wait(timeout=60)
            while True:
                advance(1)
        finally:
            ended.append(file)

    with pytest.raises(error):
        read_at_once(read, range(50), lambda _: None)
    assert sorted(ended) == sorted({*begun} - {1})
    assert len(begun) <= FILES + 1
