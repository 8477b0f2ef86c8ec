"""Start as if nothing had been tried of this torch and this Triton yet."""

from collections.abc import Iterator
from contextlib import contextmanager

from attnlib.dispatch.select import CALL_CACHE
from attnlib.internal import probes


@contextmanager
def forgotten() -> Iterator[None]:
    """Nothing has been tried or prepared yet; afterwards what was known before is known again."""
    before = dict(probes.ANSWERS)
    probes.ANSWERS.clear()
    CALL_CACHE.clear()
    try:
        yield
    finally:
        probes.ANSWERS.clear()
        probes.ANSWERS.update(before)
