"""Gradients: finite differences for every option of the core, and what must stay exactly zero or finite."""

import pytest
import torch
from helpers import OPTIONS, assert_same_bits, eager, make, problems
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from attnlib import CAUSAL, FULL, Mask, attention, attention_with_lse, sliding, varlen_attention_with_lse

seeds = st.integers(0, 2**16)
CASES = {
    "full": (FULL, ()),
    "causal": (CAUSAL, ()),
    "window": (sliding(3), ()),
    "band": (Mask(2, 1), ()),
    "shifted": (CAUSAL.shift(-2), ()),
    "empty": (Mask(-9, None), ()),
    "prefix": (Mask(None, -4, 3), ()),
    "scale": (CAUSAL, ("scale",)),
    "softcap": (CAUSAL, ("softcap",)),
    "slopes": (CAUSAL, ("alibi_slopes",)),
    "slopes of each sequence": (CAUSAL, ("per_sequence_slopes",)),
    "sinks": (CAUSAL, ("sinks",)),
    "sinks alone": (CAUSAL.shift(-4), ("sinks",)),
    "bounds": (CAUSAL, ("bounds",)),
    "dropout": (CAUSAL, ("dropout",)),
    "everything": (sliding(4), sorted({*OPTIONS} - {"alibi_slopes"})),
    "everything else": (Mask(None, 1, 2), sorted({*OPTIONS} - {"per_sequence_slopes"})),
}


def check(call, leaves, wanted="both"):
    """gradcheck of what is finite: an LSE of -inf has no derivative."""

    def run(*tensors):
        out, lse = call(*tensors)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        return {"both": (out, lse), "out": (out,), "lse": (lse,)}[wanted]

    assert gradcheck(run, [x.detach().requires_grad_() for x in leaves])


def caller(problem, backend=None, call=attention_with_lse):
    learned = [name for name in ("alibi_slopes", "sinks") if name in problem.options]

    def run(q, k, v, *rest):
        options = problem.options | dict(zip(learned, rest, strict=True))
        return problem.change(q=q, k=k, v=v, options=options).solve(call, backend=backend)

    return run


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "sizes", [(2, 4, 5, 2, 1, 3, 2), (1, 5, 3, 3, 3, 2, 2)], ids=["s<t, grouped, dv<dk", "s>t"]
)
def test_gradcheck(name, sizes):
    mask, options = CASES[name]
    problem = make(*sizes, mask=mask, options=options).to(torch.float64)
    for wanted in ("both", "out", "lse"):
        check(caller(problem), problem.leaves, wanted)


@pytest.mark.parametrize("name", ["causal", "everything", "everything else"])
def test_gradcheck_of_the_reference(name):
    mask, options = CASES[name]
    problem = make(2, 4, 5, 2, 1, 3, 2, mask=mask, options=options).to(torch.float64)
    check(caller(problem, "reference"), problem.leaves)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("options", [(), ("sinks", "softcap", "per_sequence_slopes", "dropout")])
def test_gradcheck_of_packed_calls(backend, options):
    problem = make(1, 9, 10, 2, 1, 3, 2, options=options).to(torch.float64)
    if options:
        problem.options["alibi_slopes"] = torch.rand(4, 2, dtype=torch.float64)
    # The third sequence has no query and the second no key; the last rows belong to nobody.
    cu = {"cu_seqlens_q": torch.tensor([0, 3, 5, 5, 8]), "cu_seqlens_k": torch.tensor([0, 4, 4, 6, 9])}
    cu = {name: x.int() for name, x in cu.items()}
    leaves = [x[0] if n < 3 else x for n, x in enumerate(problem.leaves)]
    check(caller(problem.change(options=problem.options | cu), backend, varlen_attention_with_lse), leaves)


@given(problems(lengths=(0, 1, 7, 17), options=("softcap", "alibi_slopes", "sinks", "dropout")), seeds)
def test_packed_gradients_equal_dense_ones(problem, seed):
    problem = problem.to(torch.float64)
    (b, s), t = problem.q.shape[:2], problem.k.shape[1]
    cu = {"cu_seqlens_q": torch.arange(b + 1) * s, "cu_seqlens_k": torch.arange(b + 1) * t}
    options = problem.options | {name: x.int() for name, x in cu.items()}
    packed = problem.change(**{n: getattr(problem, n).flatten(0, 1) for n in "qkv"}, options=options)
    dout, dlse = problem.directions()
    dense = problem.with_gradients(attention_with_lse, dout, dlse)
    ours = packed.with_gradients(
        varlen_attention_with_lse, dout.flatten(0, 1), dlse.transpose(0, 1).flatten(1)
    )
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(ours[name], dense[name].flatten(0, 1))
    for name in {"dalibi_slopes", "dsinks"} & {*ours}:
        torch.testing.assert_close(ours[name], dense[name])


