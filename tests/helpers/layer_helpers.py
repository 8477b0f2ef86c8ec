"""Small layers, caches and oracles for the tests of attention layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    Mask,
    MultiHeadLatentAttention,
    Rope,
    shared_angles,
)
from attnlib.call.call import Call
from attnlib.layers import attending as attending_module
from attnlib.layers import latent_forms as forms_module

torch.set_num_threads(1)

HIDDEN = 24
SIZES = {
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
ABSORBED = SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"]  # width of a query in each form
EXPANDED = SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"]
DEEPSEEK_V3 = {"rank": 512, "nope": 128, "rope": 64, "value": 128}
BOTH = ("gqa", "mla-auto")  # one of either class
DOORS = {
    "dense": "attention",
    "varlen": "varlen_attention",
    "cached": "cached_attention",
}  # by kinds of calls
KINDS = ("mha", "gqa", "mqa", "mla-expanded", "mla-absorbed", "mla-auto")


def grouped(num_kv_heads: int = 2, *, rope: bool = True, **options) -> GroupedQueryAttention:
    """A small grouped-query layer, fp64 and causal if not said otherwise."""
    options = {"mask": CAUSAL, "head_dim": 8, "dtype": torch.float64} | options
    return GroupedQueryAttention(
        HIDDEN, 4, num_kv_heads=num_kv_heads, rope=Rope(8) if rope else None, **options
    )


def latent(form: str = "auto", *, rope: bool = True, **options) -> MultiHeadLatentAttention:
    """A small latent layer, fp64 and causal if not said otherwise; without rope its heads have no rotary
    channels.
    """
    options = (
        {"mask": CAUSAL, "dtype": torch.float64} | SIZES | options | ({} if rope else {"qk_rope_head_dim": 0})
    )
    width = options["qk_rope_head_dim"]
    turned = Rope(width, interleaved=True) if width else None
    return MultiHeadLatentAttention(HIDDEN, 4, form=form, rope=turned, **options)


def make(kind: str, **options) -> nn.Module:
    """A layer of one of ``KINDS``."""
    if kind.startswith("mla"):
        return latent(kind.removeprefix("mla-"), **options)
    return grouped({"mha": 4, "gqa": 2, "mqa": 1}[kind], **options)


class Stack(nn.Module):
    """Layers with residuals: what one layer stores depends on what the layer before has read."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, kv: Sequence | None = None, **inputs) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x, kv=None if kv is None else kv[i], **inputs)
        return x


class Sharing(nn.Module):
    """Layers with residuals of which layer i reads the keys of layer ``sources[i]``, which may be itself.

    Every owner takes its own keys too, so that nothing is projected twice. ``kv`` has an entry for each
    owner.
    """

    def __init__(self, layers: Sequence[nn.Module], sources: Sequence[int]):
        super().__init__()
        self.layers, self.sources = nn.ModuleList(layers), tuple(sources)
        self.owners = sorted(set(sources))

    @property
    def kv_layouts(self) -> list:
        return [self.layers[i].kv_layout for i in self.owners]

    def forward(self, x: Tensor, kv: Sequence | None = None, **inputs) -> Tensor:
        keys = {}
        for i, (layer, source) in enumerate(zip(self.layers, self.sources, strict=True)):
            if kv is not None and i == source:
                x = x + layer(x, kv=kv[self.owners.index(i)], **inputs)
                continue
            if kv is not None:
                keys[source] = kv[self.owners.index(source)].view()
            elif i == source:
                [angles] = shared_angles([layer], x, cu_seqlens=inputs.get("cu_seqlens"))
                keys[i] = (layer.latent if hasattr(layer, "latent") else layer.key_value)(x, angles)
            x = x + layer(x, keys=keys[source], **inputs)
        return x


class OwnerAndReader(nn.Module):
    """Two layers of which the second attends to the keys of the first; a plan and ranks are those of both."""

    def __init__(self, make: Callable[..., nn.Module], **options):
        super().__init__()
        self.source, self.reader = make(**options), make(own_keys=False, **options)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "context_parallel":
            self.source.context_parallel = self.reader.context_parallel = value
        else:
            super().__setattr__(name, value)

    @property
    def kv_layout(self) -> KVLayout:
        return self.source.kv_layout

    def parallel_plan(self, mesh: DeviceMesh) -> dict:
        plans = {name: layer.parallel_plan(mesh) for name, layer in self.named_children()}
        return {f"{name}.{at}": style for name, plan in plans.items() for at, style in plan.items()}

    def forward(self, x: Tensor, kv=None, **inputs) -> Tensor:
        if kv is not None:
            return self.source(x, kv=kv) + self.reader(x, keys=kv.view())
        [angles] = shared_angles([self.source], x, cu_seqlens=inputs.get("cu_seqlens"))
        keys = (self.source.latent if hasattr(self.source, "latent") else self.source.key_value)(x, angles)
        return self.source(x, keys=keys, **inputs) + self.reader(x, keys=keys, **inputs)


