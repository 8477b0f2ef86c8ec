"""The cases of a test that run by default, and the tests of a share."""

import re
from itertools import combinations
from zlib import crc32

import pytest


def covering(cases: list[dict[str, int]], together: int) -> set[int]:
    """A few of the cases that hold all that any case holds: every so many values of its parameters
    together.
    """
    held = [{*combinations(sorted(case.items()), min(together, len(case)))} for case in cases]
    kept, missing = set(), set().union(*held)
    while missing:
        best = max(range(len(cases)), key=lambda n: len(held[n] & missing))
        kept.add(best)
        missing -= held[best]
    return kept


def is_of_share(name: str, share: str) -> bool:
    """True if the test of this name is of share ``N/M``, N counted from 1."""
    found = re.fullmatch(r"(\d+)/(\d+)", share)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--share: expected N/M with N from 1 to M, got {share}")
    return crc32(name.encode()) % int(found[2]) == int(found[1]) - 1
