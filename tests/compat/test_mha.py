"""The door of nn.MultiheadAttention, against a walk over all its options, and inside nn.Transformer."""

import pickle
import re
import warnings
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature

import pytest
import torch
from helpers import assert_close
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_helpers import INTERPRETED
from layer_helpers import assert_twice_as_good
from torch import nn

from attnlib import explain
from attnlib.compat import mha
from attnlib.layers import padding

B, S, T = 2, 5, 7
KEYS = ("none", "nothing", "right", "left", "holes", "a whole sequence", "added")
PAIRS = ("none", "hidden", "hidden of heads", "infinite", "infinite of heads", "added", "added of heads")
CAUSAL = "causal", "promised"  # without and with is_causal=True
ALIKE = "", "kv", "qk", "qkv"  # which inputs are one tensor
KINDS = torch.bool, torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def hidden_keys(name: str, b: int, t: int) -> torch.Tensor | None:
    """A padding mask, True for padding; ``added`` is a bias for each key."""
    if name == "none":
        return None
    if name == "added":
        return torch.randn(b, t, dtype=torch.float64, requires_grad=True)
    at = torch.arange(t).expand(b, t)
    named = {"nothing": at < 0, "right": at > t // 2, "left": at < t // 2, "holes": at % 3 == 1}
    hidden = named.get(name, at >= 0).clone()
    hidden[1:] = False  # only the first sequence has padding
    return hidden


def hidden_pairs(name: str, bh: int, s: int, t: int) -> torch.Tensor | None:
    """A mask of pairs for all heads or for each; some rows of a mask hide all keys."""
    if name == "none":
        return None
    shape = (bh, s, t) if name.endswith("of heads") else (s, t)
    hidden = (torch.rand(shape) < 0.4) | (torch.rand(shape[:-1])[..., None] < 0.2)
    if name.startswith("hidden"):
        return hidden
    bias = torch.randn(shape, dtype=torch.float64) if name.startswith("added") else hidden.double()
    return bias.masked_fill(hidden, -torch.inf).requires_grad_(name.startswith("added"))


def as_kind(mask: torch.Tensor | None, kind: torch.dtype) -> torch.Tensor | None:
    """A bool mask as torch's layers pass it on: 0 or -inf in floats."""
    if mask is None or mask.dtype != torch.bool or kind == torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=kind).masked_fill(mask, -torch.inf)


def drawn_module(draw, alike: str) -> nn.MultiheadAttention:
    """A module whose widths permit inputs that are one tensor, such as key and value for "kv"."""
    heads = draw(st.integers(1, 3))
    widths = st.sampled_from((None, 8 * heads, *(() if "q" in alike else (10, 6))))
    flags = ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    options = {name: draw(st.booleans()) for name in flags}
    options["kdim"] = draw(widths)
    options["vdim"] = options["kdim"] if alike == "kv" else draw(widths)
    module = nn.MultiheadAttention(8 * heads, heads, **options, dtype=torch.float64)
    for name, x in module.named_parameters():
        if "bias" in name:  # torch's are 0 at first
            nn.init.normal_(x)
    return module.train(draw(st.booleans()))


def drawn_inputs(draw, module: nn.MultiheadAttention, alike: str, lengths) -> tuple[list, tuple]:
    """Query, key and value, with a batch or without, and their sizes."""
    b, s, t = draw(st.sampled_from((3, 2, 1, None))), draw(lengths), draw(lengths)
    t = s if "q" in alike else t

    def made(tokens: int, width: int) -> torch.Tensor:
        shape = (b, tokens, width) if module.batch_first else (tokens, b, width)
        shape = (tokens, width) if b is None else shape
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    query, key = made(s, module.embed_dim), made(t, module.kdim)
    value = made(t, module.vdim)
    chosen = {
        "qkv": [query] * 3,
        "qk": [query, query, value],
        "kv": [query, key, key],
        "": [query, key, value],
    }
    return chosen[alike], (b, s, t)


def drawn_masks(draw, module: nn.MultiheadAttention, sizes: tuple, pairs: str, names=KEYS) -> dict:
    b, s, t = sizes
    keys = as_kind(hidden_keys(draw(st.sampled_from(names)), b or 1, t), draw(st.sampled_from(KINDS)))
    if keys is not None:
        keys = keys.detach() if b else keys.detach()[0]
        keys.requires_grad_(keys.is_floating_point() and draw(st.booleans()))
    if pairs in CAUSAL:
        mask = as_kind(torch.ones(s, t, dtype=torch.bool).triu(1), draw(st.sampled_from(KINDS)))
        return {"key_padding_mask": keys, "attn_mask": mask, "is_causal": pairs == "promised"}
    return {"key_padding_mask": keys, "attn_mask": hidden_pairs(pairs, (b or 1) * module.num_heads, s, t)}


