"""Whole decoding steps: layers in eager calls, in a graph and compiled, and an MLA layer in both of its forms."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..functional import cached_attention
from ..layers import GroupedQueryAttention, MultiHeadLatentAttention
from ..mask import CAUSAL
from ..rope import Rope
from .place import Place, host_seconds
from .race import Failure, attempt, disagreements
from .replays import race
from .report import Cells, Claim, Row, Table
from .speed import Rows
from .stored import cache_for

STEPS = 32  # of one turn
BATCHES = 30  # of calls whose CPU time is taken
PAGE = 64
DTYPE = torch.bfloat16


class Steps(NamedTuple):
    """Sequences that decode through some equal layers, one token a step, from a context on."""

    name: str
    batch: int
    context: int
    layers: int = 4
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = DTYPE


CALLS = (Steps("1 x 1k", 1, 1024), Steps("16 x 1k", 16, 1024))


class LatentLayer(NamedTuple):
    """Sequences of so many tokens through one MLA layer."""

    name: str
    batch: int
    tokens: int
    width: int
    heads: int
    q_rank: int | None
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    dtype: torch.dtype = DTYPE

    def layer(self, place: Place, form: str, backend: str) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(
            self.width,
            self.heads,
            mask=CAUSAL,
            q_lora_rank=self.q_rank,
            kv_lora_rank=self.rank,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.value,
            rope=Rope(self.rope, interleaved=True),
            form=form,
            backend=backend,
            device=place.device,
            dtype=self.dtype,
        )


FORMS = (
    LatentLayer("DeepSeek-V3, 1 x 32k", 1, 32768, 7168, 128, 1536),
    LatentLayer("DeepSeek-V3, 8 x 32k", 8, 32768, 7168, 128, 1536),
    LatentLayer("DeepSeek-V2-Lite, 1 x 32k", 1, 32768, 2048, 16, None),
    LatentLayer("DeepSeek-V2-Lite, 8 x 32k", 8, 32768, 2048, 16, None),
)


class Stack(nn.Module):
    """Grouped-query layers that share one computation of the angles."""

    def __init__(self, work: Steps, place: Place):
        super().__init__()
        width = work.width // work.heads
        self.layers = nn.ModuleList(
            GroupedQueryAttention(
                work.width,
                work.heads,
                num_kv_heads=work.kv_heads,
                mask=CAUSAL,
                rope=Rope(width),
                backend=place.backend,
                device=place.device,
                dtype=work.dtype,
            )
            for _ in range(work.layers)
        )

    def forward(self, x: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        angles = self.layers[0].rope.angles(caches[0].positions)
        for layer, kv in zip(self.layers, caches, strict=True):
            x = x + layer(x, kv=kv, positions=angles)
        return x


class Decoder:
    """A stack over a cache that holds the context and has room for one turn's steps."""

    def __init__(self, work: Steps, place: Place):
        self.work, self.place = work, place
        self.model = Stack(work, place)
        layouts = [layer.kv_layout for layer in self.model.layers]
        self.cache = cache_for(layouts, work.batch, work.context + STEPS, PAGE, place.device)
        self.handles = self.cache.admit(work.batch)
        self.x = _random(place, work.dtype, work.batch, 1, work.width)
        with self.cache.step(work.context) as layers:
            for layer in layers:
                _append_random(place, layer, self.model.layers[0].rope)

    def turn(self, run: Callable[[Sequence[LayerCache]], Tensor]) -> Tensor:
        """Steps from the context on: what the last of them gives."""
        for handle in self.handles:
            self.cache.truncate(handle, self.work.context)
        for _ in range(STEPS):
            with self.cache.step(1, replay=True) as layers:
                out = run(layers)
        return out

    def seconds(self, run: Callable[[Sequence[LayerCache]], Tensor]) -> float:
        """Of one step, books included, from the first call of a turn until the device has done the last."""
        self.place.synchronize()
        start = time.perf_counter()
        self.turn(run)
        self.place.synchronize()
        return (time.perf_counter() - start) / STEPS


@torch.no_grad()
def calls(place: Place, tables: Sequence[Table], work: Iterable[Steps] = CALLS, compile=torch.compile) -> Rows:
    """A step of some layers in a graph that was captured once, in eager calls and compiled to one graph."""
    for case in work:
        cells = attempt(_ways, place, case, compile)
        if isinstance(cells, Failure):
            cells = {"graph": cells}
        place.tidy()
        torch._dynamo.reset()
        yield tables[0], Row(case.name, _us(cells), _gaps(cells))


def _ways(place: Place, case: Steps, compile: Callable) -> Cells:
    decoder = Decoder(case, place)
    model, x = decoder.model, decoder.x
    compiled = compile(model, fullgraph=True)
    with decoder.cache.step(1) as layers:
        model(x, layers)  # who cannot, says so here
        replay = attempt(place.capture, partial(model, x, layers), 1)
        replays: Cells = {"one replay": replay, "its kernels": replay}
        if not isinstance(replay, Failure):
            replays = {"one replay": attempt(place.seconds, replay), "its kernels": attempt(place.kernels, replay)}
    runs = {
        "graph": replay if isinstance(replay, Failure) else lambda layers: replay(),
        "eager": lambda layers: model(x, layers),
        "compiled": lambda layers: compiled(x, layers),
    }
    return _in_turns(place, decoder, runs) | replays