def grads(problem, *, of="qkv", dout=None, backend=None):
    leaves = {name: getattr(problem, name).detach() for name in "qkv"}
    wanted = [leaves[name].requires_grad_() for name in of]
    out = attention(**leaves, mask=problem.mask, **problem.options, backend=backend)
    dout = torch.ones_like(out) if dout is None else dout
    return torch.autograd.grad(out, wanted, dout)


FUSED_OR_NOT = pytest.mark.parametrize("options", [(), ("softcap",)], ids=["fused", "tiles"])


@FUSED_OR_NOT
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("of", ["q", "k", "v", "qk", "kv"])
def test_gradients_of_some_inputs_only(options, backend, of):
    problem = make(2, 17, 17, 4, 2, 8, options=options)
    some, everything = (grads(problem, of=names, backend=backend) for names in (of, "qkv"))
    assert_same_bits(*((x, everything["qkv".index(name)]) for name, x in zip(of, some, strict=True)))


@FUSED_OR_NOT
def test_gradients_of_learned_terms_alone(options):
    problem = make(2, 7, 7, 4, 2, 8, options=("alibi_slopes", "sinks", *options))
    for name in ("alibi_slopes", "sinks"):
        learned = problem.options[name].clone().requires_grad_()
        out = attention(*problem.tensors, mask=CAUSAL, **problem.options | {name: learned})
        naive = eager(*problem.tensors, mask=CAUSAL, **problem.options | {name: learned})[0]
        ours, theirs = (torch.autograd.grad(x.square().sum(), learned)[0] for x in (out, naive))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@FUSED_OR_NOT
