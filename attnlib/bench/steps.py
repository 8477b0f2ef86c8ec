"""Time whole decoding steps (eager, compiled, or as a CUDA graph), and MLA layers, absorbed and expanded."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    LayerCache,
    MultiHeadLatentAttention,
    Rope,
    cached_attention,
)
from .compare import Cells, Failure, agreeing, attempt, compare_calls, in_turns
from .place import Target, host_seconds, wall_seconds
from .report import Line, Table
from .speed import BATCHES, Rows
from .stored import PAGE, cache_for
from .watchdog import watched

TURN = 32  # an implementation decodes this many steps before the next one takes its turn
DTYPE = torch.bfloat16


class StepCase(NamedTuple):
    """A decoding benchmark: a batch decodes a token per step after a stored context, in identical layers."""

    name: str
    batch: int
    context: int
    layers: int = 4
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = DTYPE


STEPS = (StepCase("1 x 1k", 1, 1024), StepCase("16 x 1k", 16, 1024))


class LatentLayer(NamedTuple):
    """A benchmark of one MLA layer: tokens per sequence, and the ranks of the query and KV projections."""

    name: str
    batch: int
    tokens: int
    width: int
    heads: int
    q_rank: int | None
    rank: int = 512
    head: int = 128  # values have this many channels, and so have keys without their rotary channels
    rope: int = 64
    dtype: torch.dtype = DTYPE

    def layer(self, place: Target, form: str, backend: str | None) -> MultiHeadLatentAttention:
        return MultiHeadLatentAttention(
            self.width, self.heads, mask=CAUSAL, q_lora_rank=self.q_rank, kv_lora_rank=self.rank,
            qk_nope_head_dim=self.head, qk_rope_head_dim=self.rope, v_head_dim=self.head,
            rope=Rope(self.rope, interleaved=True), form=form, backend=backend, device=place.device,
            dtype=self.dtype,
        )  # fmt: skip


Work = StepCase | LatentLayer
FORMS = (
    LatentLayer("DeepSeek-V3, 1 x 32k", 1, 32768, 7168, 128, 1536),
    LatentLayer("DeepSeek-V3, 8 x 32k", 8, 32768, 7168, 128, 1536),
    LatentLayer("DeepSeek-V2-Lite, 1 x 32k", 1, 32768, 2048, 16, None),
    LatentLayer("DeepSeek-V2-Lite, 8 x 32k", 8, 32768, 2048, 16, None),
)


class Stack(nn.Module):
    """A stack of grouped-query attention layers that computes the rotary angles once for all layers."""

    def __init__(self, work: StepCase, place: Target):
        super().__init__()
        options = {"backend": place.backend, "device": place.device, "dtype": work.dtype}
        sizes = {"num_kv_heads": work.kv_heads, "rope": Rope(work.width // work.heads)}
        self.layers: nn.ModuleList = nn.ModuleList(
            GroupedQueryAttention(work.width, work.heads, mask=CAUSAL, **sizes, **options)
            for _ in range(work.layers)
        )

    def forward(self, x: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        angles = self.layers[0].rope.angles(caches[0].positions)
        for layer, kv in zip(self.layers, caches, strict=True):
            x = x + layer(x, kv=kv, angles=angles)
        return x


class Decoder:
    """A stack of layers with a cache that holds the context and has room for TURN decoding steps."""

    def __init__(self, work: StepCase, place: Target):
        self._work, self._place = work, place
        self.model: Stack = Stack(work, place)
        layouts = [layer.kv_layout for layer in self.model.layers]
        self.cache: KVCache = cache_for(layouts, work.batch, work.context + TURN, PAGE, place.device)
        self._handles = self.cache.admit(work.batch)
        self.x: Tensor = _random(place, work.dtype, work.batch, 1, work.width)
        with self.cache.step(work.context) as layers:
            for layer in layers:
                append_random(place, layer, self.model.layers[0].rope)

    def turn(self, run: Callable[[Sequence[LayerCache]], Tensor]) -> Tensor:
        """Decode TURN steps after the stored context; return the output of the last step."""
        for handle in self._handles:
            self.cache.truncate(handle, self._work.context)
        for _ in range(TURN):
            with self.cache.step(1, replay=True) as layers:
                out = run(layers)
        return out

    def seconds(self, run: Callable[[Sequence[LayerCache]], Tensor]) -> float:
        """Return the wall time per decoding step in seconds, including the work of the CPU.

        The clock runs from the first of TURN steps until the device has finished the last one.
        """
        return wall_seconds(partial(self.turn, run), self._place.synchronize) / TURN


@torch.no_grad()
def rows(place: Target, tables: Sequence[Table], work: Iterable[Work], measure: Callable[..., Cells]) -> Rows:
    """Measure each case and yield a table row with its times in microseconds."""
    for case in work:
        with watched(f"{tables[0].name}, {case.name}"):
            cells = attempt(measure, place, case)
        cells = {"ours": cells} if isinstance(cells, Failure) else cells
        place.tidy()
        yield tables[0], Line(case.name, {name: attempt(lambda x: x * 1e6, x) for name, x in cells.items()})


def ways(place: Target, case: StepCase, compile: Callable = torch.compile) -> Cells:
    """Time a decoding step in three ways: as a replayed CUDA graph, eagerly, and with torch.compile."""
    decoder = Decoder(case, place)
    model, x = decoder.model, decoder.x
    compiled = compile(model, fullgraph=True)
    with decoder.cache.step(1) as layers:
        model(x, layers)  # raises here if the layers cannot run
        replay = attempt(place.capture, partial(model, x, layers), 1)
    runs = {
        "graph": attempt(lambda replay: lambda layers: replay(), replay),
        "eager": lambda layers: model(x, layers),
        "compiled": lambda layers: compiled(x, layers),
    }
    return in_turns(agreeing(runs, lambda run: [decoder.turn(run).clone()]), decoder.seconds, place.rounds)


def launches(place: Target, case: StepCase, batches: int = BATCHES) -> Cells:
    """Measure the CPU time that one layer takes to launch its append and its attention."""
    decoder = Decoder(case._replace(layers=1), place)
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
        return in_turns(actions, partial(host_seconds, synchronize=place.synchronize), batches)


def forms(place: Target, case: LatentLayer) -> Cells:
    """Time an MLA layer for one new token, in its absorbed form and in its expanded form."""
    layers = {form: case.layer(place, form, place.backend) for form in ("absorbed", "expanded")}
    layers["torch"] = case.layer(place, "absorbed", "torch")
    first = layers["absorbed"]
    for layer in layers.values():
        layer.load_state_dict(first.state_dict())
    cache = cache_for([first.kv_layout], case.batch, case.tokens, PAGE, place.device)
    cache.admit(case.batch)
    with cache.step(case.tokens - 1) as (kv,):
        append_random(place, kv, first.rope)
    x = _random(place, case.dtype, case.batch, 1, case.width)
    with cache.step(1) as (kv,):
        makers = {name: lambda layer=layer: partial(layer, x, kv=kv) for name, layer in layers.items()}
        return compare_calls(place, makers, captured=4, ours=("absorbed", "expanded"), checks=("torch",))


def append_random(place: Target, kv, rope: Rope) -> None:
    """Append random keys and values to the cache for this step, with keys rotated by the layer's rope."""
    layout, rows = kv.layout, kv.positions.shape
    sizes = ((layout.dim,), (layout.rope_dim,)) if layout.is_latent else ((layout.heads, layout.dim),) * 2
    keys = [_random(place, layout.dtype, *rows, *size) for size in sizes]
    kv.append(*keys, angles=rope.angles(kv.positions))


def _random(place: Target, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, device=place.device, dtype=dtype)
