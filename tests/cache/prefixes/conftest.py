"""Prefixes of one page are shared in these tests."""

from unittest import mock

import pytest
from prefix_cases import SIZE

from attnlib.cache.prefixes import groups


@pytest.fixture(autouse=True)
def _short_prefixes():
    """Let a single page be a shared prefix."""
    with mock.patch.object(groups, "SHARED_TOKENS", SIZE):
        yield
