"""QK-clip multiplies the products of each head by g, and changes nothing else that a layer computes; what is
recorded are the largest products of visible pairs.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_helpers import HIDDEN, grouped, latent
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from attnlib import CAUSAL, QueryTemperature, mask_mod, scores, sliding
from attnlib.qk_clip import QKClip, clip_

LAYERS = {
    "mha": lambda: grouped(4, bias=True),
    "gqa": lambda: grouped(2, bias=("q_proj", "k_proj")),
    "mqa": lambda: grouped(1, bias=("q_proj",)),
    "values of keys": lambda: grouped(2, values="keys", bias=True),
    "shared keys": lambda: grouped(2, own_keys=False, bias=True),
    "mla": latent,
    "mla, q_lora": lambda: latent(q_lora_rank=7, bias=True),
    "mla, no rope": lambda: latent(rope=False),
    "mla, shared keys": lambda: latent(own_keys=False),
}
X = torch.randn(2, 9, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ANGLES = torch.arange(9)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]()


def keys_and_values(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The keys and values of X, ``[b, t, h, *]``; those of another layer if this one has none."""
    is_latent = hasattr(layer, "kv_b_proj")
    owner = layer if layer.own_keys else make("mla" if is_latent else "gqa")
    angles = None if layer.rope is None else layer.rope.angles(ANGLES)
    if is_latent:
        return layer.expand(*owner.latent(X, angles))
    return tuple(x.repeat_interleave(4 // x.shape[2], 2) for x in owner.key_value(X, angles))


@torch.no_grad()
def products_and_values(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """``scale * q·k`` of every pair, ``[b, h, s, t]``, and the values."""
    q = layer.query(X, None if layer.rope is None else layer.rope.angles(ANGLES))
    k, v = keys_and_values(layer)
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    return layer.scale * torch.einsum("bshd,bthd->bhst", q, k), v


def group_of(name: str) -> int:
    """How many heads share one factor."""
    return {"gqa": 2, "mqa": 4}.get(name, 1)


def factors(maxima: Tensor, bound: float, name: str) -> Tensor:
    """g of each head, from the largest maximum of the heads that share it."""
    largest = maxima.unflatten(0, (-1, group_of(name))).amax(1).repeat_interleave(group_of(name))
    return torch.tensor([min(1.0, bound / x) if x > 0 else 1.0 for x in largest.tolist()]).double()


@pytest.mark.parametrize("name", LAYERS)
@given(
    maxima=st.lists(st.floats(-10, 1000, width=32), min_size=4, max_size=4),
    bound=st.floats(0.5, 200),
)
def test_products_shrink_by_g_and_values_stay(name, maxima, bound):
    layer, maxima = make(name), torch.tensor(maxima, dtype=torch.float64)
    products, values = products_and_values(layer)
    g = clip_(layer, maxima, bound=bound)
    torch.testing.assert_close(g, factors(maxima, bound, name))
    found, same = products_and_values(layer)
    torch.testing.assert_close(found, products * g[:, None, None], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(same, values, rtol=1e-6 if name == "values of keys" else 0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_the_largest_product_becomes_the_bound(name):
    layer = make(name)
    maxima = products_and_values(layer)[0].amax((0, 2, 3))
    bound = maxima.min().item() / 3
    clip_(layer, maxima, bound=bound)
    after = products_and_values(layer)[0].amax((0, 2, 3))
    assert (after <= bound * (1 + 1e-12)).all()
    torch.testing.assert_close(after.unflatten(0, (-1, group_of(name))).amax(1).max().item(), bound)


def of_megatron(layer: nn.Module, maxima: Tensor, bound: float) -> dict[str, Tensor]:
    """The weights of Megatron-LM's MLASelfAttention.clip_qk with qk_clip_alpha=0.5, from its formula."""
    eta = (bound / maxima).clamp(max=1.0)[:, None, None]
    name = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
    q = getattr(layer, name).weight.detach().clone().unflatten(0, (4, -1))
    kv = layer.kv_b_proj.weight.detach().clone().unflatten(0, (4, -1))
    nope = layer.qk_nope_head_dim
    q[:, :nope] *= eta**0.5
    q[:, nope:] *= eta
    kv[:, :nope] *= eta ** (1 - 0.5)
    return {f"{name}.weight": q.flatten(0, 1), "kv_b_proj.weight": kv.flatten(0, 1)}


@pytest.mark.parametrize("name", ["mla", "mla, q_lora", "mla, no rope"])
def test_latent_layers_are_clipped_as_in_megatron(name):
    layer, maxima = make(name), torch.tensor([3.0, 150.0, 1e4, 99.0], dtype=torch.float64)
    expected = dict(layer.named_parameters()) | of_megatron(layer, maxima, 100.0)
    expected = {key: x.detach().clone() for key, x in expected.items()}
    clip_(layer, maxima)
    for key, x in layer.named_parameters():
        torch.testing.assert_close(x.detach(), expected[key], rtol=1e-14, atol=0, msg=key)


def test_queries_and_keys_of_a_group_shrink_alike():
    """Here the first group by 4, whose root is 2; no other weight changes."""
    layer = make("gqa")
    before = {name: x.detach().clone() for name, x in layer.named_parameters()}
    clip_(layer, torch.tensor([0.0, 400.0, 25.0, 3.0]))
    halved = {"q_proj": 16, "k_proj": 8}  # rows
    for name, x in layer.named_parameters():
        expected = before[name]
        expected[: halved.get(name.split(".")[0], 0)] /= 2
        assert torch.equal(x, expected), name


@pytest.mark.parametrize("maximum", [float("nan"), float("inf"), float("-inf"), 0.0, 100.0])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_these_maxima_clip_nothing(name, maximum):
    layer = make(name)
    before = {key: x.detach().clone() for key, x in layer.named_parameters()}
    assert torch.equal(clip_(layer, torch.full((4,), maximum)), torch.ones(4))
    assert all(torch.equal(x, before[key]) for key, x in layer.named_parameters())


def test_bf16_weights_are_multiplied_in_fp32_and_rounded_once():
    layer = grouped(4, dtype=torch.bfloat16)
    weight = layer.k_proj.weight.detach().clone()
    clip_(layer, torch.full((4,), 300.0))
    assert layer.k_proj.weight.dtype == torch.bfloat16
    expected = (weight.float() * torch.tensor(1 / 3).sqrt()).bfloat16()
    assert torch.equal(layer.k_proj.weight, expected)


def adapted(layer: nn.Module) -> nn.Module:
    layer.k_proj = nn.Sequential(layer.k_proj)
    return layer


def parametrized(layer: nn.Module) -> nn.Module:
    weight_norm(layer.kv_b_proj)
    return layer


REFUSED = {
    "q_norm": (lambda: grouped(2, qk_norm=True), {}, ValueError, r"layer\.q_norm: expected None, got a norm"),
    "another layer": (
        lambda: nn.Linear(4, 4),
        {},
        TypeError,
        r"layer: expected a GroupedQueryAttention or MultiHeadLatentAttention, got Linear",
    ),
    "an adapter": (lambda: adapted(grouped()), {}, ValueError, r"layer\.k_proj: .*16 rows, got Sequential"),
    "parametrized": (lambda: parametrized(latent()), {}, ValueError, r"kv_b_proj: .*remove parametriz"),
    "maxima of a rank": (grouped, {"maxima": torch.ones(2)}, ValueError, r"maxima: expected \[h=4\], got"),
    "no tensor": (grouped, {"maxima": [1.0] * 4}, TypeError, r"maxima: expected a tensor, got list"),
    "ints": (grouped, {"maxima": torch.ones(4).int()}, TypeError, r"maxima: expected fp16, bf16, fp32"),
    "meta": (grouped, {"maxima": torch.ones(4, device="meta")}, ValueError, "maxima: expected device cpu"),
    "bound 0": (grouped, {"bound": 0}, ValueError, r"bound: expected a finite fp32 number above 0, got 0"),
    "bound nan": (grouped, {"bound": float("nan")}, ValueError, r"bound: expected a finite fp32 number"),
    "bound of a huge int": (grouped, {"bound": 10**400}, ValueError, "bound: expected a finite fp32 number"),
    "bound of text": (grouped, {"bound": "100"}, TypeError, r"bound: expected a Python number, got str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused_before_any_change(name):
    made, change, error, message = REFUSED[name]
    layer = made()
    before = {key: x.detach().clone() for key, x in layer.named_parameters()}
    with pytest.raises(error, match=message):
        clip_(layer, **{"maxima": torch.full((4,), 1e3)} | change)
    assert all(torch.equal(x, before[key]) for key, x in layer.named_parameters())


def test_k_norm_alone_is_refused_too():
    layer = grouped()
    layer.k_norm = nn.RMSNorm(8)
    with pytest.raises(ValueError, match=r"layer\.k_norm"):
        clip_(layer, torch.ones(4))


RECORDED = {
    "mha": lambda: grouped(4, bias=True),
    "gqa, window and options": lambda: grouped(2, mask=sliding(3), softcap=0.1, sinks=True, alibi=True),
    "mqa, temperature": lambda: grouped(1, temperature=QueryTemperature(0.5, 4)),
    "gqa, functions": lambda: grouped(
        mask=CAUSAL & mask_mod(lambda b, h, i, j: (i + j + h) % 3 != 0),
        score=scores.distance_bias(torch.randn(4, 5)),
    ),
    "gqa, dropout": lambda: grouped(dropout_p=0.5),
    "mla, expanded": lambda: latent("expanded"),
    "mla, absorbed": lambda: latent("absorbed", q_lora_rank=7),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return RECORDED[name]()


@torch.no_grad()
def largest(layer: nn.Module, x: Tensor = X) -> Tensor:
    """The largest product of each head among the pairs that the mask shows, ``[h]``."""
    tokens = torch.arange(x.shape[1])
    angles = layer.rope.angles(tokens)
    q = layer.query(x, angles, None if layer.temperature is None else tokens)
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    is_latent = hasattr(layer, "kv_b_proj")
    k = layer.expand(*layer.latent(x, angles))[0] if is_latent else layer.key_value(x, angles)[0]
    products = layer.scale * torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(4 // k.shape[2], 2))
    i, j, zero = tokens[:, None], tokens, torch.tensor(0)
    functions = () if layer.mask_tensors is None else (zero, torch.arange(4)[:, None, None])
    shown = layer.mask.visible(*functions, i, j, *(zero for _ in functions[1:]))
    return products.masked_fill(~shown, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_the_largest_visible_product_of_all_microbatches(name):
    layer = made(name)
    qk_clip = QKClip(nn.ModuleDict({"block": layer}), bound=1e9)
    projected = []
    query = layer.q_b_proj if getattr(layer, "q_lora_rank", None) else layer.q_proj
    query.register_forward_hook(lambda *_: projected.append(1))
    expected = torch.maximum(largest(layer), largest(layer, 3 * X[:, :4]))
    projected.clear()
    for x in (X, 3 * X[:, :4]):
        outside = layer.eval()(x)
        with qk_clip.record():
            torch.testing.assert_close(layer(x), outside, rtol=0, atol=0)
            layer.train()(x).sum().backward()
    assert len(projected) == 6, "queries are not projected again"
    layer(100 * X)  # not recorded
    maxima = qk_clip.step()
    assert maxima.keys() == {"block"}
    torch.testing.assert_close(maxima["block"], expected, rtol=1e-12, atol=1e-14)
    assert qk_clip.step()["block"].eq(-torch.inf).all(), "a step forgets what was recorded"


@pytest.mark.parametrize("name", ["mha", "mla, expanded"])
def test_a_step_clips(name):
    layer = made(name)
    qk_clip, before = QKClip(layer, bound=0.01), largest(layer)
    with qk_clip.record():
        layer(X)
    torch.testing.assert_close(qk_clip.step()["model"], before)
    torch.testing.assert_close(largest(layer), before.clamp(max=0.01))


@pytest.mark.parametrize("name", ["gqa, window and options", "mla, expanded"])
def test_packed_and_padded_calls_are_recorded_as_sequences_alone(name):
    layer = made(name)
    found, poisoned = [], torch.full((1, 3, HIDDEN), torch.nan, dtype=torch.float64)
    qk_clip, ends = QKClip(layer), torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    packed = torch.cat((X[0, :5], X[1], poisoned[0]))
    dense = torch.cat((X[:1], poisoned), 1), torch.cat((poisoned, X[1:]), 1)
    there = torch.tensor([[0] * 3 + [1] * 9])
    for x, inputs in (
        (packed, {"cu_seqlens": ends}),
        (dense[0], {"key_ends": torch.tensor([9], dtype=torch.int32)}),
        (dense[1], {"attention_mask": there, "positions": there.cumsum(1) - 1}),
    ):
        with qk_clip.record():
            layer(x, **inputs)
        found.append(qk_clip.step()["model"])
    alone = [torch.maximum(largest(layer, X[:1, :5]), largest(layer, X[1:])), largest(layer, X[:1])]
    for ours, expected in zip(found, [*alone, largest(layer, X[1:])], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_dropout_is_the_same_in_a_record():
    layer, outs = grouped(dropout_p=0.5), []
    for context in (nullcontext(), QKClip(layer).record()):
        torch.manual_seed(1)
        with context:
            outs.append(torch.cat([layer(X), layer(X)]))
    assert torch.equal(*outs)


def test_keys_of_another_layer_are_recorded():
    owner, reader = made("mha"), grouped(4, own_keys=False)
    qk_clip = QKClip(nn.ModuleList((owner, reader)))
    angles = owner.rope.angles(ANGLES)
    keys = owner.key_value(X, angles)
    with qk_clip.record():
        reader(X, keys=keys)
    q = reader.query(X, angles)
    products = reader.scale * torch.einsum("bshd,bthd->bhst", q, keys[0])
    products = products.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    maxima = qk_clip.step()
    torch.testing.assert_close(maxima["1"], products.amax((0, 2, 3)).detach(), rtol=1e-12, atol=1e-14)
    assert maxima["0"].eq(-torch.inf).all()


@pytest.mark.parametrize("name", ["gqa, window and options", "mla, absorbed"])
def test_compiled_and_checkpointed_layers_are_recorded(name):
    layer = made(name)
    expected, qk_clip = largest(layer), QKClip(layer)
    with qk_clip.record():
        checkpoint(layer, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    torch.testing.assert_close(qk_clip.step()["model"], expected, rtol=1e-12, atol=1e-14)
    layer.compile(backend="aot_eager", fullgraph=True)
    for factor in (1, 2, 3):
        with qk_clip.record():
            layer(factor * X).sum().backward()
        found = qk_clip.step()["model"]
        torch.testing.assert_close(found, largest(layer, factor * X), rtol=1e-12, atol=1e-14)


def test_backends_are_what_they_were_after_an_error():
    layer = grouped(backend="torch")
    qk_clip = QKClip(layer)
    with pytest.raises(RuntimeError, match="of a loss"), qk_clip.record():
        raise RuntimeError("of a loss")
    assert layer.backend == "torch"


REFUSED_MODELS = {
    "no layer": (nn.Linear(2, 2), {}, ValueError, "model: expected a module with attention layers, got Lin"),
    "no module": ("model", {}, TypeError, "model: expected an nn.Module, got str"),
    "norms": (nn.ModuleList([grouped(qk_norm=True)]), {}, ValueError, r"0\.q_norm: expected None"),
    "bound": (grouped(), {"bound": -1.0}, ValueError, "bound: expected a finite fp32 number above 0, got -1"),
    "mesh": (grouped(), {"mesh": 2}, TypeError, "mesh: expected a DeviceMesh or None, got int"),
}


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_models_that_cannot_be_clipped_are_refused(name):
    model, options, error, message = REFUSED_MODELS[name]
    with pytest.raises(error, match=message):
        QKClip(model, **options)


def test_heads_that_are_sharded_by_hand_are_refused():
    layer = grouped(1)
    layer.q_proj.register_forward_hook(lambda module, args, out: out[..., :16])  # two heads of four
    with (
        pytest.raises(ValueError, match=r"q_proj: expected all 4 heads, or heads sharded by .* got 2"),
        QKClip(layer).record(),
    ):
        layer(X)


def test_a_step_without_a_record_is_refused():
    with pytest.raises(RuntimeError, match=r"step: expected calls of the model within `with record\(\):`"):
        QKClip(grouped()).step()