@contextmanager
def calls_of_attention():
    """The calls that a module makes meanwhile."""
    calls, attend = [], mha.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mha, "attend", lambda call, name: (calls.append(call), attend(call, name))[1])
        yield calls


def largest_score(call) -> float:
    scores = torch.einsum("bshd,bthd->bhst", call.q, call.k).detach() * call.q.shape[-1] ** -0.5
    for bias in call.score.function.tensors if call.score.function else ():
        scores = scores + bias.detach()
    return float(scores[scores.isfinite()].abs().amax())


def run(module: nn.Module, inputs: list, masks: dict, *, need_weights=False) -> dict[str, torch.Tensor]:
    """The output, and the gradients of inputs, parameters and masks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        out, weights = module(*inputs, **masks, need_weights=need_weights)
    assert (weights is None) == (not need_weights)
    named = dict(module.named_parameters()) | {f"input {n}": x for n, x in enumerate(inputs)}
    named |= {name: x for name, x in masks.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    seed = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=seed, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, [*named.values()], weights, allow_unused=True)
    return {"out": out.detach()} | {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(named.items(), grads, strict=True)
    }


def low(x: object) -> object:
    """The same module, tensor or option in fp32."""
    if isinstance(x, nn.Module):
        return deepcopy(x).float()
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.detach().float().requires_grad_(x.requires_grad)


def is_refused(module: nn.MultiheadAttention, masks: dict[str, object]) -> bool:
    return bool(masks.get("is_causal")) and (module.bias_k is not None or module.add_zero_attn)


@pytest.mark.parametrize("alike", ALIKE)
@pytest.mark.parametrize("pairs", [*PAIRS, *CAUSAL])
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 999))
def test_a_walk_over_all_options(alike, pairs, data, seed):
    """The output and all gradients agree in fp64, or the call is refused by name."""
    torch.manual_seed(seed)
    theirs = drawn_module(data.draw, alike)
    inputs, sizes = drawn_inputs(data.draw, theirs, alike, st.integers(1, 9))
    masks = drawn_masks(data.draw, theirs, sizes, pairs)
    ours = mha.from_torch(theirs)
    if is_refused(theirs, masks):
        with pytest.raises(NotImplementedError, match="is_causal: expected False with add_bias_kv"):
            ours(*inputs, **masks, need_weights=False)
        return
    expected, found = run(theirs, inputs, masks), run(ours, inputs, masks)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("pairs", [*PAIRS, *CAUSAL])
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 999))
def test_weights_are_torchs(pairs, average, data, seed):
    """In evaluation and in training without dropout; torch's are NaN for queries that see no key."""
    torch.manual_seed(seed)
    theirs = drawn_module(data.draw, "")
    inputs, sizes = drawn_inputs(data.draw, theirs, "", st.integers(1, 9))
    masks = drawn_masks(data.draw, theirs, sizes, pairs)
    assume(not is_refused(theirs, masks))
    options = masks | {"need_weights": True, "average_attn_weights": average}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        expected = theirs(*inputs, **options)
    out, weights = mha.from_torch(theirs)(*inputs, **options)
    assert weights.shape == expected[1].shape
    assert weights.dtype == expected[1].dtype
    seen = ~expected[1].isnan()
    torch.testing.assert_close(weights[seen], expected[1][seen], **EXACT)
    assert average or not weights[~seen].any()
    known = ~expected[0].isnan()
    torch.testing.assert_close(out[known], expected[0][known], **EXACT)


def test_weights_are_those_before_dropout_and_have_no_gradient():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    ours, x = mha.from_torch(theirs), torch.randn(2, 5, 8)
    out, weights = ours(x, x, x)
    torch.testing.assert_close(weights, theirs.eval()(x, x, x)[1])
    out.sum().backward()
    with pytest.raises(NotImplementedError, match="attention weights: expected no gradient"):
        (out.detach().sum() + weights.square().sum()).backward()
    with torch.no_grad():
        assert not ours(x, x, x)[1].requires_grad
    compiled = torch.compile(ours.eval(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x)[1], weights)