def sharing(
    kind: str, masks: Sequence[Mask] = (CAUSAL, CAUSAL, CAUSAL), sources=(0, 0, 0), **options
) -> Sharing:
    """Layers of ``kind`` of which those that read another's keys have none of their own."""
    own = [i == source for i, source in enumerate(sources)]
    layers = [make(kind, mask=mask, own_keys=own, **options) for mask, own in zip(masks, own, strict=True)]
    return Sharing(layers, sources)


def stack(kind: str, masks: Sequence[Mask] = (CAUSAL, CAUSAL), **options) -> Stack:
    """One layer of ``kind`` for each mask, with sinks that matter if it has any."""
    layers = [make(kind, mask=mask, **options) for mask in masks]
    for layer in layers:
        if getattr(layer, "sinks", None) is not None:
            nn.init.normal_(layer.sinks)
    return Stack(*layers)


def cache_for(
    model: Stack,
    page_size: int | None = 4,
    *,
    sequences: int = 4,
    length: int = 48,
    store=None,
    dtype=None,
    **options,
) -> KVCache:
    """A paged cache of the model, or with ``page_size=None`` a contiguous one."""
    layouts = model.kv_layouts if isinstance(model, Sharing) else [layer.kv_layout for layer in model.layers]
    layouts = [replace(layout, storage_dtype=store, dtype=dtype or layout.dtype) for layout in layouts]
    if page_size is None:
        return KVCache.contiguous(layouts, max_sequences=sequences, max_length=length)
    options |= {"max_sequences": sequences, "max_length": length, "page_size": page_size}
    return KVCache.paged(layouts, pages=sequences * -(-length // page_size), **options)


def feed(model: Stack, cache: KVCache, tokens: dict) -> dict:
    """One packed step of ``{handle: x [n, m]}``; the outputs likewise."""
    counts = {handle: len(x) for handle, x in tokens.items()}
    with torch.no_grad(), cache.step(counts) as layers:
        out = model(torch.cat(list(tokens.values())), layers)
    return dict(zip(tokens, out.split(list(counts.values())), strict=True))


def feed_dense(model: Stack, cache: KVCache, x: Tensor) -> Tensor:
    """One dense step of x ``[b, n, m]`` for every live sequence."""
    with torch.no_grad(), cache.step(x.shape[1]) as layers:
        return model(x, layers)


def alone(model: nn.Module, x: Tensor, **inputs) -> Tensor:
    """The oracle: one sequence x ``[n, m]`` at once, without a cache."""
    with torch.no_grad():
        return model(x[None], **inputs)[0]


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Reproducible hidden states ``[*shape, m]``."""
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def close(a: Tensor, b: Tensor) -> None:
    """Equal up to fp64 rounding; NaN is never equal."""
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def gradients(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The output of ``run(x)``, and the gradients of x and of every parameter for a fixed output gradient."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    seeded = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=seeded, dtype=torch.float64).to(out.dtype))
    return {"out": out.detach(), "x": x.grad} | {
        name: p.grad.clone() for name, p in module.named_parameters()
    }


def assert_twice_as_good(ours: dict, theirs: dict, truth: dict, *, factor: float = 2) -> None:
    """Each error of ours against fp64 is at most ``factor`` times theirs, plus four ulps of the largest
    value.
    """
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, exact in truth.items():
        ulp = torch.finfo(ours[name].dtype).eps * exact.abs().max().item()
        error, allowed = (
            (side[name].double() - exact.double()).abs().max().item() for side in (ours, theirs)
        )
        assert error <= factor * allowed + 4 * ulp, f"{name}: {error:.3g} against {allowed:.3g}"


@contextmanager
def calls() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """The functions of the core whose calls layers make meanwhile, each with the shape of its q."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    attend, in_chunks = attending_module.attend, forms_module.varlen_attention_with_lse

    def recorded(call: Call, *args):
        seen.append((DOORS[call.kind], tuple(call.q.shape)))
        return attend(call, *args)

    def recorded_chunk(q: Tensor, *args, **options):
        seen.append(("varlen_attention_with_lse", tuple(q.shape)))
        return in_chunks(q, *args, **options)

    with (
        mock.patch.object(attending_module, "attend", recorded),
        mock.patch.object(forms_module, "varlen_attention_with_lse", recorded_chunk),
    ):
        yield seen
