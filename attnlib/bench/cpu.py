"""The CPU cases: ours against torch's scaled_dot_product_attention, in the same run."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..cache.kv_cache import KVCache
from ..functional import attention, prepare
from ..layers import GroupedQueryAttention
from ..mask import CAUSAL
from ..rope import Rope, rotate
from ..terms import Terms
from .timing import Row, per_call, race

DOOR_SECONDS = 10e-6


def rows() -> Iterator[Row]:
    """Every CPU case, one after another."""
    for tokens in (2048, 8192):
        yield _dense(tokens)
    yield _small(gradients=False)
    yield _small(gradients=True)
    for kv_heads, context in ((2, 512), (2, 2048), (8, 512), (8, 2048)):
        for masked in (True, False):
            yield _decode_step(kv_heads=kv_heads, batch=4, context=context, masked=masked)
    yield _door()


def _dense(tokens: int) -> Row:
    q, k, v = (torch.randn(1, tokens, 8, 64) for _ in range(3))
    return race(
        f"dense causal forward, {tokens} tokens, fp32",
        lambda: attention(q, k, v, mask=CAUSAL),
        lambda: _sdpa(q, k, v),
        bound=1.1,
        agree=torch.testing.assert_close,
        seconds=10,
    )


def _small(*, gradients: bool) -> Row:
    q, k, v = (torch.randn(1, 128, 8, 64, requires_grad=gradients) for _ in range(3))
    dout = torch.randn(1, 128, 8, 64)

    def run(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout) if gradients else (out,)

    return race(
        f"small causal call, {'with' if gradients else 'without'} gradients",
        lambda: run(attention(q, k, v, mask=CAUSAL)),
        lambda: run(_sdpa(q, k, v)),
        bound=2.5 if gradients else 1.5,
        agree=torch.testing.assert_close,
    )


def _door() -> Row:
    q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
    seconds = per_call(lambda: prepare("dense", q, k, v, CAUSAL, Terms(), None, lse=False))
    return Row("the door (bind, describe, select) against 10 us", seconds, DOOR_SECONDS, 1.0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@torch.no_grad()
def _decode_step(*, kv_heads: int, batch: int, context: int, masked: bool, layers: int = 8) -> Row:
    """One token for every sequence of a batch: our cache against torch's attention over preallocated tensors."""
    model = nn.ModuleList(
        GroupedQueryAttention(512, 8, num_kv_heads=kv_heads, mask=CAUSAL, rope=Rope(64)) for _ in range(layers)
    )
    prompt, token = torch.randn(batch, context, 512), torch.randn(batch, 1, 512)
    with torch.no_grad():
        ours, peer = _OurDecoder(model, prompt), _PeerDecoder(model, prompt, masked=masked)
        return race(
            f"decode, {layers} layers, 8/{kv_heads} heads, {batch} x {context}, {'masked' if masked else 'sliced'}",
            lambda: ours.step(token),
            lambda: peer.step(token),
            bound=1.0,
            agree=lambda a, b: torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4),
            seconds=6,
        )


class _OurDecoder:
    """The layers over a contiguous cache; goes back to the prompt when the cache is full."""

    def __init__(self, model: nn.ModuleList, prompt: Tensor):
        batch, self.context, _ = prompt.shape
        self.model = model
        self.cache = KVCache.contiguous(
            [layer.kv_layout for layer in model], max_sequences=batch, max_length=2 * self.context
        )
        self.handles = self.cache.admit(batch)
        self.step(prompt)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        if self.cache.length(self.handles[0]) == 2 * self.context:
            for handle in self.handles:
                self.cache.truncate(handle, self.context)
        with self.cache.step(x.shape[1]) as layers:
            angles = self.model[0].rope.angles(layers[0].positions)
            for layer, kv in zip(self.model, layers, strict=True):
                x = x + layer(x, kv=kv, positions=angles)
        return x


class _PeerDecoder:
    """The same layers' weights with torch's attention over preallocated ``[b, capacity, g, d]`` tensors.

    ``masked`` attends to all of the tensors under a mask, as static caches do; else to a slice of them, which grows.
    """

    def __init__(self, model: nn.ModuleList, prompt: Tensor, *, masked: bool):
        batch, self.context, _ = prompt.shape
        self.model, self.length, self.masked = model, 0, masked
        shape = (len(model), batch, 2 * self.context, model[0].num_kv_heads, model[0].head_dim)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.step(prompt)

    @torch.no_grad()
    def step(self, x: Tensor) -> Tensor:
        if self.length == 2 * self.context:
            self.length = self.context
        start, self.length = self.length, self.length + x.shape[1]
        positions = torch.arange(start, self.length)
        angles = self.model[0].rope.angles(positions)
        visible = {"is_causal": x.shape[1] > 1}
        if self.masked:
            visible = {"attn_mask": torch.arange(2 * self.context) <= positions[:, None]}
        for layer, k_cache, v_cache in zip(self.model, self.k, self.v, strict=True):
            q, k, v = (
                project(x).unflatten(-1, (-1, layer.head_dim)) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
            )
            k_cache[:, start : self.length] = rotate(k, angles)
            v_cache[:, start : self.length] = v
            k, v = (k_cache, v_cache) if self.masked else (k_cache[:, : self.length], v_cache[:, : self.length])
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, angles), k, v))
            out = scaled_dot_product_attention(q, k, v, **visible, enable_gqa=True)
            x = x + layer.o_proj(out.transpose(1, 2).flatten(-2))
        return x
