"""Two caches that live the same life, of which one reads shared prefixes once."""

from dataclasses import replace

import torch
from cache_model import Abort

from attnlib import CAUSAL, FULL, KVCache, KVLayout, Mask, sliding
from attnlib import cached_attention_with_lse as attend

HEADS, SIZE, MOST = 4, 2, 24
GROUPED = KVLayout.grouped(2, 4, 3, dtype=torch.float64)
LATENT = KVLayout.latent(6, 2, dtype=torch.float64)
INDEX = {"index_dim": 3, "index_dtype": torch.float8_e4m3fn}
LAYOUTS = (
    replace(GROUPED, index_dim=3, index_heads=2),
    LATENT,
    replace(GROUPED, window=5),
    replace(LATENT, storage_dtype=torch.int8, **INDEX),
)
SINKS, SLOPES = torch.tensor([0.3, -1.0, 2.0, 0.0]), torch.tensor([0.5, 0.1, 0.0, 1.0])
CALLS = {
    "causal": {"mask": CAUSAL},
    "full": {"mask": FULL},
    "softcap": {"mask": CAUSAL, "softcap": 2.0, "scale": 0.7},
    "sinks": {"mask": Mask(None, 1), "sinks": SINKS},
    "prefix": {"mask": Mask(None, 0, 3)},
    "behind": {"mask": Mask(None, -3)},
    "sliding": {"mask": sliding(4)},
    "slopes": {"mask": CAUSAL, "alibi_slopes": SLOPES, "sinks": SINKS},
}


def make(prefixes: int, layouts=(GROUPED,), **sizes) -> KVCache:
    sizes = {"pages": 80, "page_size": SIZE, "max_sequences": 6, "max_length": MOST, **sizes}
    return KVCache.paged(layouts, shared_prefixes=prefixes, **sizes)


class Pair:
    """A cache that reads what is shared once, and one that does not: the same is done with both."""

    def __init__(self, prefixes: int, layouts=LAYOUTS):
        self.caches = [make(n, layouts) for n in (prefixes, 0)]
        self.live: list[tuple] = []  # each sequence's handles
        self.padding: list[int] = []

    def admit(self, n: int, padding: int = 0) -> None:
        self.live += zip(*(cache.admit(n, left_padding=[padding] * n) for cache in self.caches), strict=True)
        self.padding += [padding] * n

    def fork(self, i: int, n: int = 1) -> None:
        both = zip(self.caches, self.live[i], strict=True)
        self.live += zip(*(cache.fork(handle, n) for cache, handle in both), strict=True)
        self.padding += [self.padding[i]] * n

    def truncate(self, i: int, length: int) -> None:
        for cache, handle in zip(self.caches, self.live[i], strict=True):
            cache.truncate(handle, length)

    def release(self, i: int) -> None:
        del self.padding[i]
        for cache, handle in zip(self.caches, self.live.pop(i), strict=True):
            cache.release(handle)

    def shortest(self, i: int) -> int:
        """The length that a truncation may leave at least."""
        return max(
            allocator.shortest(self.live[i][0]) for allocator in self.caches[0]._sequences.allocators.values()
        )

    def length(self, i: int) -> int:
        return self.caches[0].length(self.live[i][0])

    def run(
        self, tokens: int | dict[int, int], *, reading: bool = False, fail: bool = False, calls=CALLS
    ) -> list:
        """Attend in a step or a read of so many tokens, for all or by number, alike in both caches; the
        views.
        """
        given = [
            tokens if isinstance(tokens, int) else {self.live[i][j]: n for i, n in tokens.items()}
            for j in (0, 1)
        ]
        shape = (len(self.live), tokens) if isinstance(tokens, int) else (sum(tokens.values()),)
        new = [
            [torch.randn(*shape, *x, dtype=torch.float64) for x in _widths(layout)] for layout in self.layouts
        ]
        index = [_index_keys(layout, shape) for layout in self.layouts]
        answers, views = [], []
        for cache, counts in zip(self.caches, given, strict=True):
            with (cache.read if reading else cache.step)(counts) as layers:
                of = [
                    kv.view() if reading else kv.append(*x[1:], index=keys)
                    for kv, x, keys in zip(layers, new, index, strict=True)
                ]
                if fail:
                    raise Abort
                views += of
                asked = [
                    (view, x[0], call)
                    for view, x in zip(of, new, strict=True)
                    for call in _possible(view, calls)
                ]
                answers.append([y for view, q, call in asked for y in attend(q, view, **call)])
                answers[-1] += [view.index_keys() for view in of if view.layout.index_dim]
        for ours, plain in zip(*answers, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        return views[: len(self.layouts)]

    @property
    def layouts(self):
        return self.caches[0].layouts


def _widths(layout: KVLayout) -> tuple:
    """Of queries, and of what is appended."""
    if layout.is_latent:
        return (HEADS, layout.dim + layout.rope_dim), (layout.dim,), (layout.rope_dim,)
    return (HEADS, layout.dim), (layout.heads, layout.dim), (layout.heads, layout.value_dim)


def _index_keys(layout: KVLayout, shape: tuple[int, ...]) -> torch.Tensor | None:
    if not layout.index_dim:
        return None
    return torch.randn(*shape, layout.index_heads, layout.index_dim, dtype=torch.float64)


def _possible(view, calls) -> list[dict]:
    return [call for call in calls.values() if view.layout.window is None or call["mask"].left is not None]


def forked(prefixes: int = 1, length: int = 7, n: int = 3, layouts=(GROUPED,)) -> Pair:
    """A sequence of so many tokens, and ``n`` forks of it."""
    pair = Pair(prefixes, layouts)
    pair.admit(1)
    pair.run(length)
    pair.fork(0, n)
    return pair
