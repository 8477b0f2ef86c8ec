"""Entries of test_malformed.py for layouts and caches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from fuzz_entries import Entry, a_call
from fuzz_values import DTYPES, is_bool, is_int, is_tensor, none_or
from torch import Tensor

from attnlib import KVCache, KVLayout
from attnlib.cache.pages import SequenceHandle

is_size = partial(is_int, least=1)
M, H, G, D = 24, 4, 2, 6


def is_dtype(x):
    return isinstance(x, torch.dtype) and x in DTYPES


def is_store(x):
    return x is None or (isinstance(x, torch.dtype) and x in (torch.int8, torch.float8_e4m3fn))


def layout_is_legal(*sizes):
    def legal(a):
        given = all(is_size(a[name]) for name in sizes) and is_int(a.get("rope_dim", 0), 0)
        given = given and none_or(a.get("value_dim"), is_size) and none_or(a["window"], is_size)
        given = given and is_int(a["index_dim"], 0) and is_size(a["index_heads"])
        given = given and none_or(a["index_dtype"], lambda x: x is torch.float8_e4m3fn)
        given = given and (a["index_dim"] > 0 or (a["index_heads"] == 1 and a["index_dtype"] is None))
        return given and is_dtype(a["dtype"]) and is_store(a["storage_dtype"])

    return legal


def bytes_are_counted(target, layout, result):
    assert result.token_bytes > 0


def layouts_are_legal(x):
    return isinstance(x, Sequence) and len(x) > 0 and all(isinstance(layout, KVLayout) for layout in x)


def contiguous_is_legal(a):
    return layouts_are_legal(a["layouts"]) and is_size(a["max_sequences"]) and is_size(a["max_length"])


def paged_is_legal(a):
    pages = a["pages"]
    pages = list(pages.values()) if isinstance(pages, Mapping) and set(pages) == {None} else [pages]
    counts = all(map(is_size, (*pages, a["page_size"], a["max_sequences"]))) and is_int(a["rollback"], 0)
    return counts and layouts_are_legal(a["layouts"]) and none_or(a["max_length"], is_size)


PLAIN = [KVLayout.grouped(G, D)]
CONTIGUOUS = {"layouts": PLAIN, "max_sequences": 3, "max_length": 8}
PAGED = {"layouts": PLAIN, "pages": 9, "page_size": 4, "max_sequences": 3, "max_length": None, "rollback": 0}


def runs(target, args, cache):
    """The cache takes a token."""
    (handle,) = cache.admit()
    with cache.step(1) as (kv,):
        kv.append(torch.ones(1, 1, G, D), torch.ones(1, 1, G, D))
    assert cache.length(handle) == 1


def is_own(kv):
    return isinstance(kv, str) and kv == "its own"


class Used:
    """A cache of one layer with three sequences, of which one is over; and what is stored in it."""

    def __init__(self, layer=None):
        self.layer = layer
        self.layout = PLAIN[0] if layer is None else layer.kv_layout
        self.cache = KVCache.paged([self.layout], pages=9, page_size=4, max_sequences=3)
        self.first, self.second, self.over = self.cache.admit(3)
        self.cache.release(self.over)
        self.append(2, *self.content(2))

    def content(self, tokens):
        """Something to append for both sequences."""
        layout = self.layout
        if layout.is_latent:
            widths = [(layout.dim,), *([(layout.rope_dim,)] if layout.rope_dim else [])]
        else:
            widths = [(layout.heads, layout.dim)] * 2
        return [torch.ones(2, tokens, *width) for width in widths]

    def append(self, tokens, k, v=None, angles=None):
        with self.cache.step(tokens) as (kv,):
            return kv.append(k, v, angles=angles)

    def forward(self, x, kv, **inputs):
        """The layer in a step; ``kv="its own"`` stands for the cache's, which exists only there."""
        with torch.no_grad(), self.cache.step(3, replay=not is_own(kv)) as (own,):
            return self.layer(x, kv=own if is_own(kv) else kv, **inputs)

    def append_context(self, context, kv):
        with torch.no_grad(), self.cache.step(3, replay=not is_own(kv)) as (own,):
            return self.layer.append_context(context, own if is_own(kv) else kv)

    def enter(self, method, tokens, **how):
        with getattr(self.cache, method)(tokens, **how) as (kv,):
            return kv._view

    def state(self):
        """What a refused call may not change."""
        (ledger,) = self.cache._sequences.allocators.values()
        holdings = {
            handle: replace(held, pages=list(held.pages)) for handle, held in ledger._holdings.items()
        }
        (layer,) = self.cache._layers
        planes = [plane.clone().view(torch.uint8) for plane in layer.planes.values()]  # NaN and all
        return (
            holdings,
            list(ledger._free),
            list(ledger._owners),
            layer.convention,
            self.cache.used_bytes,
            planes,
        )

    def assert_unchanged(self, before):
        *books, planes = self.state()
        assert books == list(before[:-1])
        assert all(map(torch.equal, planes, before[-1]))
        view = self.append(1, *self.content(1))
        assert view.lengths.tolist() == [before[0][handle].length + 1 for handle in (self.first, self.second)]

    def is_live(self, x):
        return isinstance(x, SequenceHandle) and x in (self.first, self.second)