@pytest.mark.parametrize("loss", [torch.sum, torch.norm], ids=["constant dout", "another"])
def test_a_second_derivative_is_an_error(options, loss):
    q = torch.randn(1, 17, 2, 4, requires_grad=True)
    out = attention(q, q, q, mask=CAUSAL, **make(1, 17, 17, 2, 2, 4, options=options).options)
    (dq,) = torch.autograd.grad(loss(out), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        (dq.square().sum() + q.square().sum()).backward()


@FUSED_OR_NOT
@pytest.mark.parametrize(("s", "t", "g"), [(17, 17, 4), (17, 17, 2), (5, 33, 2), (33, 17, 1)])
def test_any_layout_of_the_output_gradient(options, s, t, g):
    problem = make(2, s, t, 4, g, 8, options=options)
    plain = torch.randn(2, s, 4, 8)
    layouts = {
        "transposed": plain.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": torch.stack((plain, plain), -1)[..., 0],
        "offset": torch.cat((plain[..., :1], plain), -1)[..., 1:],
    }
    for dout in layouts.values():
        assert not dout.is_contiguous()
        assert_same_bits(*zip(grads(problem, dout=dout), grads(problem, dout=plain), strict=True))
    for shape in ((1, 1, 1, 1), (2, 1, 4, 1), (1, s, 1, 8)):
        dout = torch.randn(shape).expand(2, s, 4, 8)
        assert_same_bits(*zip(grads(problem, dout=dout), grads(problem, dout=dout.contiguous()), strict=True))


@given(problems(lengths=(0, 1, 7, 17, 63)))
def test_no_gradient_in_gives_none_out(problem):
    dout, dlse = (torch.zeros_like(x) for x in problem.directions())
    ours = problem.with_gradients(attention_with_lse, dout, dlse)
    assert all((x == 0).all() for name, x in ours.items() if name[0] == "d")


options_that_hide = ("softcap", "sinks", "bounds", "dropout")


@given(problems(lengths=(0, 1, 7, 17), options=options_that_hide), st.sampled_from(("torch", "reference")))
def test_what_is_hidden_gets_exactly_no_gradient(problem, backend):
    seen = problem.visible()
    ours = problem.with_gradients(attention_with_lse, *problem.directions(), backend=backend)
    assert (ours["dq"][~seen.any(2)] == 0).all()
    assert (ours["dk"][~seen.any(1)] == 0).all()
    assert (ours["dv"][~seen.any(1)] == 0).all()
    assert (ours["out"][~seen.any(2)] == 0).all()
    if "sinks" not in problem.options:
        assert (ours["lse"].transpose(1, 2)[~seen.any(2)] == -torch.inf).all()


@given(problems(lengths=(7, 17, 63), options=("softcap", "alibi_slopes", "sinks")))
def test_p13_a_shift_of_every_key_leaves_dq_alone(problem):
    problem = problem.to(torch.float64).change(mask=Mask(problem.mask.left, problem.mask.right))
    shifted = problem.change(k=problem.k + torch.randn_like(problem.k[:, :1]))
    if {"softcap", "sinks"} & {*problem.options}:
        problem.options.pop("softcap", None)
        problem.options.pop("sinks", None)
    dout, _ = problem.directions()
    ours = (p.change(options=problem.options) for p in (problem, shifted))
    # A cap breaks the law, and so does a sink, whose logit does not shift.
    first, second = (grads(p, of="q", dout=dout)[0] for p in ours)
    torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@FUSED_OR_NOT
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_nan_in_the_output_gradient_reaches_what_its_row_sees(options, backend):
    problem = make(2, 19, 19, 4, 2, 8, options=options)
    dout = torch.randn(2, 19, 4, 8)
    dout[0, 4, 1, 3] = torch.nan
    ours = grads(problem, dout=dout, backend=backend)
    clean = grads(problem, dout=dout.nan_to_num(0), backend=backend)
    for x, where, other in zip(ours, ((4, 1), (slice(5), 0), (slice(5), 0)), clean, strict=True):
        assert_reaches(x, where, other, exactly=backend == "reference")


@FUSED_OR_NOT
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_in_one_input_reaches_what_sees_it(options, backend, name):
    problem = make(2, 19, 19, 4, 2, 8, options=options)
    row = 4
    getattr(problem, name)[0, row, 0, 3] = torch.nan
    clean = problem.change(**{name: getattr(problem, name).nan_to_num(0)})
    rows, heads = (row, 0) if name == "q" else (slice(row, None), slice(2))
    out, right = (p.solve(backend=backend)[0].detach() for p in (problem, clean))
    exactly = backend == "reference"
    assert_reaches(out, (rows, heads), right, exactly=exactly or name == "q")
    dq, dk, dv = grads(problem, backend=backend)
    right = grads(clean, backend=backend)
    assert_reaches(dq, (rows, heads), right[0], exactly=exactly or name == "q")
    last = row + 1 if name == "q" else None
    # A key's gradient is NaN through the rows that see it; its value's, where they are rows of a NaN
    # probability.
    assert_reaches(dk, (slice(last), 0), right[1], exactly=exactly and name == "q", must=name == "q")
    assert_reaches(dv, (slice(last), 0), right[2], exactly=exactly and name == "q", must=name == "q")


def assert_reaches(x, where, clean, *, exactly, must=True):
    """Rows and heads ``where`` of sequence 0 are NaN; others of its KV head 0 are clean, or NaN unless
    ``exactly``; all else is clean."""
    reached, spoilt = (torch.zeros(x.shape[:3], dtype=torch.bool) for _ in range(2))
    reached[(0, *where)] = spoilt[0, :, : x.shape[2] // 2] = True
    nan = x.isnan().any(-1)
    assert not must or (nan & reached).equal(reached)
    free = ~reached if exactly else ~(nan & spoilt) & ~reached
    torch.testing.assert_close(x[free], clean[free])


NOWHERE = torch.tensor([0], dtype=torch.int32)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sizes", [(2, 5, 0), (2, 0, 5), (0, 5, 5), "packed"], ids=str)
def test_both_results_belong_to_autograd_whatever_is_empty(sizes, backend):
    if sizes == "packed":
        tensors = [torch.randn(5, 2, 8, requires_grad=True) for _ in range(3)]
        offsets = {"cu_seqlens_q": NOWHERE, "cu_seqlens_k": NOWHERE}
        results = varlen_attention_with_lse(*tensors, **offsets, mask=CAUSAL, backend=backend)
    else:
        b, s, t = sizes
        tensors = [torch.randn(b, n, 2, 8, requires_grad=True) for n in (s, t, t)]
        results = attention_with_lse(*tensors, mask=CAUSAL, backend=backend)
    for x in results:
        for y in tensors if x is results[0] else tensors[:2]:  # an LSE is not of v
            (grad,) = torch.autograd.grad(
                x.masked_fill(x.isinf(), 0).sum(), y, retain_graph=True, allow_unused=True
            )
            assert grad is None or not grad.any()
        assert x.requires_grad
    alone = [
        x.detach().requires_grad_(n == 1) for n, x in enumerate(tensors)
    ]  # of k, which may be empty, alone
    call = varlen_attention_with_lse if sizes == "packed" else attention_with_lse
    options = offsets if sizes == "packed" else {}
    assert all(x.requires_grad for x in call(*alone, **options, mask=CAUSAL, backend=backend))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_gradients_of_half_precision_terms_add_up_in_fp32(backend):
    """300 sequences give a sink, and a slope, as much each: bf16 would stop at 256 of them."""
    q, n = torch.zeros(300, 1, 1, 8), torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(300, 2, 1, 8)
    v = torch.tensor([-1.0, 1.0])[None, :, None, None].expand(300, 2, 1, 1)
    # A sink beside two equal keys has a third of the weight; a slope moves half as much weight to the nearer
    # key.
    for name, each in (("sinks", 1 / 3), ("alibi_slopes", 0.5)):
        out, lse = attention_with_lse(q, k, v, mask=FULL, backend=backend, **{name: n})
        (grad,) = torch.autograd.grad(lse.sum() if name == "sinks" else out.sum(), n)
        torch.testing.assert_close(grad.float(), torch.tensor([300 * each]), rtol=2**-8, atol=0)
