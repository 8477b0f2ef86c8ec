"""A cache's life: random operations, attention at each step, and what a dict of lists of tokens says to
it.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attnlib import CacheFullError, KVCache, KVView

from .asked import Asked
from .calls import Lengths
from .draw import Draw
from .judge import Mismatch
from .layers import Layer, New
from .oracle import Memory

PAGE_SIZES = (1, 2, 3, 4, 4, 16, 16, 24)
COUNTS = (0, 1, 1, 1, 2, 3, 5, 9, 20)
LONG_COUNTS = (1, 2, 17, 300, 513)
OPERATIONS = ("step",) * 6 + ("share",) * 3 + ("admit", "read") * 2 + ("fork", "truncate", "release")


class Abort(Exception):
    """What a step that is to fail raises."""


class Life:
    """A random cache and its oracle, a dict of lists; ``check`` lives it, and ``log`` is what happened so
    far.
    """

    def __init__(self, draw: Draw):
        self.draw, self.log, self.numbers = draw, [], count()
        self.long = draw.device != "interpreter" and draw.maybe(0.05)
        dtype, most = draw.dtype(), 1 if self.long else 2 if draw.device == "interpreter" else 3
        self.layers = [Layer(draw, dtype) for _ in range(min(most, draw.one((1, 1, 2, 3))))]
        self.windows = [layer.layout.window for layer in self.layers if layer.layout.window is not None]
        self.memory = Memory(len(self.layers))
        self.known: dict = {}  # a number and the longest length so far of each sequence
        self.paged, self.checks = draw.maybe(0.75), draw.maybe(0.5)
        self.options = self._options()

    def _options(self) -> dict[str, Any]:
        draw = self.draw
        options = {"max_sequences": draw.one((1, 2, 3, 4, 5, 6, 7)), "max_length": draw.upto(60, 8)}
        if self.long:
            options = {"max_sequences": 2, "max_length": draw.upto(2500, 600)}
        if draw.maybe(0.2):
            options["batch_invariant"] = True
        if self.paged:
            options["page_size"] = draw.one((24, 256, 672) if self.long else PAGE_SIZES)
            options["pages"] = -(-(5000 if self.long else draw.upto(150, 20)) // options["page_size"])
            options["rollback"] = draw.one((0, 0, 2, 5))
            if "batch_invariant" not in options and draw.maybe(0.3):
                options["shared_prefixes"] = draw.upto(3, 1)
        return options

    def __repr__(self):
        layers, happened = (";\n  ".join(map(str, x)) for x in (self.layers, self.log))
        checks = "ATTNLIB_CHECK=1, " if self.checks else ""
        memory = "paged" if self.paged else "contiguous"
        return f"{memory} cache, {checks}{self.options}\n  {layers}\n  {happened}"

    def check(self) -> None:
        with mock.patch.dict(os.environ, {"ATTNLIB_CHECK": "1" if self.checks else "0"}), torch.no_grad():
            make = KVCache.paged if self.paged else KVCache.contiguous
            self.cache = make([layer.layout for layer in self.layers], device=self.draw.place, **self.options)
            self.admit()
            self.step()
            for _ in range(self.draw.upto(6 if self.draw.device == "interpreter" else 14, 3)):
                getattr(self, self.draw.one(OPERATIONS))()
                for handle in self.live:
                    if self.cache.length(handle) != self.memory.length(handle):
                        raise Mismatch(
                            f"length: got {self.cache.length(handle)}, not {self.memory.length(handle)}"
                        )
            self._read(1, whole=True)

    @property
    def live(self) -> list:
        return list(self.memory.tokens)

    # What may happen.

    def admit(self) -> None:
        n = self.draw.one((1, 1, 2, 3))
        padding = [min(self.draw.one((0, 1, 3, 7)), self.options["max_length"]) for _ in range(n)]
        padding = padding if self.draw.maybe(0.3) else None
        full = len(self.live) + n > self.options["max_sequences"]
        with self._refused(CacheFullError, f"admit {n}, left padding {padding}", may=full, must=full):
            for handle, p in zip(self.cache.admit(n, left_padding=padding), padding or [0] * n, strict=True):
                self.memory.admit(handle, p)
                self.known[handle] = [next(self.numbers), 0]

    def fork(self) -> None:
        if self.live:
            self._fork(self.draw.one(self.live), self.draw.one((1, 1, 2)))

    def truncate(self) -> None:
        if self.live:
            self._truncate(self.draw.one(self.live))

    def share(self) -> None:
        """Fork, truncate and step: owners of one page, of different lengths, write into it or fail to."""
        stored = [handle for handle in self.live if self.memory.length(handle)]
        if not stored:
            return self.step()
        family = [self.draw.one(stored)]
        family += self._fork(family[0], self.draw.one((1, 1, 1, 2)))
        for handle in family[: self.draw.upto(2)]:
            self._truncate(handle)
        self.draw.random.shuffle(family)
        tokens = {handle: self.draw.one((0, 1, 1, 1, 2, 2, 3)) for handle in family}
        self._step_and_what_follows(tokens, ("clean", "abort", "abort"))
        return None

    def release(self) -> None:
        handles = [handle for handle in self.live if self.draw.maybe(0.4)]
        self.log.append(f"release {[self.known[handle][0] for handle in handles]}")
        self.cache.release(*handles)
        for handle in handles:
            self.memory.release(handle)
        if not self.live and self.cache.used_bytes:
            raise Mismatch(f"used_bytes: {self.cache.used_bytes} in use by no sequence")

    def step(self) -> None:
        self._step_and_what_follows(self._tokens(), ("clean",) * 6 + ("abort", "abort", "forget"))

    def read(self) -> None:
        self._read(self._tokens())

    # How it happens.

    @contextmanager
    def _refused(self, error: type | tuple, text: str, *, may: bool, must: bool = False) -> Iterator[None]:
        """Expect ``error`` or not."""
        self.log.append(text)
        try:
            yield
        except error as refusal:
            if not may:
                raise
            self.log[-1] += f" (refused: {type(refusal).__name__})"
        else:
            if must:
                raise Mismatch(f"{text}: expected it to be refused")

    def _fork(self, handle, n: int) -> list:
        full, children = len(self.live) + n > self.options["max_sequences"], []
        with self._refused(CacheFullError, f"fork {self.known[handle][0]} {n} times", may=full, must=full):
            children = self.cache.fork(handle, n)
        for child in children:
            self.memory.fork(handle, child)
            self.known[child] = [next(self.numbers), self.known[handle][1]]
        return children

    def _truncate(self, handle) -> None:
        stored = self.memory.length(handle)
        length = self.draw.upto(stored) if self.draw.maybe(0.3) else max(0, stored - self.draw.upto(3))
        lost = self._may_be_lost(handle, length)
        with self._refused(RuntimeError, f"truncate {self.known[handle][0]} to {length}", may=lost):
            self.cache.truncate(handle, length)
            self.memory.truncate(handle, length)

    def _step_and_what_follows(self, tokens: int | dict, endings: tuple[str, ...]) -> None:
        """A step, and after one that fails now and then a read by the same sequences, or the step again."""
        if self._step(tokens, self.draw.one(endings)):
            return
        if self.draw.maybe(0.5):
            self._read(tokens)
        if self.draw.maybe(0.5):
            self._step(tokens, "clean")

    def _tokens(self) -> int | dict:
        """What a step or a read is asked for."""
        counts = LONG_COUNTS if self.long else COUNTS
        if self.draw.maybe(0.5):
            return self.draw.one(counts)
        some = [handle for handle in self.live if self.draw.maybe(0.7)]
        self.draw.random.shuffle(some)
        return {handle: self.draw.one(counts) for handle in some}

    def _counts(self, tokens: int | dict) -> tuple[dict, tuple[int, ...]]:
        """How many tokens each sequence gets, and the shape of all of them."""
        if isinstance(tokens, int):
            return dict.fromkeys(self.live, tokens), (len(self.live), tokens)
        return tokens, (sum(tokens.values()),)

    def _text(self, tokens: int | dict) -> str:
        return str(
            tokens if isinstance(tokens, int) else {self.known[name][0]: n for name, n in tokens.items()}
        )

    def _may_be_lost(self, handle, query: int) -> bool:
        """Whether a window has dropped pages of keys that the query at this index sees."""
        size, rollback = (
            self.options.get("page_size", self.options["max_length"]),
            self.options.get("rollback", 0),
        )
        dropped = [
            max(0, self.known[handle][1] - window + 1 - rollback) // size * size for window in self.windows
        ]
        return any(query - window + 1 < first for window, first in zip(self.windows, dropped, strict=True))

    def _may_be_full(self, counts: dict) -> tuple[bool, bool]:
        """Whether a step may be refused for want of room, and whether it must."""
        stored, most = {name: self.memory.length(name) for name in self.live}, self.options["max_length"]
        too_long = any(stored[name] + n > most for name, n in counts.items())
        size = self.options.get("page_size", most)
        pages = sum(
            -(-(stored[name] + counts.get(name, 0)) // size) for name in stored
        )  # if nothing were shared
        return too_long or (self.paged and pages > self.options["pages"]), too_long

    def _step(self, tokens: int | dict, ending: str) -> bool:
        """A step that ends so; whether it was no failure by intention."""
        counts, lead = self._counts(tokens)
        new = [layer.new(self.draw, counts, self.memory, lead) for layer in self.layers]
        stop = self.draw.upto(len(self.layers), least=self.draw.one((0, 1))) if ending == "abort" else None
        if ending == "forget":
            stop, ending = self.draw.upto(len(self.layers) - 1), "forget" if sum(counts.values()) else "clean"
        early = len(lead) == 1 and any(
            n and self.memory.length(name) < self.memory.padding[name] for name, n in counts.items()
        )
        full, must = self._may_be_full(counts)
        errors = (CacheFullError, ValueError) if early else CacheFullError
        text = f"step {self._text(tokens)}" + (f", {ending} {stop}" if ending != "clean" else "")
        layers = None
        try:
            with ExitStack() as stack:
                with self._refused(errors, text, may=full or early, must=must or early):
                    layers = stack.enter_context(self.cache.step(tokens))
                if layers is None:
                    return True
                self._body(layers, new, counts, lead, ending if ending == "clean" else (ending, stop))
        except Abort:
            return False
        except RuntimeError as error:
            if ending != "forget" or "append" not in str(error):
                raise
            return False
        if ending != "clean":
            raise Mismatch(f"a step ended well in which layer {stop} did not append")
        for handle in counts:
            for layer, mine in zip(self.memory.tokens[handle], new, strict=True):
                layer += mine.tokens[handle]
            self.known[handle][1] = max(self.known[handle][1], self.memory.length(handle))
        return True

    def _body(self, layers, new: list[New], counts: dict, lead: tuple[int, ...], ending: tuple) -> None:
        """Append to every layer and attend over it, except where the step is to fail."""
        for i, (layer, mine) in enumerate(zip(layers, new, strict=True)):
            if ending == ("abort", i):
                raise Abort
            if ending == ("forget", i):
                continue
            self._compare_positions(layer.positions, counts, lead)
            if self.draw.maybe(0.1):  # written again below
                k, v, index = (x if x is None else x * torch.nan for x in (mine.k, mine.v, mine.index))
                layer.append(k, v, angles=mine.angles, index=index)
            view = layer.append(mine.k, mine.v, angles=mine.angles, index=mine.index)
            rows = {name: self.memory.tokens[name][i] + mine.tokens[name] for name in counts}
            self._compare_index(view, rows, counts)
            for _ in range(self.draw.one((0, 1, 1, 2))):
                self._attend(i, view if self.draw.maybe(0.7) else layer.view(), rows, counts, lead)
        if ending[0] == "abort":
            raise Abort

    def _compare_positions(self, positions: Tensor, counts: dict, lead: tuple[int, ...]) -> None:
        expected = []
        for name, n in counts.items():
            first = self.memory.length(name) - self.memory.padding[name]
            expected += [max(0, first + i) for i in range(n)]
        if positions.shape != lead or positions.flatten().tolist() != expected:
            raise Mismatch(f"positions: expected {expected} as {list(lead)}, got {positions.tolist()}")

    def _compare_index(self, view: KVView, rows: dict, counts: dict) -> None:
        """Compare the index keys that the queries of a step or read can see."""
        layout, padding = view.layout, self.memory.padding
        if not layout.index_dim or not rows:
            return
        found = view.index_keys(max(map(len, rows.values()))).double().cpu()
        close = 0.0
        if layout.index_dtype is not None:  # scaled in fp32, then rounded to the layout's dtype
            close = 2 * max(torch.finfo(dtype).eps for dtype in (torch.float32, layout.dtype))
        for row, (name, tokens) in enumerate(rows.items()):
            length = len(tokens)
            reach = length if layout.window is None else layout.window - 1 + counts[name]
            first = max(padding[name], length - reach)
            expected = [token.index for token in tokens[first:]]
            if expected and not torch.allclose(found[row, first:length], torch.stack(expected), close, 0):
                raise Mismatch(f"index keys of sequence {self.known[name][0]} from {first} on")
            if found[row, length:].any() or found[row, : padding[name]].any():
                raise Mismatch(f"index keys outside of sequence {self.known[name][0]} are not 0")

    def _read(self, tokens: int | dict, *, whole: bool = False) -> None:
        """Attend to what is stored; ``whole`` by all that can be seen."""
        (counts, lead), layers = self._counts(tokens), None
        lost = any(n and self._may_be_lost(name, self.memory.length(name) - n) for name, n in counts.items())
        with ExitStack() as stack:
            with self._refused(RuntimeError, f"read {self._text(tokens)}", may=lost):
                layers = stack.enter_context(self.cache.read(tokens))
            for i, layer in enumerate(layers or ()):
                rows = {name: self.memory.tokens[name][i] for name in counts}
                self._compare_index(layer.view(), rows, counts)
                self._attend(i, layer.view(), rows, counts, lead, whole=whole)

    def _attend(
        self, i: int, view: KVView, rows: dict, counts: dict, lead: tuple[int, ...], *, whole=False
    ) -> None:
        """Attention over layer ``i``, which holds ``rows``."""
        if not rows:
            return
        lengths = Lengths(len(lead) == 1, list(counts.values()), [len(x) for x in rows.values()])
        asked = Asked(self.draw, self.layers[i], lengths, rows, self.memory.padding, whole=whole)
        self.log[-1] += f"; layer {i}{asked}"
        asked.check(view)
