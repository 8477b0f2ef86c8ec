"""A KVCache beside its model, a dict of lists: every token is a number, and every operation is done on
both.
"""

from collections import Counter
from itertools import count

import pytest
import torch

from attnlib import KVCache, KVLayout
from attnlib.backends._torch.pages import quantise
from attnlib.cache.pages import PageAllocator

LAYERS = (
    KVLayout.grouped(2, 3, 1),
    KVLayout.latent(4, 2, window=3, index_dim=2, index_dtype=torch.float8_e4m3fn),
    KVLayout.grouped(1, 2, window=6, index_dim=3, index_heads=2),
    KVLayout.latent(3, 0),
)
KEEPING = KVLayout.grouped(1, 2, window=4, first_tokens=3, index_dim=2)
INDEXED = (
    KVLayout.grouped(2, 3, 1, index_dim=3, index_heads=2, index_dtype=torch.float8_e4m3fn),
    KVLayout.latent(4, 2, index_dim=5),
)


def values(tokens, layer: int, heads: int, width: int, sign: int = 1) -> torch.Tensor:
    """What the token numbers are stored as in a layer: ``[*tokens.shape, heads, width]``, different
    everywhere.
    """
    channel = torch.arange(heads * width).unflatten(0, (heads, width))
    return sign * (torch.as_tensor(tokens)[..., None, None] * 64 + layer * 16 + channel + 1).float()


