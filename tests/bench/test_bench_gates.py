"""Layers with an output gate, timed beside layers without: on a CPU, and not compiled."""

from functools import partial

import pytest
import torch
from bench_helpers import place

from attnlib import Gate
from attnlib.bench import gates, tables
from attnlib.bench.gates import Beside, GateCase

CASE = GateCase("head gate", "head", 2, 12, 32, 4, 2, torch.float32)
eager = partial(gates.training, compile=lambda layer: layer)


@pytest.mark.parametrize("case", [CASE, CASE._replace(per="channel")], ids=["head", "channel"])
def test_both_layers_are_timed(case):
    assert eager(place(), case) == {"with the gate": 1e-3, "without": 1e-3}


def test_only_the_gate_differs():
    gated, plain = CASE.layer(place(), Gate("head")), CASE.layer(place(), None)
    both, x = Beside(gated, plain), torch.randn(2, 12, 32)
    nothing, product = both(x)
    torch.testing.assert_close(product, x @ gated.g_proj.weight.T)
    torch.nn.init.zeros_(gated.g_proj.weight)  # a gate of 1/2 everywhere
    torch.testing.assert_close(gated(x), nothing / 2)
    assert {name for name, _ in gated.named_parameters()} == {
        name.removeprefix("layer.") for name, _ in both.named_parameters()
    }


def test_a_layer_that_compiles_to_something_else_is_not_timed():
    found = gates.training(place(), CASE, compile=lambda layer: lambda x: layer(2 * x))
    assert all(cell == "agrees with nobody" for cell in found.values())


def test_the_table_is_in_milliseconds():
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "gates"]
    [(_, row)] = gates.rows(place(), [table], [CASE])
    assert row.name == "head gate"
    assert row.cells == {"with the gate": 1.0, "without": 1.0}
