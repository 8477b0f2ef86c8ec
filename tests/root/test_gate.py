"""Output gates multiply what attention returns, before the output projection."""

import pytest
import torch
from layer_helpers import (
    HIDDEN,
    Stack,
    alone,
    assert_twice_as_good,
    cache_for,
    close,
    feed,
    gradients,
    make,
    tokens,
)
from torch.nn import functional as F

from attnlib import CAUSAL, Gate, GroupedQueryAttention, MultiHeadLatentAttention

KINDS = ("gqa", "mla-expanded", "mla-absorbed")
GATES = (
    Gate("head"),
    Gate("channel", bias=True),
    Gate("head", "softplus", bias=True),
    Gate("channel", "softplus"),
)


def without_gate(layer):
    """The layer without its gate, which returns its heads side by side."""
    kind = "gqa" if isinstance(layer, GroupedQueryAttention) else f"mla-{layer.form}"
    plain = make(kind)
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.o_proj = torch.nn.Identity()
    return plain


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind, gate):
    torch.manual_seed(0)
    layer, x = make(kind, gate=gate), tokens(2, 9)
    heads = without_gate(layer)(x).unflatten(-1, (4, -1))
    factors = F.linear(x, layer.g_proj.weight, layer.g_proj.bias)
    factors = F.softplus(factors) if gate.activation == "softplus" else torch.sigmoid(factors)
    close(layer(x), layer.o_proj((heads * factors.unflatten(-1, (4, -1))).flatten(-2)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_layer_decodes_what_it_computes_at_once(kind):
    model, x = Stack(make(kind, gate=Gate("channel"))), tokens(11)
    for store in (None, torch.int8):
        cache = cache_for(model, store=store, dtype=torch.float64 if store is None else torch.float32)
        model.to(torch.float64 if store is None else torch.float32)
        [handle] = cache.admit(1)
        rows = x.to(model.layers[0].o_proj.weight.dtype)
        got = torch.cat([feed(model, cache, {handle: part})[handle] for part in rows.split([7, 1, 3])])
        tolerance = {"rtol": 1e-10, "atol": 1e-10} if store is None else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(got, alone(model, rows), **tolerance)


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_are_computed_in_fp32(gate, dtype):
    """Output and gradients are as near to fp64 as those of torch's own activation in this dtype."""
    torch.manual_seed(0)
    layer = make("gqa", gate=gate, dtype=dtype)
    exact = make("gqa", gate=gate)
    exact.load_state_dict(layer.state_dict())
    x = tokens(2, 9, dtype=dtype)

    def eager(x):
        heads = without_gate(layer)
        heads = heads.to(dtype)(x).unflatten(-1, (4, -1))
        activation = F.softplus if gate.activation == "softplus" else torch.sigmoid
        return layer.o_proj((heads * activation(layer.g_proj(x)).unflatten(-1, (4, -1))).flatten(-2))

    names = ("out", "x", "g_proj.weight", "o_proj.weight")
    truth = gradients(exact, x.double(), exact)
    ours = gradients(layer, x, layer)
    own = {name: p for name, p in layer.named_parameters() if name.split(".")[0] in ("g_proj", "o_proj")}
    theirs = eager_gradients(own, x, eager)
    assert_twice_as_good(*({name: each[name] for name in names} for each in (ours, theirs, truth)), factor=3)


def eager_gradients(parameters, x, run):
    x = x.detach().requires_grad_()
    out = run(x)
    seeded = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=seeded, dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, [x, *parameters.values()], dout)
    return {"out": out.detach(), "x": found[0]} | dict(zip(parameters, found[1:], strict=True))


def test_a_layer_prints_its_gate():
    assert "gate=Gate(per='head', activation='sigmoid', bias=False)" in repr(make("gqa", gate=Gate("head")))


def test_a_gate_stores_nothing():
    assert make("gqa", gate=Gate("channel")).kv_layout == make("gqa").kv_layout


@pytest.mark.parametrize("kind", [GroupedQueryAttention, MultiHeadLatentAttention])
def test_other_gates_are_refused(kind):
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 0, "v_head_dim": 4}
    options = {"mask": CAUSAL} | (sizes if kind is MultiHeadLatentAttention else {})
    with pytest.raises(
        TypeError, match=r"gate: expected Gate\(\"head\"\), Gate\(\"channel\"\) or None, got 'head'"
    ):
        kind(HIDDEN, 4, gate="head", **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("heads",), ValueError, r"gate.per: expected one of \('head', 'channel'\), got 'heads'"),
        (("head", "relu"), ValueError, "gate.activation: expected one of .*'softplus'.*, got 'relu'"),
        (("head", "sigmoid", 1), TypeError, "gate.bias: expected a bool, got 1"),
    ],
)
def test_wrong_gates_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        Gate(*arguments)