def _in_turns(place: Place, decoder: Decoder, runs: dict[str, Callable | Failure]) -> Cells:
    """Seconds of a step of each that agrees with the others after a turn."""
    outcomes = {name: run if isinstance(run, Failure) else attempt(decoder.turn, run) for name, run in runs.items()}
    ended = {name: [out.clone()] for name, out in outcomes.items() if not isinstance(out, Failure)}
    outcomes |= disagreements(ended)
    taken: dict[str, list[float]] = {name: [] for name, out in outcomes.items() if not isinstance(out, Failure)}
    for _ in range(place.rounds):
        for name, seconds in taken.items():
            seconds.append(decoder.seconds(runs[name]))
    return {name: median(taken[name]) if name in taken else why for name, why in outcomes.items()}


def _gaps(cells: Cells) -> Claim | None:
    alone, kernels = cells.get("one replay", Failure()), cells.get("its kernels", Failure())
    if isinstance(alone, Failure) or isinstance(kernels, Failure):
        return None
    return Claim(alone / kernels, 1.05, most=True, of="one replay over its kernels")


@torch.no_grad()
def launch(place: Place, tables: Sequence[Table], work: Iterable[Steps] = CALLS, batches: int = BATCHES) -> Rows:
    """CPU time of one layer's append and attention, from the call to the last launch."""
    for case in work:
        cells = attempt(_launches, place, case._replace(layers=1), batches)
        cells = {"both": cells} if isinstance(cells, Failure) else _us(cells)
        place.tidy()
        claim = None if isinstance(cells["both"], Failure) else Claim(cells["both"], 40, most=True, unit=" us")
        yield tables[0], Row(case.name, cells, claim)


def _launches(place: Place, case: Steps, batches: int) -> Cells:
    decoder = Decoder(case, place)
    rope, width = decoder.model.layers[0].rope, case.width // case.heads
    q = _random(place, case.dtype, case.batch, 1, case.heads, width)
    k, v = (_random(place, case.dtype, case.batch, 1, case.kv_heads, width) for _ in range(2))
    with decoder.cache.step(1) as (kv,):
        angles, view = rope.angles(kv.positions), kv.append(k, v, angles=rope.angles(kv.positions))
        attend = partial(cached_attention, q, mask=CAUSAL, backend=place.backend)
        actions = {
            "both": lambda: attend(kv.append(k, v, angles=angles)),
            "append": lambda: kv.append(k, v, angles=angles),
            "attention": lambda: attend(view),
        }
        return {name: attempt(_host, place, action, batches) for name, action in actions.items()}


def _host(place: Place, action: Callable, batches: int) -> float:
    return median(host_seconds(action, place.synchronize) for _ in range(batches))


@torch.no_grad()
def forms(place: Place, tables: Sequence[Table], work: Iterable[LatentLayer] = FORMS, least: float = 5) -> Rows:
    """An MLA layer that attends over its latents against one that expands them again in each step."""
    for case in work:
        seconds = attempt(_forms, place, case)
        cells = {"absorbed": seconds} if isinstance(seconds, Failure) else _us(seconds)
        place.tidy()
        yield tables[0], Row(case.name, cells, tables[0].claim(cells, "absorbed", "expanded", least))


def _forms(place: Place, case: LatentLayer) -> Cells:
    """Seconds of a call on the last token, of each form that agrees with plain torch."""
    layers = {form: case.layer(place, form, place.backend) for form in ("absorbed", "expanded")}
    layers["torch"] = case.layer(place, "absorbed", "torch")
    first = layers["absorbed"]
    for layer in layers.values():
        layer.load_state_dict(first.state_dict())
    cache = cache_for([first.kv_layout], case.batch, case.tokens, PAGE, place.device)
    cache.admit(case.batch)
    with cache.step(case.tokens - 1) as (kv,):
        _append_random(place, kv, first.rope)
    x = _random(place, case.dtype, case.batch, 1, case.width)
    with cache.step(1) as (kv,):
        makers = {name: lambda layer=layer: partial(layer, x, kv=kv) for name, layer in layers.items()}
        return race(place, makers, calls=4, ours=("absorbed", "expanded"), judges=("torch",))


def _append_random(place: Place, kv: LayerCache, rope: Rope) -> None:
    """Fill this step's slots, rotated as a layer with this rope does."""
    layout, rows = kv.layout, kv.positions.shape
    sizes = ((layout.dim,), (layout.tail,)) if layout.is_latent else ((layout.heads, layout.dim),) * 2
    keys = [_random(place, layout.dtype, *rows, *size) for size in sizes]
    kv.append(*keys, angles=rope.angles(kv.positions))


def _random(place: Place, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device=place.device, dtype=dtype)


def _us(cells: Cells) -> Cells:
    return {name: x if isinstance(x, Failure) else x * 1e6 for name, x in cells.items()}
