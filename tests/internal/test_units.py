"""Sizes in bytes as text."""

import pytest

from attnlib.internal.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("7b", 7),
        (" 1KB ", 1000),
        ("1kib", 1024),
        ("1.5MiB", 3 * 2**19),
        ("2 GB", 2 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1TB", 10**12),
    ],
)
def test_reads_what_people_write(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1e9", "1 G", "1,000", "1GiBs", "nan", "9" * 16])
def test_refuses_anything_else(text):
    with pytest.raises(ValueError, match="expected a size such as 5GB or 500MiB"):
        parse_bytes(text)
