"""The CPU benchmark: attnlib and torch's scaled_dot_product_attention, in the same run."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import KVCache, rotate
from .cases import Case, plain
from .compare import attempt, compare_calls
from .place import Target
from .report import Line, Table
from .speed import Column, Rows, by_what
from .steps import Stack, StepCase

CALLS = tuple(
    (plain(tokens, 8, 64)._replace(name=f"[1, {tokens}, 8, 64]", dtype=torch.float32), whats)
    for tokens, whats in ((2048, ("inference",)), (8192, ("inference",)), (128, ("inference", "both")))
)
DECODING = tuple(
    StepCase(f"8/{kv_heads} heads, 4 x {context}", 4, context, 8, 512, 8, kv_heads, torch.float32)
    for kv_heads, context in ((2, 512), (2, 2048), (8, 512), (8, 2048))
)


def calls(place: Target, tables: Sequence[Table], work: Iterable[tuple[Case, Sequence[str]]] = CALLS) -> Rows:
    """Time causal attention on the CPU, in large and in small calls, and yield a row for each."""
    for case, whats in work:
        columns = Column("ours", "ours", case), Column("SDPA", "transposed", case)
        yield from by_what(place, tables[0], case.name, columns, whats)


@torch.no_grad()
def decoding(place: Target, tables: Sequence[Table], work: Iterable[StepCase] = DECODING) -> Rows:
    """Time decoding steps on the CPU: attnlib's cache, and torch's attention over preallocated tensors."""
    for case in work:
        model = Stack(case, place)
        prompt, token = (torch.randn(case.batch, n, case.width) for n in (case.context, 1))
        for masked, name in ((True, "static cache under a mask"), (False, "slices")):
            makers = {
                "ours": partial(OurDecoder, model, prompt, token),
                "SDPA": partial(PeerDecoder, model, prompt, token, masked=masked),
            }
            seconds = compare_calls(place, makers)
            yield (
                tables[0],
                Line(f"{case.name}, {name}", {n: attempt(lambda x: x * 1e3, x) for n, x in seconds.items()}),
            )


class OurDecoder:
    """Decodes one token per call from attnlib's contiguous cache; a full cache is cut back to the prompt."""

    def __init__(self, model: Stack, prompt: Tensor, token: Tensor):
        batch, self._context, _ = prompt.shape
        self._model, self._token = model, token
        layouts = [layer.kv_layout for layer in model.layers]
        self._cache = KVCache.contiguous(layouts, max_sequences=batch, max_length=2 * self._context)
        self._handles = self._cache.admit(batch)
        self.step(prompt)

    def __call__(self) -> Tensor:
        return self.step(self._token)

    def step(self, x: Tensor) -> Tensor:
        if self._cache.length(self._handles[0]) == 2 * self._context:
            for handle in self._handles:
                self._cache.truncate(handle, self._context)
        with self._cache.step(x.shape[1]) as caches:
            return self._model(x, caches)


class PeerDecoder:
    """Decodes with the same weights and torch's attention over preallocated ``[b, capacity, g, d]`` tensors.

    With ``masked``, attention reads the whole tensors under a mask, like a static cache. Otherwise it reads a
    slice that grows with every token.
    """

    def __init__(self, model: Stack, prompt: Tensor, token: Tensor, *, masked: bool):
        batch, self._context, _ = prompt.shape
        self._layers, self._length, self._masked, self._token = model.layers, 0, masked, token
        first = self._layers[0]
        shape = (len(self._layers), batch, 2 * self._context, first.num_kv_heads, first.head_dim)
        self._k, self._v = torch.zeros(shape), torch.zeros(shape)
        self.step(prompt)

    def __call__(self) -> Tensor:
        return self.step(self._token)

    def step(self, x: Tensor) -> Tensor:
        if self._length == 2 * self._context:
            self._length = self._context
        start, self._length = self._length, self._length + x.shape[1]
        positions = torch.arange(start, self._length)
        angles = self._layers[0].rope.angles(positions)
        visible = {"is_causal": x.shape[1] > 1}
        if self._masked:
            visible = {"attn_mask": torch.arange(2 * self._context) <= positions[:, None]}
        for layer, k_cache, v_cache in zip(self._layers, self._k, self._v, strict=True):
            q, k, v = (
                project(x).unflatten(-1, (-1, layer.head_dim))
                for project in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            k_cache[:, start : self._length] = rotate(k, angles)
            v_cache[:, start : self._length] = v
            k, v = (
                (k_cache, v_cache)
                if self._masked
                else (k_cache[:, : self._length], v_cache[:, : self._length])
            )
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, angles), k, v))
            out = scaled_dot_product_attention(q, k, v, **visible, enable_gqa=True)
            x = x + layer.o_proj(out.transpose(1, 2).flatten(-2))
        return x