def content(layout: KVLayout, tokens, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The arguments of ``append`` for token numbers of any shape."""
    k = values(tokens, layer, layout.heads, layout.dim)
    if not layout.is_latent:
        return k, values(tokens, layer, layout.heads, layout.value_dim, -1)
    return k[..., 0, :], values(tokens, layer, 1, layout.rope_dim, -1)[..., 0, :] if layout.rope_dim else None


def index_content(layout: KVLayout, tokens, layer: int) -> torch.Tensor | None:
    """The index keys of token numbers, None for a layout without."""
    if not layout.index_dim:
        return None
    return values(tokens, layer, layout.index_heads, layout.index_dim) + 0.5


def append(layer, tokens, i: int):
    """Append token numbers to a layer, the ``i``-th of its cache."""
    index = index_content(layer.layout, tokens, i)
    return layer.append(*content(layer.layout, tokens, i), index=index)


def append_all(layers, tokens) -> list:
    """Append token numbers to every layer."""
    return [append(layer, tokens, i) for i, layer in enumerate(layers)]


def stored(view, row: int, layer: int, tokens: list[int], reach: int = 0) -> None:
    """Assert that a row of the view shows exactly ``tokens`` from its start on, read as a kernel would.

    Where first tokens are kept, those before ``reach`` that follow them are read of their own page, whatever
    it holds.
    """
    start, length, size, first = (
        int(view.starts[row]),
        int(view.lengths[row]),
        view.page_size,
        view.layout.first_tokens,
    )
    assert length == len(tokens)
    others = set()
    for j in range(start, length):
        page = int(view.table[row, j // size])
        if first and j >= -(-first // size) * size and j < reach // size * size:
            own = {int(view.table[row, n // size]) for n in (*range(first), *range(reach, length))}
            assert page in own
            others.add(j)
            continue
        k, second = content(view.layout, tokens[j], layer)
        assert torch.equal(view.k[page, j % size], k if not view.layout.is_latent else k[None])
        if view.layout.is_latent:
            assert view.v is view.k
            assert (view.k_rope is None) == (second is None)
            assert second is None or torch.equal(view.k_rope[page, j % size], second[None])
        else:
            assert view.k_rope is None
            assert torch.equal(view.v[page, j % size], second)
    stored_index(view, row, layer, tokens, others)


def stored_index(view, row: int, layer: int, tokens: list[int], others: set[int]) -> None:
    """Assert that a row shows the index keys of ``tokens``, those of ``others`` aside, and zeros outside."""
    expected = index_content(view.layout, tokens, layer)
    assert (view.index is None) == (expected is None)
    if expected is None:
        return
    if view.layout.index_dtype is not None:
        whole, scale = quantise(expected, view.layout.index_dtype)
        expected = whole.float() * scale[..., None]
    found, start = view.index_keys(), int(view.starts[row])
    assert found.shape[1:] == (view.table.shape[1] * view.page_size, *expected.shape[1:])
    assert found.is_contiguous()
    assert torch.equal(view.index_keys(len(tokens)), found[:, : len(tokens)])
    rows = [j for j in range(start, len(tokens)) if j not in others]
    assert torch.equal(found[row][rows], expected[rows])
    assert not found[row, :start].any()
    assert not found[row, len(tokens) :].any()


def allocator_state(allocator: PageAllocator) -> tuple:
    """Everything an allocator knows, to compare."""
    holdings = {
        handle: (h.padding, h.start, h.length, h.dropped, tuple(h.pages), tuple(h.first))
        for handle, h in allocator._holdings.items()
    }
    return holdings, tuple(allocator._free), tuple(allocator._owners)


def check_allocator(allocator: PageAllocator) -> None:
    """The invariants of an allocator between steps."""
    holdings = allocator._holdings.values()
    owners = Counter(page for holding in holdings for page in (*holding.first, *holding.pages))
    assert allocator._owners == [owners[page] for page in range(allocator.total)]
    assert sorted(allocator._free) == [page for page in range(allocator.total) if not owners[page]]
    assert allocator.used + len(allocator._free) == allocator.total
    for h in holdings:
        assert len({*h.first, *h.pages}) == len(h.first) + len(h.pages)
        assert len(h.first) == min(h.dropped, -(-allocator.first_tokens // allocator.page_size))
        assert h.dropped + len(h.pages) == max(h.dropped, -(-h.length // allocator.page_size))
        assert h.start == max(h.padding, 0 if allocator.first_tokens else h.dropped * allocator.page_size)
        reach = 0 if allocator.window is None else max(0, h.length - allocator.window + 1)
        assert h.dropped * allocator.page_size <= reach


def state(cache: KVCache) -> tuple:
    """All that a failing call must leave alone on the host."""
    allocators = [allocator_state(allocator) for allocator in cache._sequences.allocators.values()]
    return allocators, [layer.convention for layer in cache._layers], cache.used_bytes


class Twin:
    """A cache of several layers, and per handle the token numbers that it should hold."""

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.model: dict = {}
        self.padding: dict = {}
        self._numbers = count()
        for layer in cache._layers:
            layer._poison(
                range(len(layer.planes["k"]))
            )  # what was never written is NaN, whatever the environment

    def admit(self, n: int = 1, left_padding=None) -> list:
        handles = self.cache.admit(n, left_padding=left_padding)
        for handle, padding in zip(handles, left_padding or [0] * n, strict=True):
            self.model[handle], self.padding[handle] = [], padding
        return handles

    def draw(self, tokens) -> tuple[dict, torch.Tensor]:
        """New token numbers for a step: per handle, and as the step takes them."""
        counts = dict.fromkeys(self.model, tokens) if isinstance(tokens, int) else tokens
        new = {handle: [next(self._numbers) for _ in range(n)] for handle, n in counts.items()}
        flat = torch.tensor([number for numbers in new.values() for number in numbers], dtype=torch.int64)
        return new, flat.view(len(counts), tokens) if isinstance(tokens, int) else flat

    def step(self, tokens, fail_after: int | None = None) -> None:
        """A step of these tokens; with ``fail_after`` its body raises once so many layers have appended, or
        all.
        """
        new, numbers = self.draw(tokens)
        before = {handle: len(self.model[handle]) for handle in new}
        with self.cache.step(tokens) as layers:
            for i, layer in enumerate(layers):
                if i == fail_after:
                    raise Abort
                assert layer.positions.tolist() == self._positions(new, before, dense=isinstance(tokens, int))
                view = append(layer, numbers, i)
                self.check_view(view, i, {handle: self.model[handle] + new[handle] for handle in new}, before)
            self._check_writers(new)
            if fail_after is not None:
                raise Abort
        for handle, fresh in new.items():
            self.model[handle] += fresh

    def _positions(self, new, before, *, dense: bool) -> list:
        rows = [
            [max(0, before[handle] + i - self.padding[handle]) for i in range(len(numbers))]
            for handle, numbers in new.items()
        ]
        return rows if dense else [position for row in rows for position in row]

    def _check_writers(self, new) -> None:
        """Every page that a sequence writes in this step is its own alone."""
        for allocator in self.cache._sequences.allocators.values():
            for handle, numbers in new.items():
                holding = allocator._holdings[handle]
                first = holding.length // allocator.page_size - holding.dropped
                assert not numbers or all(allocator._owners[page] == 1 for page in holding.pages[first:])

    def check_view(self, view, layer: int, rows: dict, before: dict) -> None:
        """A view shows these tokens, and every key that a query after ``before`` tokens can see."""
        window = view.layout.window
        assert view.table.shape[0] == view.starts.shape[0] == view.lengths.shape[0] == len(rows)
        for row, (handle, tokens) in enumerate(rows.items()):
            reach = 0 if window is None else max(0, before[handle] - window + 1)
            assert self.padding[handle] <= int(view.starts[row]) <= max(self.padding[handle], reach)
            stored(view, row, layer, tokens, reach)

    def needs(self, tokens) -> list[tuple[int, int]]:
        """Pages that a step needs and that are free, per allocator, counted sequence by sequence."""
        counts = dict.fromkeys(self.model, tokens) if isinstance(tokens, int) else tokens
        answers = []
        for allocator in self.cache._sequences.allocators.values():
            size, need, owners = allocator.page_size, 0, Counter()
            for holding in allocator._holdings.values():
                owners.update([*holding.first, *holding.pages])
            for handle, n in counts.items():
                length = len(self.model[handle])
                need += -(-(length + n) // size) - -(-length // size)
                if n and length % size:
                    page = allocator._holdings[handle].pages[-1]
                    need += owners[page] > 1
                    owners[page] -= 1
            answers.append((need, len(allocator._free)))
        return answers

    def fork(self, handle, n: int = 1) -> list:
        children = self.cache.fork(handle, n)
        for child in children:
            self.model[child], self.padding[child] = list(self.model[handle]), self.padding[handle]
        return children

    def truncate(self, handle, length: int) -> None:
        self.cache.truncate(handle, length)
        del self.model[handle][length:]

    def release(self, *handles) -> None:
        self.cache.release(*handles)
        for handle in handles:
            del self.model[handle], self.padding[handle]

    def may_read(self, handle, n: int) -> bool:
        """Whether all keys are kept that the last ``n`` tokens of a sequence can see as queries."""
        first = len(self.model[handle]) - n
        for layer in self.cache._layers:
            holding = self.cache._sequences.allocators[layer.layout.window_class].holding(handle)
            kept = holding.dropped * self.cache.page_size
            if n and kept > max(0, first - (layer.layout.window or 0) + 1):
                return False
        return True

    def read(self, tokens) -> None:
        """A read with these queries shows all that they can see."""
        counts = dict.fromkeys(self.model, tokens) if isinstance(tokens, int) else tokens
        rows = {handle: self.model[handle] for handle in counts}
        before = {handle: len(self.model[handle]) - n for handle, n in counts.items()}
        with self.cache.read(tokens) as layers:
            for i, layer in enumerate(layers):
                self.check_view(layer.view(), i, rows, before)

    def check(self) -> None:
        """Everything that is stored equals the model, the allocators are sound, and free pages are poison if
        asked.
        """
        self.read(0)
        held = 0
        for window, allocator in self.cache._sequences.allocators.items():
            check_allocator(allocator)
            mine = [layer for layer in self.cache._layers if layer.layout.window_class == window]
            held += allocator.used * allocator.page_size * sum(layer.layout.token_bytes for layer in mine)
            for layer in mine if self.cache._poisons else ():
                free = (plane.float()[allocator._free] for plane in layer.planes.values())
                assert all(plane.isnan().all() for plane in free)
        assert self.cache.used_bytes == held
        for handle, tokens in self.model.items():
            assert self.cache.length(handle) == len(tokens)


class Abort(Exception):
    """What a failing step body raises."""


PLAIN = KVLayout.grouped(2, 3)


def paged(*layouts, **sizes) -> Twin:
    sizes = {"pages": 16, "page_size": 4, "max_sequences": 4, **sizes}
    return Twin(KVCache.paged(layouts or LAYERS, **sizes))


def contiguous(*layouts, **sizes) -> Twin:
    return Twin(KVCache.contiguous(layouts or LAYERS, **{"max_sequences": 4, "max_length": 12, **sizes}))


def planes(twin: Twin) -> list[torch.Tensor]:
    """The bytes of every plane, to compare NaN and all."""
    layers = twin.cache._layers
    return [plane.clone().view(torch.uint8) for layer in layers for plane in layer.planes.values()]


def refused(twin: Twin, error, call, match: str = "") -> None:
    """The call raises, and neither the host's state nor a byte of the planes changes."""
    before, stored = state(twin.cache), planes(twin)
    with pytest.raises(error, match=match):
        call()
    assert state(twin.cache) == before
    assert all(map(torch.equal, planes(twin), stored))
    twin.check()


both = pytest.mark.parametrize("make", [paged, contiguous])
