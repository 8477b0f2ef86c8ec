"""The arguments that a cache is made with, and what is refused of them."""

import pytest
from cache_model import PLAIN

from attnlib import KVCache


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "page_size: expected at least 1"),
        ({"pages": 0}, ValueError, "pages: expected at least 1, got 0"),
        ({"pages": 2.5}, TypeError, "pages: expected an int"),
        (
            {"pages": {None: 3, 4: 3}},
            ValueError,
            r"pages: expected a count for each window of \[None\], got \{None: 3, 4",
        ),
        ({"pages": {4: 3}}, ValueError, "pages: expected a count for each window"),
        ({"max_sequences": 0}, ValueError, "max_sequences: expected at least 1"),
        ({"max_length": 0}, ValueError, "max_length: expected at least 1"),
        ({"max_length": 2**31}, ValueError, "max_length: expected at most 2147483647"),
        ({"rollback": -1}, ValueError, "rollback: expected at least 0"),
    ],
)
def test_wrong_sizes_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        KVCache.paged([PLAIN], **{"pages": 4, "page_size": 4, "max_sequences": 2, **options})


def test_layouts_are_checked():
    for make in (
        lambda x: KVCache.paged(x, pages=2, max_sequences=1),
        lambda x: KVCache.contiguous(x, max_sequences=1, max_length=4),
    ):
        with pytest.raises(ValueError, match="expected one KVLayout for each layer, got none"):
            make([])
        with pytest.raises(TypeError, match="expected one KVLayout for each layer, got int"):
            make([64])
    for wrong in ({"max_sequences": 0, "max_length": 4}, {"max_sequences": 1, "max_length": 0}):
        with pytest.raises(ValueError, match="expected at least 1, got 0"):
            KVCache.contiguous([PLAIN], **wrong)
