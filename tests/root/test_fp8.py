"""fp8 inputs: what quantize_fp8 makes, what attention gives for it, and what is refused."""

import math

import pytest
import torch
from fp8_cases import E4M3, NONE, assert_fp8, dequantized, quantized
from helpers import assert_same_bits, make, problems
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention,
    attention_with_lse,
    cached_attention,
    cached_attention_with_lse,
    explain,
    quantize_fp8,
    sliding,
    varlen_attention,
    varlen_attention_with_lse,
)
from attnlib.backends.operators import flat, flat_over_view
from attnlib.call.call import Call, checked
from attnlib.dispatch.select import backend_of
from attnlib.fp8 import LARGEST, OF_ZEROS, Descales, rotation

BACKENDS = ("reference", "torch")
BF16_IN_E4M3 = KVLayout.grouped(2, 16, 8, dtype=torch.bfloat16, storage_dtype=E4M3)


def representable(*shape: int) -> torch.Tensor:
    """Random numbers that e4m3 holds."""
    return torch.randn(shape).to(E4M3).float()


def ones(b: int = 2, h: int = 4, g: int = 2) -> dict[str, torch.Tensor]:
    return {"q_descale": torch.ones(b, h), "k_descale": torch.ones(b, g), "v_descale": torch.ones(b, g)}


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


# What quantize_fp8 makes


@given(problems(dims=(1, 5, 16, 96), options=()))
def test_numbers_come_back_within_a_half_step(problem):
    x = quantized(problem)
    steps = (x.q_descale, x.k_descale, x.v_descale)
    for given_, back, scale in zip(problem.tensors, dequantized(x), steps, strict=True):
        allowed = given_.abs() * 2.0**-4 + scale[:, None, :, None] * 2.0**-10
        assert ((back - given_).abs() <= allowed * 1.0001).all()
        assert scale.dtype == torch.float32
        assert (scale >= OF_ZEROS).all()
    assert {t.dtype for t in x[:3]} == {E4M3}


def test_heads_and_sequences_have_their_own_scale():
    """So that a factor on one of them changes no byte, and its own scale alone."""
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 8)
    x, larger = quantize_fp8(q, k, v), q.clone()
    larger[1, :, 2] *= 64
    y = quantize_fp8(larger, k, v)
    assert_same_bits(*zip((t.float() for t in x[:3]), (t.float() for t in y[:3]), strict=True))
    factors = torch.ones(2, 4)
    factors[1, 2] = 64
    assert torch.equal(y.q_descale, x.q_descale * factors)
    assert (x.q.float().abs().amax((1, 3)) == LARGEST).all()