def test_weights_under_autocast_have_the_dtype_of_the_output():
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    ours, x = mha.from_torch(theirs), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        weights, reference = ours(x, x, x)[1], theirs(x, x, x)[1]
    assert weights.dtype == reference.dtype == torch.bfloat16
    truth = theirs(x, x, x)[1].detach()
    assert_twice_as_good({"weights": weights}, {"weights": reference}, {"weights": truth})


@pytest.mark.parametrize("alike", ALIKE)
@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 999))
def test_precision(alike, data, seed):
    """In fp32, errors against fp64 are at most twice torch's, and three times for gradients."""
    torch.manual_seed(seed)
    theirs = drawn_module(data.draw, alike)
    inputs, sizes = drawn_inputs(data.draw, theirs, alike, st.integers(33, 65))
    some = [name for name in KEYS if name != "a whole sequence"]  # gradients may be exactly 0
    masks = drawn_masks(data.draw, theirs, sizes, data.draw(st.sampled_from((*PAIRS, *CAUSAL))), some)
    assume(not is_refused(theirs, masks))
    with calls_of_attention() as calls:
        run(mha.from_torch(theirs), inputs, masks)
    truth, theirs = run(theirs, inputs, masks), low(theirs)
    made = {id(x): low(x) for x in inputs}
    inputs, masks = [made[id(x)] for x in inputs], {name: low(x) for name, x in masks.items()}
    ours = run(mha.from_torch(theirs), inputs, masks)
    orders = (run(theirs, inputs, masks, need_weights=x) for x in (False, True))
    naive = [x for x in orders if not x["out"].isnan().any()]  # with weights, rows without keys are NaN
    noise = torch.finfo(torch.float32).eps * (1 + 2 * largest_score(*calls))
    for name, x in ours.items():
        few = name in ("bias_k", "key_padding_mask")  # add up all rows with cancellation, as sinks do
        factor = 6 if few else 2 if name == "out" else 3
        each = [side[name] for side in naive]
        assert_close(name, x, each, truth[name], factor, 32 * noise if few else noise)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", KEYS[:-1])
def test_padding_without_holes_becomes_bounds(keys, kind):
    """Also of 0 and -inf in floats, as nn.TransformerEncoderLayer makes it."""
    ours, x = mha.from_torch(nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(B, T, 8)
    with calls_of_attention() as calls:
        ours(x, x, x, key_padding_mask=as_kind(hidden_keys(keys, B, T), kind), need_weights=False)
    (call,) = calls
    assert call.score.function is None
    assert (call.key_ends is None) == (keys in ("none", "nothing", "holes"))
    assert (type(call.mask) is not padding.MaskFunction) == (keys != "holes")


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_is_for_training(p):
    theirs = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)
    ours, x = mha.from_torch(theirs), torch.randn(2, 64, 8)
    outs = [ours(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert torch.equal(*outs) == (p == 0)
    expected, _ = theirs.eval()(x, x, x, need_weights=False)
    torch.testing.assert_close(ours.eval()(x, x, x, need_weights=False)[0], expected)
    kept = torch.stack([ours.train()(x, x, x, need_weights=False)[0] for _ in range(200)]).mean(0)
    torch.testing.assert_close(kept, expected, rtol=0, atol=0.1)


def test_dropout_of_everything_is_refused():
    ours, x = mha.from_torch(nn.MultiheadAttention(8, 2, dropout=1.0)), torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match=r"dropout_p: expected a probability in \[0, 1\), got 1.0"):
        ours(x, x, x, need_weights=False)


def test_autocast():
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    ours, x, bias = mha.from_torch(theirs), torch.randn(2, 9, 16), torch.randn(9, 9)
    expected, _ = theirs(x, x, x, attn_mask=bias, need_weights=False)
    with torch.autocast("cpu", torch.bfloat16):
        options = {"attn_mask": bias, "need_weights": False}
        mine, reference = ours(x, x, x, **options)[0], theirs(x, x, x, **options)[0]
    assert mine.dtype == reference.dtype == torch.bfloat16
    assert_twice_as_good({"out": mine}, {"out": reference}, {"out": expected.detach()})


@pytest.mark.parametrize(
    ("keys", "pairs", "kind"),
    [
        ("none", "none", torch.bool),
        ("right", "causal", torch.bool),
        ("right", "causal", torch.float64),
        ("holes", "hidden of heads", torch.bool),
        ("added", "added", torch.float64),
    ],
)
def test_compile(keys, pairs, kind):
    """Without graph breaks, with the same outputs and gradients."""
    torch._dynamo.reset()
    ours = mha.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=pairs == "none", dtype=torch.float64))
    x = torch.randn(T, B, 8, dtype=torch.float64, requires_grad=True)
    masks = {"key_padding_mask": as_kind(hidden_keys(keys, B, T), kind), "is_causal": pairs == "causal"}
    causal = as_kind(torch.ones(T, T, dtype=torch.bool).triu(1), kind)
    masks["attn_mask"] = causal if pairs == "causal" else hidden_pairs(pairs, 2 * B, T, T)
    expected = run(ours, [x, x, x], masks)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for name, value in run(compiled, [x, x, x], masks).items():
        torch.testing.assert_close(value, expected[name.removeprefix("_orig_mod.")], **EXACT)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("keys", "pairs"),
    [
        ("none", "infinite of heads"),
        ("right", "hidden"),
        ("holes", "added of heads"),
        ("a whole sequence", "none"),
        ("added", "added"),
    ],
)
def test_kernels(keys, pairs):
    theirs = nn.MultiheadAttention(32, 2, batch_first=True, dtype=torch.float64)
    inputs = [torch.randn(B, T, 32, dtype=torch.float64, requires_grad=True)] * 3
    masks = {"key_padding_mask": hidden_keys(keys, B, T), "attn_mask": hidden_pairs(pairs, 2 * B, T, T)}
    truth, theirs = run(theirs, inputs, masks), low(theirs)
    inputs, masks = [low(inputs[0])] * 3, {name: low(x) for name, x in masks.items()}
    sides = [run(x, inputs, masks) for x in (mha.from_torch(theirs, backend="triton"), theirs)]
    assert_twice_as_good(*sides, truth, factor=3)


