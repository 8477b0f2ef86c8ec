"""Calls whose forward rounds q, k and v to e4m3: what they compute, their gradients, and what is refused."""

import pytest
import torch
from fp8_cases import E4M3
from helpers import Problem, assert_same_bits, make, problems
from hypothesis import given
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention,
    attention_with_lse,
    cached_attention,
    explain,
    mask_mod,
    quantize_fp8,
    score_mod,
    sliding,
    varlen_attention,
    varlen_attention_with_lse,
)

BACKENDS = ("reference", "torch")
HALVES = (torch.float16, torch.bfloat16)
IN_FP8 = {"compute_dtype": E4M3}


def inputs(s: int = 33, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(2, s, h, d).to(dtype).requires_grad_() for h, d in ((4, 16), (2, 16), (2, 8))]


def gradients(call, tensors: list[Tensor], directions: tuple[Tensor, Tensor], **options) -> list[Tensor]:
    """The results of a call that returns an LSE, and the gradients of its tensors."""
    out, lse = call(*tensors, **options)
    seen = lse > -torch.inf
    loss = (out.float() * directions[0]).sum() + (lse * directions[1])[seen].sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)]


def directions(s: int = 33) -> tuple[Tensor, Tensor]:
    return torch.randn(2, s, 4, 8), torch.randn(2, 4, s)