def test_zeros_and_numbers_that_are_not_finite():
    q = torch.zeros(1, 3, 4, 8)
    q[0, :, 1] = torch.randn(3, 8)
    q[0, 1, 2, 3], q[0, 2, 2, 4], q[0, :, 2, 0] = torch.nan, torch.inf, 2.0
    q[0, :, 3] = 1e-40
    x = quantize_fp8(q, q, q)
    assert x.q_descale.isfinite().all()
    assert (x.q[0, :, 0].float() == 0).all()
    assert x.q_descale[0, 0] == x.q_descale[0, 3] == OF_ZEROS
    bad = torch.zeros(1, 3, 4, 8, dtype=torch.bool)
    bad[0, 1, 2, 3] = bad[0, 2, 2, 4] = True
    assert torch.equal(x.q.float().isnan(), bad)
    assert x.q_descale[0, 2] == 2 / torch.tensor(LARGEST)  # the largest that is finite
    out = attention(**quantize_fp8(q * 0, q * 0, q)._asdict(), mask=FULL)
    assert not out[:, :, :2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_and_no_tokens(dtype):
    q, k = torch.randn(2, 5, 4, 8, dtype=dtype), torch.randn(2, 0, 2, 8, dtype=dtype)
    x = quantize_fp8(q, k, k)
    assert x.k.shape == (2, 0, 2, 8)
    assert (x.k_descale == OF_ZEROS).all()
    assert (attention(**x._asdict(), mask=FULL) == 0).all()


@pytest.mark.parametrize("d", [1, 2, 5, 64, 96, 128, 192, 576])
def test_a_rotation_leaves_products_alone(d):
    q, k = torch.randn(2, 9, 4, d), torch.randn(2, 7, 2, d)
    turned, again = (quantize_fp8(q, k, k, incoherent=True) for _ in range(2))
    assert_same_bits(*((a.float(), b.float()) for a, b in zip(turned, again, strict=True)))
    turn = rotation(d, q.device)
    torch.testing.assert_close(turn @ turn.T, torch.eye(d))
    torch.testing.assert_close(
        torch.einsum("bshd,bthd->bhst", q[:, :, :2] @ turn, k @ turn),
        torch.einsum("bshd,bthd->bhst", q[:, :, :2], k),
        rtol=1e-4,
        atol=1e-4,
    )
    main = 1 << (d.bit_length() - 1)
    assert_spread(turn[:main, :main], main)
    assert torch.equal(turned.v.float(), quantize_fp8(q, k, k).v.float())


def assert_spread(turn: torch.Tensor, n: int) -> None:
    """Every channel is spread evenly over all, with signs of which neither kind is rare."""
    torch.testing.assert_close(turn.abs(), torch.full((n, n), n**-0.5))
    if n >= 64:
        assert (turn.sum(0).abs() < 0.6 * n**0.5 * n**0.5).all()


def outliers(*shape: int) -> torch.Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), as in the paper."""
    return torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)


def test_a_rotation_halves_the_error_of_outliers():
    """Where outliers of q and k meet, a score is large, and so is the error of its bytes."""
    q, k, v = outliers(1, 256, 2, 128), outliers(1, 8192, 2, 128), torch.randn(1, 8192, 2, 128)
    stored = dequantized(quantize_fp8(q, k, v))[2]  # no rotation of q and k changes the error of values
    exact = attention(q.double(), k.double(), stored, mask=FULL)
    plain, turned = (
        (attention(**quantize_fp8(q, k, v, incoherent=on)._asdict(), mask=FULL) - exact).norm()
        for on in (False, True)
    )
    assert turned <= plain / 2


def test_packed_is_each_alone():
    lengths_q, lengths_k = (5, 0, 9, 1), (7, 3, 0, 20)
    cu_q, cu_k = offsets(*lengths_q), offsets(*lengths_k)
    q, k, v = torch.randn(17, 4, 16), torch.randn(31, 2, 16), torch.randn(31, 2, 8)
    q[15:] *= torch.inf  # rows of nobody
    x = quantize_fp8(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, incoherent=True)
    packed, lse = varlen_attention_with_lse(**x._asdict(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=CAUSAL)
    assert (packed[15:] == 0).all()
    for n in range(4):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        y = quantize_fp8(q[None, rows], k[None, keys], v[None, keys], incoherent=True)
        assert_same_bits(
            (y.q[0].float(), x.q[rows].float()),
            (y.k[0].float(), x.k[keys].float()),
            (y.v[0].float(), x.v[keys].float()),
            *((a[0], b[n]) for a, b in zip(y[3:], x[3:], strict=True)),
        )
        alone, own = attention_with_lse(**y._asdict(), mask=CAUSAL)
        assert_same_bits((packed[rows], alone[0]), (lse[:, rows], own[0]))


# What attention gives


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems(lengths=(0, 1, 7, 17, 33)))
def test_any_call(backend, problem):
    x = quantized(problem)
    call = {"mask": problem.mask, "backend": backend}
    assert_fp8(problem, x, attention_with_lse(**x._asdict(), **problem.options, **call), of_p=NONE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_descales_of_one_change_nothing(backend):
    q, k, v = representable(2, 9, 4, 16), representable(2, 19, 2, 16), representable(2, 19, 2, 8)
    wide = attention_with_lse(q, k, v, mask=CAUSAL, backend=backend)
    out, lse = attention_with_lse(q.to(E4M3), k.to(E4M3), v.to(E4M3), **ones(), mask=CAUSAL, backend=backend)
    # torch's fused attention, which takes no e4m3, adds up in another order: one step of bf16.
    torch.testing.assert_close(out.float(), wide[0].bfloat16().float(), rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(lse, wide[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_a_factor_may_stand_in_the_bytes_or_in_the_descale(backend, name):
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    halves = (getattr(x, name).float() / 2).to(E4M3)
    whole = (halves.float() * 2).to(E4M3)  # subnormal bytes have lost a bit
    pairs = [
        attention_with_lse(
            **x._replace(
                **{name: value, f"{name}_descale": getattr(x, f"{name}_descale") * factor}
            )._asdict(),
            mask=CAUSAL,
            softcap=3.0,
            backend=backend,
        )
        for value, factor in ((whole, 1), (halves, 2))
    ]
    assert_same_bits(*zip(*pairs, strict=True))


def test_a_factor_on_values_is_one_on_the_output():
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    out, more = (
        attention(**x._replace(v_descale=x.v_descale * factor)._asdict(), mask=sliding(4))
        for factor in (1, 4)
    )
    assert_same_bits((4 * out, more))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "layout",
    [BF16_IN_E4M3, KVLayout.latent(16, 8, dtype=torch.bfloat16, storage_dtype=E4M3)],
    ids=["grouped", "latent"],
)
def test_over_a_cache_q_may_be_bytes(backend, packed, layout):
    """Equal to a call with the same numbers in bf16, a factor of each head apart."""
    counts = (3, 1)
    cache = KVCache.paged([layout], pages=16, page_size=4, max_sequences=2)
    first, second = cache.admit(2)
    for tokens in ((11, 5), counts):
        total = sum(tokens)
        with cache.step({first: tokens[0], second: tokens[1]}) as (kv,):
            if layout.is_latent:
                view = kv.append(*(torch.randn(total, n).bfloat16() for n in (16, 8)))
            else:
                view = kv.append(torch.randn(total, 2, 16).bfloat16(), torch.randn(total, 2, 8).bfloat16())
    rows = (4, 4, layout.dim + layout.rope_dim)
    if not packed:
        with cache.read(2) as (kv,):
            view = kv.view()
        rows = (2, 2, 4, layout.dim + layout.rope_dim)
    q = representable(*rows)
    descale = 2.0 ** torch.randint(-2, 3, (2, 4))
    owner = torch.tensor([0, 0, 0, 1]) if packed else torch.arange(2)[:, None].expand(2, 2)
    wide = (q * descale[owner][..., None]).bfloat16()
    call = {"mask": CAUSAL, "sinks": torch.randn(4), "backend": backend}
    found = cached_attention_with_lse(q.to(E4M3), view, q_descale=descale, **call)
    expected = cached_attention_with_lse(wide, view, **call)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-5)


def test_shared_prefixes_are_read_by_each():
    cache = KVCache.paged([BF16_IN_E4M3], pages=32, page_size=4, max_sequences=2, shared_prefixes=1)
    (first,) = cache.admit()
    with cache.step({first: 16}) as (kv,):
        kv.append(torch.randn(16, 2, 16).bfloat16(), torch.randn(16, 2, 8).bfloat16())
    cache.fork(first)
    q, descale = representable(2, 1, 4, 16), torch.rand(2, 4) + 0.5
    with cache.step(1) as (kv,):
        view = kv.append(torch.randn(2, 1, 2, 16).bfloat16(), torch.randn(2, 1, 2, 8).bfloat16())
        assert view.route is not None
        ours = cached_attention(q.to(E4M3), view, mask=CAUSAL, q_descale=descale)
        wide = cached_attention((q * descale[:, None, :, None]).bfloat16(), view, mask=CAUSAL)
        assert explain(cached_attention, q.to(E4M3), view, mask=CAUSAL, q_descale=descale).shared is None
    torch.testing.assert_close(ours, wide, rtol=2.0**-6, atol=1e-2)


# What torch sees


def test_the_operators():
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 19, 2, 16), torch.randn(2, 19, 2, 8))
    call = Call(x.q, CAUSAL, k=x.k, v=x.v, descales=Descales(x.q_descale, x.k_descale, x.v_descale))
    tests = ("test_faketensor", "test_autograd_registration")  # what tests the schema cannot compare e4m3
    torch.library.opcheck(torch.ops.attnlib.torch_forward.default, flat(checked(call)), test_utils=tests)
    cache = KVCache.contiguous([BF16_IN_E4M3], max_sequences=2, max_length=32)
    cache.admit(2)
    with cache.step(19, replay=True) as (kv,):
        asked = Call(x.q, CAUSAL, kv=kv.view(), descales=Descales(x.q_descale))
        arguments = flat_over_view(checked(asked))
    torch.library.opcheck(torch.ops.attnlib.torch_cached.default, arguments, test_utils=tests)


def test_compiles_to_one_graph():
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v):
        return attention_with_lse(**quantize_fp8(q, k, v, incoherent=True)._asdict(), mask=CAUSAL)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for tokens in (19, 33, 47):
        inputs = [torch.randn(2, tokens, heads, 16) for heads in (4, 2, 2)]
        torch.testing.assert_close(compiled(*inputs), call(*inputs))
    assert counter.frame_count <= 2


def test_mapped_calls():
    x = quantize_fp8(torch.randn(3, 9, 4, 16), torch.randn(3, 9, 2, 16), torch.randn(3, 9, 2, 8))
    together = attention(**x._asdict(), mask=CAUSAL)
    mapped = torch.vmap(
        lambda *y: attention(*y[:3], mask=CAUSAL, **dict(zip(x._fields[3:], y[3:], strict=True)))
    )
    assert_same_bits((mapped(*(t[:, None] for t in x))[:, 0], together))


def test_autocast_leaves_bytes_alone():
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    plain = attention(**x._asdict(), mask=CAUSAL)
    with torch.autocast("cpu", torch.float16):
        assert_same_bits((attention(**x._asdict(), mask=CAUSAL), plain))


def test_shapes_alone():
    q = torch.randn(2, 9, 4, 16, device="meta")
    assert quantize_fp8(q, q, q, incoherent=True).k_descale.shape == (2, 4)


def test_autocast_rounds_no_rotation():
    q = torch.randn(2, 9, 4, 64)
    plain = quantize_fp8(q, q, q, incoherent=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(*zip(quantize_fp8(q, q, q, incoherent=True)[3:], plain[3:], strict=True))


def test_autocast_adds_up_in_fp32():
    """A thousand values of 300 are more than fp16 holds."""
    q, v = torch.zeros(1, 1000, 1, 16), torch.full((1, 1000, 1, 16), 300.0)
    with torch.autocast("cpu", torch.float16):
        assert (attention(q, q, v, mask=FULL, softcap=5.0) == 300).all()


def test_last_dimensions_that_are_not_contiguous():
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    odd = x._replace(
        **{name: getattr(x, name).mT.contiguous().mT for name in ("q", "v", "q_descale", "k_descale")}
    )
    assert_same_bits((attention(**odd._asdict(), mask=CAUSAL), attention(**x._asdict(), mask=CAUSAL)))


# What is refused


def call_with(**changes):
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    return attention(**(x._asdict() | {"mask": CAUSAL} | changes))


def over_cache(q: torch.Tensor, **changes):
    layout = changes.pop("layout", BF16_IN_E4M3)
    cache = KVCache.contiguous([layout], max_sequences=2, max_length=32)
    cache.admit(2)
    with cache.step(9, replay=True) as (kv,):
        return cached_attention(q, kv.view(), mask=CAUSAL, **changes)


BYTES, WIDE = torch.randn(2, 9, 4, 16).to(E4M3), torch.randn(2, 9, 4, 16)
REFUSED = {
    "no descale": (
        lambda: call_with(k_descale=None),
        TypeError,
        "k_descale: fp32 float8_e4m3fn None quantize_fp8()",
    ),
    "fp64": (
        lambda: call_with(v_descale=torch.ones(2, 2).double()),
        TypeError,
        "v_descale: fp32 torch.float64",
    ),
    "a number": (lambda: call_with(q_descale=1.0), TypeError, "q_descale: fp32 float"),
    "a row a head": (lambda: call_with(k_descale=torch.ones(2, 4)), ValueError, "k_descale: g=2 (2, 4)"),
    "another device": (
        lambda: call_with(k_descale=torch.ones(2, 2, device="meta")),
        ValueError,
        "k_descale: device cpu meta",
    ),
    "one for all": (lambda: call_with(q_descale=torch.ones(4)), ValueError, "q_descale: [b, h] (4,)"),
    "bf16": (
        lambda: attention(*[torch.randn(2, 9, 4, 16).bfloat16()] * 3, **ones(g=4), mask=CAUSAL),
        TypeError,
        "q_descale: None torch.bfloat16 float8_e4m3fn quantize_fp8()",
    ),
    "one of three": (
        lambda: call_with(k=torch.randn(2, 9, 2, 16)),
        TypeError,
        "k: float8_e4m3fn float32 quantize",
    ),
    "e5m2": (
        lambda: call_with(q=BYTES.float().to(torch.float8_e5m2)),
        TypeError,
        "q_descale: None float8_e5m2",
    ),
    "cache without": (lambda: over_cache(BYTES), TypeError, "q_descale: fp32 float8_e4m3fn None"),
    "cache of bf16": (
        lambda: over_cache(WIDE, q_descale=torch.ones(2, 4)),
        TypeError,
        "q_descale: None float32",
    ),
    "cache in bf16": (
        lambda: over_cache(
            BYTES, q_descale=torch.ones(2, 4), layout=KVLayout.grouped(2, 16, 8, dtype=torch.bfloat16)
        ),
        TypeError,
        "q: bfloat16 storage_dtype=torch.float8_e4m3fn storage_dtype=None",
    ),
    "cache of fp16": (
        lambda: over_cache(
            BYTES,
            q_descale=torch.ones(2, 4),
            layout=KVLayout.grouped(2, 16, 8, dtype=torch.float16, storage_dtype=E4M3),
        ),
        TypeError,
        "q: dtype=torch.bfloat16 dtype=torch.float16",
    ),
    "a slot too many": (
        lambda: over_cache(BYTES, q_descale=torch.ones(3, 4)),
        ValueError,
        "q_descale: b=2 (3, 4)",
    ),
    "bytes again": (lambda: quantize_fp8(BYTES, WIDE, WIDE), TypeError, "q: fp16 bf16 fp32 float8_e4m3fn"),
    "int8": (lambda: quantize_fp8(WIDE, WIDE.to(torch.int8), WIDE), TypeError, "k: fp16 bf16 fp32 int8"),
    "no tensor": (lambda: quantize_fp8(WIDE, WIDE, None), TypeError, "v: tensor NoneType"),
    "other heads": (lambda: quantize_fp8(WIDE, WIDE, WIDE[:, :, :3]), ValueError, "v: g=4"),
    "half packed": (
        lambda: quantize_fp8(WIDE[0], WIDE[0], WIDE[0], cu_seqlens_q=offsets(9)),
        TypeError,
        "cu_seqlens_k: tensor NoneType",
    ),
    "packed and dense": (
        lambda: quantize_fp8(WIDE, WIDE, WIDE, cu_seqlens_q=offsets(9), cu_seqlens_k=offsets(9)),
        ValueError,
        "q: [s, h, d]",
    ),
    "long offsets": (
        lambda: quantize_fp8(*[WIDE[0]] * 3, cu_seqlens_q=offsets(9).long(), cu_seqlens_k=offsets(9)),
        TypeError,
        "cu_seqlens_q: int32 int64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_the_argument_and_the_remedy(case):
    run, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        run()
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words.split()), caught.value


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("of", ["q", "sinks", "v_descale"])
def test_gradients_are_refused(backend, of):
    q, k, v = (
        torch.randn(2, 9, 4, 16, requires_grad=of == "q"),
        torch.randn(2, 9, 2, 16),
        torch.randn(2, 9, 2, 8),
    )
    given_ = quantize_fp8(q, k, v)._asdict() | {"sinks": torch.randn(4, requires_grad=of == "sinks")}
    given_["v_descale"].requires_grad_(of == "v_descale")
    with pytest.raises(
        NotImplementedError, match=r"fp8 inputs have no backward; wrap .*no_grad\(\), or train in bf16"
    ):
        attention(**given_, mask=CAUSAL, backend=backend)
    with torch.no_grad():
        attention(**given_, mask=CAUSAL, backend=backend)


def test_what_triton_says():
    x = quantize_fp8(torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 8))
    told = explain(attention, **x._asdict(), mask=CAUSAL)
    assert told.chosen == "torch"
    assert told.spec.dtype == E4M3
    spec, triton = told.spec._replace(device="cuda", arch=90), backend_of("triton")
    assert triton.unsupported(spec) == []
    assert triton.unsupported(spec._replace(arch=80)) == [
        "takes fp8 inputs from sm_89 on, got sm_80; use bf16"
    ]
    assert any("no backward" in reason for reason in triton.unsupported(spec._replace(grad=True)))


@pytest.mark.parametrize("kind", ["dense", "varlen", "cached"])
def test_explain_takes_what_the_call_takes(kind):
    q = representable(9, 4, 16)
    if kind == "cached":
        with pytest.raises(TypeError, match="q_descale"):
            over_cache(BYTES)
        return
    cu = offsets(4, 5)
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if kind == "varlen" else {}
    call = varlen_attention if packing else attention
    x = quantize_fp8(*[q if packing else q[None]] * 3, **packing)
    assert explain(call, **x._asdict(), **packing, mask=CAUSAL).spec.kind == kind


@given(st.integers(1, 3), st.sampled_from((1, 8, 24)))
def test_descales_are_those_of_their_sequence(sequences, tokens):
    """Rows of a batch do not see each other's."""
    problem = make(sequences, tokens, tokens, 4, 2, 16, 8)
    x = quantized(problem)
    together = attention(**x._asdict(), mask=CAUSAL)
    for n in range(sequences):
        alone = attention(**{name: t[n : n + 1] for name, t in x._asdict().items()}, mask=CAUSAL)
        torch.testing.assert_close(together[n : n + 1], alone, rtol=2.0**-7, atol=1e-6)
    assert math.isfinite(together.float().sum())