def anything(target, args, result):
    """Whatever it gives; a following step shows that the cache is sound."""
    target.assert_unchanged(target.state())


def method(name, legal_call, legal, right=anything, **more):
    """A method of a used cache; ``legal(used, args)`` may look at it."""
    return Entry(lambda used, **a: getattr(used.cache, name)(**a), legal_call, legal, right, Used, **more)


def tokens_are_legal(used, a):
    tokens = a["tokens"]
    if isinstance(tokens, Mapping):
        return all(used.is_live(handle) and is_int(n, 0) for handle, n in tokens.items())
    return is_int(tokens, 0)


def fits(used, a):
    tokens = a["tokens"]
    return (
        tokens_are_legal(used, a)
        and max([0, *tokens.values()] if isinstance(tokens, Mapping) else [tokens]) < 15
    )


def counted(used, args, view):
    given = args["tokens"]
    rows = given if isinstance(given, Mapping) else dict.fromkeys((used.first, used.second), given)
    assert view.lengths.tolist() == [used.cache.length(handle) for handle in rows]


def append_is_legal(used, a):
    pair = all(is_tensor(a[name], torch.float32) and tuple(a[name].shape) == (2, 3, G, D) for name in "kv")
    return (
        pair and not (a["k"].requires_grad or a["v"].requires_grad) and a["angles"] is None
    )  # as the stored ones


def is_stored(used, args, view):
    at = torch.arange(2, 5)
    for row in range(2):
        stored = view.k[view.table[row, at // 4].long(), at % 4]
        torch.testing.assert_close(stored, args["k"][row].as_subclass(Tensor), rtol=0, atol=0, equal_nan=True)


def handle_of(used):
    return {"handle": used.first}


def handle_is_live(used, a):
    return used.is_live(a["handle"])


def is_released(used, args, result):
    assert used.cache._sequences.handles == [used.second]


def admission_is_legal(used, a):
    n, padding = a["n"], a["left_padding"]
    if not is_int(n, 0, 1) or not none_or(padding, lambda x: isinstance(x, Sequence)):
        return False
    return padding is None or (len(padding) == n and all(is_int(x, 0, 36) for x in padding))


def rows_remain(used, args, result):
    assert len(used.cache._sequences.handles) == 2 + args["n"] == 2 + len(result)


def entering(name, legal_call, legal, words=()):
    return Entry(
        lambda used, **a: used.enter(name, **a), legal_call, legal, counted, Used, ("handle", *words)
    )


def step_is_legal(used, a):
    """Nobody appends here, so without a replay a step must have no tokens."""
    if not (is_bool(a["replay"]) and fits(used, a)):
        return False
    tokens = a["tokens"]
    return bool(a["replay"] or not (sum(tokens.values()) if isinstance(tokens, Mapping) else tokens))


INDEX = {"index_dim": 3, "index_heads": 2, "index_dtype": None}
CACHES = {
    "KVLayout.grouped": a_call(
        KVLayout.grouped,
        {
            "heads": G,
            "dim": D,
            "value_dim": None,
            "window": None,
            "dtype": torch.float32,
            "storage_dtype": None,
            **INDEX,
        },
        layout_is_legal("heads", "dim"),
        bytes_are_counted,
    ),
    "KVLayout.latent": a_call(
        KVLayout.latent,
        {"rank": 8, "rope_dim": 4, "window": None, "dtype": torch.float32, "storage_dtype": None, **INDEX},
        layout_is_legal("rank"),
        bytes_are_counted,
    ),
    "KVCache.contiguous": a_call(KVCache.contiguous, CONTIGUOUS, contiguous_is_legal, runs),
    "KVCache.paged": a_call(KVCache.paged, PAGED, paged_is_legal, runs),
    "KVCache.admit": method(
        "admit", lambda used: {"n": 1, "left_padding": None}, admission_is_legal, rows_remain
    ),
    "KVCache.step": entering("step", lambda used: {"tokens": 2, "replay": True}, step_is_legal, ("step",)),
    "KVCache.step, packed": entering(
        "step", lambda used: {"tokens": {used.first: 1}, "replay": True}, step_is_legal, ("step",)
    ),
    "KVCache.read": entering("read", lambda used: {"tokens": 2}, tokens_are_legal),
    "KVCache.fork": method(
        "fork",
        lambda used: {"handle": used.first, "n": 1},
        lambda used, a: used.is_live(a["handle"]) and is_int(a["n"], 0, 1),
        rows_remain,
    ),
    "KVCache.truncate": method(
        "truncate",
        lambda used: {"handle": used.first, "length": 1},
        lambda used, a: used.is_live(a["handle"]) and is_int(a["length"], 0, 2),
    ),
    "KVCache.release": Entry(
        lambda used, handle: used.cache.release(handle), handle_of, handle_is_live, is_released, Used
    ),
    "KVCache.length": method("length", handle_of, handle_is_live),
    "LayerCache.append": Entry(
        lambda used, **a: used.append(3, **a),
        lambda used: {"k": torch.ones(2, 3, G, D), "v": torch.ones(2, 3, G, D), "angles": None},
        append_is_legal,
        is_stored,
        Used,
        ("x",),
    ),
}