# Laws


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems(lengths=(0, 1, 7, 17, 33), dtypes=HALVES))
def test_is_the_call_on_quantized_inputs(backend, problem):
    """Only keys and values within the key bounds are quantized; the others stay hidden."""
    (q, k, v), t = problem.tensors, problem.k.shape[1]
    starts, ends = (problem.options.get(name) for name in ("key_starts", "key_ends"))
    inside = torch.ones(len(k), t, dtype=torch.bool)
    inside &= torch.tensor(True) if starts is None else torch.arange(t) >= starts[:, None]
    inside &= torch.tensor(True) if ends is None else torch.arange(t) < ends[:, None]
    x = quantize_fp8(q, *(y.masked_fill(~inside[..., None, None], 0) for y in (k, v)))
    call = {"mask": problem.mask, "backend": backend, **problem.options}
    out, lse = attention_with_lse(**x._asdict(), **call)
    assert_same_bits(*zip(problem.solve(backend=backend, **IN_FP8), (out.to(q.dtype), lse), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_power_of_two_may_stand_in_q_or_in_the_scale(backend):
    (q, k, v), given_ = inputs(), directions()
    call = {"mask": CAUSAL, "backend": backend, **IN_FP8}
    first = gradients(attention_with_lse, [q, k, v], given_, scale=0.25, **call)
    larger = (4 * q).detach().requires_grad_()
    second = gradients(attention_with_lse, [larger, k, v], given_, scale=0.0625, **call)
    second[2] = 4 * second[2]
    assert_same_bits(*zip(first, second, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_are_each_alone(backend):
    """Each sequence has its own scale, and rows after the last one do not matter."""
    cu = torch.tensor([0, 5, 5, 25, 26], dtype=torch.int32)
    q, k, v = (torch.randn(33, h, d).bfloat16() for h, d in ((4, 16), (2, 16), (2, 8)))
    for n in range(4):
        q[cu[n] : cu[n + 1]] *= 2.0**n
    for x in (q, k, v):
        x[26:] = torch.nan
        x.requires_grad_()
    dout, dlse = torch.randn(33, 4, 8), torch.randn(4, 33)
    options = {"mask": CAUSAL, "backend": backend, **IN_FP8}
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    packed = gradients(varlen_attention_with_lse, [q, k, v], (dout, dlse), **options, **packing)
    assert (packed[0][26:] == 0).all()
    assert all((x[26:] == 0).all() for x in packed[2:])
    for n in range(4):
        rows = slice(int(cu[n]), int(cu[n + 1]))
        own = [x.detach()[None, rows].requires_grad_() for x in (q, k, v)]
        out, lse, *grads = gradients(
            attention_with_lse, own, (dout[None, rows], dlse[None, :, rows]), **options
        )
        pairs = [(packed[0][rows], out[0]), (packed[1][:, rows], lse[0])]
        assert_same_bits(*pairs, *((x[rows], y[0]) for x, y in zip(packed[2:], grads, strict=True)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outside", [1e4, torch.nan])
def test_keys_outside_the_bounds_change_nothing(backend, outside):
    tensors, bounds = inputs(), torch.tensor([[3, 30], [0, 17]], dtype=torch.int32).T
    given_ = {"key_starts": bounds[0], "key_ends": bounds[1], "mask": FULL, "backend": backend, **IN_FP8}
    expected = attention(*tensors, **given_)
    for x in tensors[1:]:
        for n, (start, end) in enumerate(bounds.T.tolist()):
            x.data[n, :start] = x.data[n, end:] = outside
    assert_same_bits((attention(*tensors, **given_), expected))


# Gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, sliding(9)], ids=str)
def test_gradients_are_those_of_the_rounded_inputs_at_the_e4m3_output(backend, mask):
    """FlashAttention's formulas in fp64, with the output and LSE of the e4m3 call."""
    (q, k, v), (dout, dlse) = inputs(), directions()
    dout = dout.bfloat16().float()
    out, lse, *found = gradients(
        attention_with_lse, [q, k, v], (dout, dlse), mask=mask, backend=backend, **IN_FP8
    )
    with torch.no_grad():
        x = quantize_fp8(q, k, v)
        wide, keys, values = (
            (y.float() * scale[:, None, :, None]).bfloat16().double()
            for y, scale in zip(x[:3], x.descales, strict=True)
        )
        keys, values = (x.repeat_interleave(2, 2) for x in (keys, values))
        scores = torch.einsum("bshd,bthd->bhst", wide, keys) / 4
        hidden = ~mask.visible(torch.arange(33)[:, None], torch.arange(33))
        p = torch.exp(scores - lse[..., None]).masked_fill(hidden, 0)
        delta = torch.einsum("bshe,bshe->bhs", dout.double(), out.double()) - dlse
        ds = p * (torch.einsum("bshe,bthe->bhst", dout.double(), values) - delta[..., None]) / 4
        expected = [
            torch.einsum("bhst,bthd->bshd", ds, keys),
            torch.einsum("bhst,bshd->bthd", ds, wide).unflatten(2, (2, 2)).sum(3),
            torch.einsum("bhst,bshe->bthe", p, dout.double()).unflatten(2, (2, 2)).sum(3),
        ]
    for grad, exact in zip(found, expected, strict=True):
        assert (grad - exact).norm() <= 2.0**-7 * exact.norm()


@given(problem=problems(lengths=(1, 7, 17, 33), dtypes=HALVES, dims=(8, 16)))
def test_backends_have_the_same_gradients(problem):
    """Gradients of slopes and sinks agree too, also with dropout."""
    given_ = [x.float() for x in problem.directions()]
    ours, theirs = (
        problem.with_gradients(attention_with_lse, *given_, backend=name, **IN_FP8) for name in BACKENDS
    )
    for name, x in ours.items():
        y, rounding = theirs[name].float(), 2.0**-6 if name[0] == "d" else 2.0**-7
        off = (x.float() - y).masked_fill(~y.isfinite(), 0).abs().max() if y.numel() else 0
        assert off <= rounding * y.masked_fill(~y.isfinite(), 0).abs().max() + 1e-4, (problem, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_is_finite_whatever_its_gradients_are(backend):
    """Scores of a million are off by thousands in 16 bits, and exp of that is infinite."""
    q, k, v = ((1000 * x).detach() for x in inputs())
    expected = attention_with_lse(q, k, v, mask=CAUSAL, backend=backend, **IN_FP8)
    found = attention_with_lse(q.requires_grad_(), k, v, mask=CAUSAL, backend=backend, **IN_FP8)
    assert found[0].isfinite().all()
    assert_same_bits(*zip(found, expected, strict=True))


def test_functions_of_indices_learn():
    (q, k, v), bias = inputs(), torch.randn(4, 8, requires_grad=True)
    score = score_mod(lambda score, b, h, i, j, bias: score + bias[h, (i - j) % 8], bias)
    mask = CAUSAL & mask_mod(lambda b, h, i, j: (i + j) % 3 != 1)
    found = []
    for name in BACKENDS:
        out = attention(q, k, v, mask=mask, score=score, backend=name, **IN_FP8)
        found.append(torch.autograd.grad(out.float().sin().sum(), (q, bias)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-6, atol=1e-2)


@pytest.mark.parametrize("d", [64, 128])
def test_errors_are_those_of_the_documentation(d):
    """Errors relative to fp64, for normal inputs: at most 5 % in the output and 6 % in the gradients."""
    wide = [torch.randn(1, 256, h, d, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    given_ = torch.randn(1, 256, 4, d), torch.zeros(1, 4, 256)
    exact = gradients(attention_with_lse, wide, given_, mask=CAUSAL)
    half = [x.detach().bfloat16().requires_grad_() for x in wide]
    found = gradients(attention_with_lse, half, given_, mask=CAUSAL, **IN_FP8)
    for x, y, most in zip(found, exact, (0.05, 0.05, 0.06, 0.06, 0.06), strict=True):
        assert (x - y).norm() <= most * y.norm()


# What torch sees


def test_compiles_to_one_graph():
    counter = CompileCounterWithBackend("aot_eager")

    def loss(q, k, v):
        out, lse = attention_with_lse(q, k, v, mask=CAUSAL, **IN_FP8)
        return (out * out).float().sum() + lse.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for tokens in (19, 33, 47):
        tensors = inputs(tokens)
        ours, theirs = (torch.autograd.grad(f(*tensors), tensors) for f in (compiled, loss))
        assert_same_bits(*zip(ours, theirs, strict=True))
    assert counter.frame_count <= 2


def test_mapped_calls():
    q, k, v = (x.detach()[:, None] for x in inputs())
    mapped = torch.vmap(lambda *x: attention(*x, mask=CAUSAL, **IN_FP8))(q, k, v)
    assert_same_bits((mapped[:, 0], attention(q[:, 0], k[:, 0], v[:, 0], mask=CAUSAL, **IN_FP8)))


def test_calls_of_both_dtypes_are_cached_apart():
    q, k, v = (torch.randn(2, 32, 2, 16).bfloat16() for _ in range(3))
    plain = attention(q, k, v, mask=CAUSAL)
    rounded = attention(q, k, v, mask=CAUSAL, **IN_FP8)
    assert not torch.equal(plain, rounded)
    for _ in range(2):
        pair = attention(q, k, v, mask=CAUSAL), attention(q, k, v, mask=CAUSAL, **IN_FP8)
        assert_same_bits(*zip(pair, (plain, rounded), strict=True))


def test_autocast_makes_halves_of_floats():
    tensors = [x.detach().float() for x in inputs()]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*tensors, mask=CAUSAL, **IN_FP8)
    assert_same_bits((out, attention(*(x.bfloat16() for x in tensors), mask=CAUSAL, **IN_FP8)))


def test_zeros_and_last_dimensions_that_are_not_contiguous():
    q, k, v = (x.detach() for x in inputs())
    assert (attention(0 * q, 0 * k, 0 * v, mask=CAUSAL, **IN_FP8) == 0).all()
    odd = (x.mT.contiguous().mT for x in (q, k, v))
    assert_same_bits((attention(*odd, mask=CAUSAL, **IN_FP8), attention(q, k, v, mask=CAUSAL, **IN_FP8)))


def test_explain_names_it():
    tensors = inputs()
    assert "compute_dtype  float8_e4m3fn" in str(explain(attention, *tensors, mask=CAUSAL, **IN_FP8))
    assert "compute_dtype" not in str(explain(attention, *tensors, mask=CAUSAL))


# What is refused


def call_with(dtype: torch.dtype = torch.bfloat16, **options):
    q = torch.randn(2, 9, 2, 16).to(dtype)
    return attention(q, q, q, **{"mask": CAUSAL, **IN_FP8, **options})


def over_a_cache(**options):
    cache = KVCache.contiguous([KVLayout.grouped(2, 16)], max_sequences=2, max_length=32)
    cache.admit(2)
    with cache.step(9, replay=True) as (kv,):
        return cached_attention(torch.randn(2, 9, 2, 16), kv.view(), mask=CAUSAL, **options)


def packed_with(dtype: torch.dtype):
    q, cu = torch.randn(9, 2, 16).to(dtype), torch.tensor([0, 9], dtype=torch.int32)
    return varlen_attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=CAUSAL, **IN_FP8)


REFUSED = {
    "fp32": (lambda: call_with(torch.float32), TypeError, "q: fp16 bf16 torch.float32 autocast"),
    "fp64": (lambda: call_with(torch.float64), TypeError, "q: fp16 bf16 torch.float64 cast"),
    "packed fp32": (lambda: packed_with(torch.float32), TypeError, "q: fp16 bf16 torch.float32"),
    "e4m3": (lambda: call_with(E4M3), TypeError, "compute_dtype: None leave it out"),
    "descales": (
        lambda: call_with(q_descale=torch.ones(2, 2)),
        TypeError,
        "q_descale: None torch.bfloat16 quantize_fp8()",
    ),
    "a string": (lambda: call_with(compute_dtype="e4m3"), TypeError, "compute_dtype: float8_e4m3fn 'e4m3'"),
    "a list": (lambda: call_with(compute_dtype=[E4M3]), TypeError, "compute_dtype: float8_e4m3fn list"),
    "bf16": (
        lambda: call_with(compute_dtype=torch.bfloat16),
        ValueError,
        "compute_dtype: float8_e4m3fn bfloat16 cast",
    ),
    "e5m2": (
        lambda: call_with(compute_dtype=torch.float8_e5m2),
        ValueError,
        "compute_dtype: float8_e4m3fn float8_e5m2",
    ),
    "a cache": (lambda: over_a_cache(**IN_FP8), TypeError, "compute_dtype: storage_dtype= q_descale="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_the_argument_and_the_remedy(case):
    run, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        run()
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words.split()), caught.value


def test_dropout_drops_the_same_weights():
    """Forward and backward drop the same weights: values of 1 give the sums of those retained."""
    q, k, v = inputs()
    ones, seed = torch.ones_like(v).requires_grad_(), torch.tensor([7])
    problem = Problem(q.detach(), k.detach(), ones.detach(), CAUSAL)
    call = {"mask": CAUSAL, "dropout_p": 0.5, "dropout_seed": seed}
    out = attention(problem.q, problem.k, problem.v, **call)
    rounded = attention(problem.q, problem.k, ones, **call, **IN_FP8)
    torch.testing.assert_close(rounded, out, rtol=0.1, atol=0.1)
    (dv,) = torch.autograd.grad(rounded.float().sum(), ones)
    torch.testing.assert_close(dv.float().sum(), rounded.float().sum(), rtol=2e-2, atol=0.5)


def test_shapes_alone():
    q = make(1, 5, 5, 2, 2, 16, dtype=torch.bfloat16).q.to("meta")
    assert attention(q, q, q, mask=CAUSAL, **IN_FP8).dtype == torch.bfloat16
