"""Time the training of layers with an output gate, compiled, and of the same layers without it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import CAUSAL, Gate, GroupedQueryAttention, Rope
from .compare import Cells, agreeing, attempt, in_turns
from .place import Target
from .report import Line, Table
from .speed import Rows
from .watchdog import watched


class GateCase(NamedTuple):
    """A grouped-query attention layer with a gate per head or per channel, and the shape of its input."""

    name: str
    per: Literal["head", "channel"]
    batch: int = 2
    tokens: int = 8192
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16

    def layer(self, place: Target, gate: Gate | None) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            self.width, self.heads, num_kv_heads=self.kv_heads, mask=CAUSAL, gate=gate,
            rope=Rope(self.width // self.heads), backend=place.backend, device=place.device, dtype=self.dtype,
        )  # fmt: skip


GATES = (GateCase("head gate", "head"), GateCase("channel gate", "channel"))


class Beside(nn.Module):
    """A layer without a gate, and beside it the projection that a gate reads."""

    def __init__(self, gated: GroupedQueryAttention, plain: GroupedQueryAttention):
        super().__init__()
        self.layer, self.g_proj = plain, gated.g_proj
        plain.load_state_dict(gated.state_dict(), strict=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.g_proj(x)


def rows(place: Target, tables: Sequence[Table], work: Iterable[GateCase] = GATES) -> Rows:
    """Compare each layer with a gate and without; both multiply the input by the weight of the gate."""
    for case in work:
        with watched(f"{tables[0].name}, {case.name}"):
            cells = training(place, case)
        place.tidy()
        yield tables[0], Line(case.name, {name: attempt(lambda x: x * 1e3, x) for name, x in cells.items()})


def training(place: Target, case: GateCase, compile: Callable = torch.compile) -> Cells:
    """Return the seconds of forward and backward, compiled, if outputs and gradients equal those of eager."""
    gated = case.layer(place, Gate(case.per))
    layers = {"with the gate": gated, "without": Beside(gated, case.layer(place, None))}
    x = torch.randn(case.batch, case.tokens, case.width, device=place.device, dtype=case.dtype)
    x.requires_grad_()
    timed = {}
    for name, layer in layers.items():
        runs = {name: partial(step, compile(layer), layer, x), "eager": partial(step, layer, layer, x)}
        timed[name] = agreeing(runs, lambda run: run())[name]
    # With three rounds, the cost of a gate, about 2 %, varies by 1 % (H200, 2026-11).
    return in_turns(timed, place.seconds, max(12, place.rounds), place.budget)


def step(call: Callable, layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs of a call, and the gradients of its input and of the layer's parameters."""
    found = call(x)
    outputs = found if isinstance(found, tuple) else (found,)
    leaves = [x, *layer.parameters()]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, outputs)]