# ---- inside torch's own modules


def replaced(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model with attnlib's attention and a copy with torch's; both count the calls of each attention."""
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(x)
    theirs = deepcopy(model)
    ours = mha.replace(model)
    assert ours is model
    assert not any(type(x) is nn.MultiheadAttention for x in ours.modules())
    return ours, theirs


def agree(sides: tuple[nn.Module, nn.Module], inputs: tuple, masks: dict, *, at=..., grad: bool = True):
    """Outputs agree at some places, and all gradients if they are asked for."""
    inputs = [x.detach().requires_grad_(grad) for x in inputs]
    runs = []
    for side in sides:
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.filterwarnings("ignore", "Support for mismatched|The PyTorch API of nested")
            out = side(*inputs, **masks)[at]
        of = [*inputs, *side.parameters()]
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        runs.append((out, *(torch.autograd.grad(out, of, seed) if grad else ())))
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def count_calls(model: nn.Module) -> list[str]:
    """The names of attention modules, one more for each call."""
    called = []
    for name, x in model.named_modules():
        if isinstance(x, mha.MultiheadAttention):
            forward = x.forward
            x.forward = lambda *args, f=forward, n=name, **options: (called.append(n), f(*args, **options))[1]
    return called


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_encoder_layer(bias, batch_first, norm_first, training, grad):
    """In evaluation without gradients too, where torch's fast path would read the weights."""
    options = {"dropout": 0.0, "bias": bias, "batch_first": batch_first, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options, dtype=torch.float64).train(training)
    sides, x = replaced(layer), torch.randn(B, T, 16, dtype=torch.float64)
    called, given = count_calls(sides[0]), x if batch_first else x.transpose(0, 1)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for masks in (
        {},
        {"src_mask": causal},
        {"src_mask": causal, "is_causal": True},
        {"src_key_padding_mask": hidden_keys("right", B, T)},
        {"src_key_padding_mask": hidden_keys("right", B, T), "src_mask": causal, "is_causal": True},
        {"src_key_padding_mask": hidden_keys("holes", B, T), "src_mask": hidden_pairs("hidden", 1, T, T)},
    ):
        seen = torch.ones(B, T, dtype=torch.bool)
        if "src_mask" in masks and "is_causal" not in masks:  # the fast path gives NaN to rows without keys
            rows = masks["src_mask"] | masks.get("src_key_padding_mask", torch.zeros(B, T) > 0)[:, None]
            seen = ~rows.all(-1) if "src_key_padding_mask" in masks else (~rows.all(-1)).expand(B, T)
        agree(sides, (given,), masks, at=seen if batch_first else seen.T, grad=grad)
    assert called == ["self_attn"] * 6


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_decoder_layer(batch_first, training, grad):
    options = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    sides = replaced(nn.TransformerDecoderLayer(16, 4, 32, **options).train(training))
    x, memory = torch.randn(B, S, 16, dtype=torch.float64), torch.randn(B, T, 16, dtype=torch.float64)
    inputs = [y if batch_first else y.transpose(0, 1) for y in (x, memory)]
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    called = count_calls(sides[0])
    for masks in (
        {},
        {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": hidden_keys("right", B, T)},
        {"tgt_mask": causal, "tgt_key_padding_mask": hidden_keys("right", B, S)},
        {"memory_mask": hidden_pairs("added of heads", 4 * B, S, T)},
        {"memory_mask": torch.ones(S, T, dtype=torch.bool).triu(1), "memory_is_causal": True},
    ):
        agree(sides, inputs, masks, grad=grad)
    assert called == ["self_attn", "multihead_attn"] * 5


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer(batch_first, training, grad):
    """With the masks of a translation model; torch's encoder sets what it computes for padding to 0."""
    options = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        model = nn.Transformer(16, 4, 2, 2, 32, **options).train(training)
    sides = replaced(model)
    source, target = torch.randn(B, T, 16, dtype=torch.float64), torch.randn(B, S, 16, dtype=torch.float64)
    inputs = [x if batch_first else x.transpose(0, 1) for x in (source, target)]
    padding, of_target = hidden_keys("right", B, T), hidden_keys("right", B, S)
    causal = nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64)
    called = count_calls(sides[0])
    for masks in (
        {},
        {"tgt_mask": causal},
        {"tgt_mask": causal, "tgt_key_padding_mask": as_kind(of_target, torch.float64)},
        {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": causal > 0},
    ):
        agree(sides, inputs, masks, grad=grad)
    assert len(called) == 4 * 6
    if not training and not grad:
        tokens = ~padding if batch_first else ~padding.T
        encoders = [x.encoder for x in sides]
        agree(encoders, inputs[:1], {"src_key_padding_mask": padding}, at=tokens, grad=False)


def test_nested_tensors_are_refused():
    """A swap by hand leaves an encoder's nested tensors on; the error names the way out."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    for x in encoder.layers:
        x.self_attn = mha.from_torch(x.self_attn)
    x, hidden = torch.randn(B, T, 16), hidden_keys("right", B, T)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested")
        with pytest.raises(TypeError, match=r"query: .* got a nested one; .*use_nested_tensor"):
            encoder(x, src_key_padding_mask=hidden)
        encoder.use_nested_tensor = False
        encoder(x, src_key_padding_mask=hidden)


def test_a_model_trains_on_after_replacement():
    """An optimizer made before, and state dicts of both, fit both."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs = deepcopy(model)
    steps = [torch.optim.AdamW(x.parameters(), lr=0.01) for x in (model, theirs)]
    ours, x = mha.replace(model), torch.randn(B, T, 16, dtype=torch.float64)
    for _ in range(3):
        for side, step in zip((ours, theirs), steps, strict=True):
            step.zero_grad()
            (side(x) - x.flip(1)).square().mean().backward()
            step.step()
    for (name, a), (other, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    fresh = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64)
    fresh.load_state_dict(ours.state_dict())
    mha.replace(fresh).load_state_dict(theirs.state_dict())
    torch.testing.assert_close(fresh.eval()(x), theirs.eval()(x), **EXACT)


def test_the_replacement_is_a_module_like_torchs():
    theirs = nn.MultiheadAttention(8, 2, kdim=6, add_bias_kv=True, bias=False, batch_first=True).eval()
    seen = []
    theirs.register_forward_hook(lambda *_: seen.append("hook"))
    ours = mha.from_torch(theirs)
    assert not ours.training
    assert [*map(id, ours.parameters())] == [*map(id, theirs.parameters())]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert list(signature(ours.forward).parameters) == list(signature(theirs.forward).parameters)
    x, key = torch.randn(2, 5, 8), torch.randn(2, 3, 6)
    inputs = (x, key, torch.randn(2, 3, 8))
    expected, _ = ours(*inputs, need_weights=False)
    assert seen == ["hook"]
    theirs.register_parameter("later", nn.Parameter(torch.zeros(1)))
    assert not hasattr(ours, "later")
    del ours._forward_hooks[next(iter(ours._forward_hooks))]  # a local function cannot be pickled
    for copied in (deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(copied(*inputs, need_weights=False)[0], expected)
    shown = "8, 2, batch_first=True, kdim=6, add_bias_kv=True, bias=False"
    assert shown in repr(ours)


def test_shared_modules_stay_shared():
    shared = nn.MultiheadAttention(8, 2)
    model = mha.replace(nn.ModuleList([shared, nn.ModuleDict({"again": shared}), nn.Linear(2, 2)]))
    assert type(model[0]) is mha.MultiheadAttention
    assert model[0] is model[1]["again"]
    assert type(mha.replace(nn.MultiheadAttention(8, 2))) is mha.MultiheadAttention


def test_a_backend_is_passed_on():
    x = torch.randn(3, 2, 8)
    options = {"need_weights": False}
    ours = mha.from_torch(nn.MultiheadAttention(8, 2))
    assert explain(ours, x, x, x, **options).chosen == "torch"
    ours = mha.replace(nn.ModuleList([nn.MultiheadAttention(8, 2)]), backend="reference")[0]
    assert explain(ours, x, x, x, **options).chosen == "reference"
    assert "backend=reference" in repr(ours)


def test_a_promise_of_causality_is_checked_on_demand(monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")
    ours, x = mha.from_torch(nn.MultiheadAttention(8, 2)), torch.randn(5, 2, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for mask in (causal, as_kind(causal, torch.float32), causal.expand(4, 5, 5)):
        ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
    for mask in (~causal, causal.double(), as_kind(causal, torch.float32) + 1, causal.triu(2)):
        with pytest.raises(ValueError, match=r"attn_mask: expected a causal mask .* got another mask"):
            ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)


X, Y = torch.randn(S, B, 8), torch.randn(T, B, 8)
INT, VALUE, TYPE = torch.int32, ValueError, TypeError


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": 3}, TYPE, r"query: expected a tensor, got int"),
        ({"query": X[0, 0]}, VALUE, r"query: expected \[s, b, m\], got \(8,\)"),
        ({"query": X[..., :6]}, VALUE, r"query: expected \[s=5, b=2, m=8\], got \(5, 2, 6\)"),
        ({"key": Y[:6]}, VALUE, r"value: expected \[t=6, b=2, v=8\], got \(7, 2, 8\)"),
        ({"value": Y[:, :1]}, VALUE, r"value: expected \[t=7, b=2, v=8\], got \(7, 1, 8\)"),
        ({"query": X[:, 0]}, VALUE, r"key: expected \[t, k\], got \(7, 2, 8\)"),
        ({"query": X.to_sparse()}, TYPE, r"query: expected a strided tensor"),
        ({"key_padding_mask": torch.ones(B, S)}, VALUE, r"key_padding_mask: .* \(2, 7\), got \(2, 5\)"),
        ({"key_padding_mask": torch.ones(B, T, dtype=INT)}, TYPE, r"key_padding_mask: .* of bools or floats"),
        (
            {"attn_mask": torch.ones(T, S)},
            VALUE,
            r"attn_mask: expected \(5, 7\) or \(4, 5, 7\), got \(7, 5\)",
        ),
        ({"attn_mask": torch.ones(B, S, T)}, VALUE, r"attn_mask: expected .* got \(2, 5, 7\)"),
        (
            {"attn_mask": torch.ones(S, T, dtype=INT)},
            TYPE,
            r"attn_mask: expected a tensor of bools or floats",
        ),
        ({"is_causal": True}, VALUE, r"attn_mask: expected a causal mask with is_causal=True, as in torch"),
        ({"mask": None}, TYPE, r"mask: no such argument; use attn_mask="),
    ],
)
def test_what_a_call_refuses(change, error, message):
    ours = mha.from_torch(nn.MultiheadAttention(8, 2))
    with pytest.raises(error, match=message):
        ours(**({"query": X, "key": Y, "value": Y, "need_weights": False} | change))


def test_what_is_not_replaced():
    class Own(nn.MultiheadAttention):
        pass

    with pytest.raises(TypeError, match=r"module: expected an nn.MultiheadAttention, got Linear"):
        mha.from_torch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got Own; a subclass may compute something else"):
        mha.replace(nn.ModuleList([Own(8, 2)]))
    with pytest.raises(
        ValueError, match=re.escape("model: expected one with nn.MultiheadAttention, got Lin")
    ):
        mha.replace(nn.Linear(2, 2))
