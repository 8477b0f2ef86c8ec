"""KVCache against its model under any sequence of operations, failing ones included."""

import os
from unittest import mock

import pytest
from cache_model import INDEXED, KEEPING, LAYERS, Abort, Twin, state
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnlib import CacheFullError, KVCache

MAX_SEQUENCES = 5


def build(kind: str, page_size: int, rollback: int, max_length: int | None, layouts) -> KVCache:
    if kind == "contiguous":
        return KVCache.contiguous(layouts, max_sequences=MAX_SEQUENCES, max_length=max_length or 24)
    pages = dict(
        zip(dict.fromkeys(layout.window_class for layout in layouts), (9, 7, 8, 10), strict=False)
    )  # each its own
    sizes = {
        "page_size": page_size,
        "max_sequences": MAX_SEQUENCES,
        "max_length": max_length,
        "rollback": rollback,
    }
    return KVCache.paged(layouts, pages=pages, **sizes)


class CacheMachine(RuleBasedStateMachine):
    """Admissions, steps of both kinds, forks, truncations and releases in any order."""

    @initialize(
        kind=st.sampled_from(["paged", "paged", "contiguous"]),
        page_size=st.sampled_from([1, 2, 3, 4]),
        rollback=st.sampled_from([0, 2]),
        max_length=st.sampled_from([None, 11]),
        layouts=st.sampled_from(
            [LAYERS, LAYERS[:1], LAYERS[1:2], LAYERS[:2], (KEEPING,), (*LAYERS, KEEPING), INDEXED]
        ),
        check=st.booleans(),
    )
    def start(self, kind, page_size, rollback, max_length, layouts, check):
        with mock.patch.dict(os.environ, {"ATTNLIB_CHECK": "1" if check else "0"}):
            self.twin = Twin(build(kind, page_size, rollback, max_length, layouts))
        self.objects = self.twin.cache._layers

    @property
    def live(self):
        return list(self.twin.model)

    def some(self, data):
        return data.draw(st.sampled_from(self.live), label="sequence")

    @rule(n=st.integers(0, 3), padding=st.integers(0, 3), padded=st.booleans())
    def admit(self, n, padding, padded):
        if len(self.live) + n > MAX_SEQUENCES:
            self.refused(CacheFullError, lambda: self.twin.admit(n))
        else:
            self.twin.admit(n, [padding] * n if padded else None)

    def tokens(self, data):
        if data.draw(st.booleans(), label="dense"):
            return data.draw(st.sampled_from([0, 1, 1, 2, 3, 7]), label="tokens")
        handles = data.draw(st.lists(st.sampled_from(self.live), unique=True) if self.live else st.just([]))
        return {handle: data.draw(st.sampled_from([0, 1, 1, 2, 5, 9])) for handle in handles}

    def padding_arrives(self, tokens) -> bool:
        twin = self.twin
        return not isinstance(tokens, int) and any(
            n and len(twin.model[h]) < twin.padding[h] for h, n in tokens.items()
        )

    def fits(self, tokens) -> bool:
        counts = dict.fromkeys(self.live, tokens) if isinstance(tokens, int) else tokens
        short = any(
            len(self.twin.model[h]) + n > self.twin.cache._sequences.max_length for h, n in counts.items()
        )
        return not short and all(need <= free for need, free in self.twin.needs(tokens))

    @rule(data=st.data())
    def step(self, data):
        tokens = self.tokens(data)
        if self.padding_arrives(tokens):
            self.refused((ValueError, CacheFullError), lambda: self.twin.step(tokens))
        elif self.fits(tokens):
            self.twin.step(tokens)
        else:
            self.refused(CacheFullError, lambda: self.twin.step(tokens))

    @rule(data=st.data())
    def failing_step(self, data):
        tokens = self.tokens(data)
        if self.padding_arrives(tokens) or not self.fits(tokens):
            tokens = 0
        after = data.draw(st.integers(0, len(self.objects)), label="layers that append")
        self.refused(Abort, lambda: self.twin.step(tokens, fail_after=after))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 2))
    def fork(self, data, n):
        handle = self.some(data)
        if len(self.live) + n > MAX_SEQUENCES:
            self.refused(CacheFullError, lambda: self.twin.fork(handle, n))
        else:
            self.twin.fork(handle, n)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data):
        self.cut(self.some(data), data)

    def cut(self, handle, data, most=None):
        """Truncate a sequence to any length, by ``most`` tokens, or find that refused."""
        stored = len(self.twin.model[handle])
        length = data.draw(st.integers(0 if most is None else max(0, stored - most), stored), label="length")
        if self.twin.may_read(handle, stored - length):
            self.twin.truncate(handle, length)
        else:
            self.refused(RuntimeError, lambda: self.twin.truncate(handle, length))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retried_step_of_a_family(self, data):
        """A sequence and its forks, of several lengths, write into what they share: in vain, and then
        again.
        """
        parent, room = self.some(data), MAX_SEQUENCES - len(self.live)
        family = [parent, *self.twin.fork(parent, min(room, data.draw(st.integers(1, 2), label="forks")))]
        for handle in family:
            self.cut(handle, data, self.twin.cache.page_size)
        tokens = {
            handle: data.draw(st.integers(1, 2), label="tokens")
            for handle in data.draw(st.permutations(family))
        }
        if self.padding_arrives(tokens) or not self.fits(tokens):
            return
        self.refused(Abort, lambda: self.twin.step(tokens, fail_after=len(self.objects)))
        self.twin.check()
        self.twin.step(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read(self, data):
        tokens = self.tokens(data)
        counts = dict.fromkeys(self.live, tokens) if isinstance(tokens, int) else tokens
        if all(self.twin.may_read(handle, n) for handle, n in counts.items()):
            self.twin.read(tokens)
        else:
            self.refused(RuntimeError, lambda: self.twin.read(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        handle = self.some(data)
        self.twin.release(handle)
        self.refused(ValueError, lambda: self.twin.cache.release(handle))
        self.refused(ValueError, lambda: self.stale(handle))

    def stale(self, handle):
        with self.twin.cache.step({handle: 1}):
            pass

    def refused(self, error, call):
        before = state(self.twin.cache)
        with pytest.raises(error):
            call()
        assert state(self.twin.cache) == before

    @invariant()
    def sound(self):
        if hasattr(self, "twin"):
            self.twin.check()
            with self.twin.cache.read({}) as layers:
                assert all(a is b for a, b in zip(layers, self.objects, strict=True))


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=30, stateful_step_count=25)
TestCacheMachine = CacheMachine.TestCase
