"""NaN where nothing may look, and numbers at the edges of a dtype (faults 56 to 68)."""

import pytest
import torch
from helpers import DTYPES, Problem, assert_precise, assert_same_bits, make, masks, problems
from hypothesis import given
from hypothesis import strategies as st

from attnlib import CAUSAL, FULL, Mask, attention, attention_with_lse, sliding

BACKENDS = pytest.mark.parametrize("backend", ["torch", "reference"])
backends = st.sampled_from(("torch", "torch", "reference"))
poisons = st.sampled_from((torch.nan, torch.inf, -torch.inf, 3e38))
# Calls that torch's fused attention may solve, and calls that it may not.
anything = st.one_of(
    problems(lengths=(1, 7, 17, 63)),
    problems(lengths=(7, 17, 63), options=("bounds",), mask=st.sampled_from((CAUSAL, FULL, sliding(100)))),
    problems(lengths=(17, 63), options=(), mask=st.just(CAUSAL)),
)


def gradients(problem, backend, directions):
    return problem.with_gradients(attention_with_lse, *directions, backend=backend)


@given(anything, backends, poisons)
def test_62_what_nobody_sees_is_never_read(problem, backend, poison):
    seen = problem.visible()
    k, v, q = problem.k.clone(), problem.v.clone(), problem.q.clone()
    k[~seen.any(1)], v[~seen.any(1)], q[~seen.any(2)] = poison, poison, poison
    dout, dlse = problem.directions()
    clean = gradients(problem, backend, (dout, dlse))
    blind = ~seen.any(2)
    if (
        "sinks" not in problem.options
    ):  # a row without keys ignores its own gradient; with a sink, the sink needs it
        dout = dout.clone()
        dout[blind] = torch.nan
        dlse = dlse.transpose(1, 2).masked_fill(blind[..., None], torch.nan).transpose(1, 2)
    poisoned = gradients(problem.change(q=q, k=k, v=v), backend, (dout, dlse))
    for name, x in poisoned.items():
        torch.testing.assert_close(
            x, clean[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, hidden in (("dq", blind), ("dk", ~seen.any(1)), ("dv", ~seen.any(1))):
        assert (poisoned[name][hidden] == 0).all()


@given(anything, backends, poisons, st.integers(0, 10**6))
def test_62_a_poisoned_key_stays_in_its_sequence(problem, backend, poison, where):
    """No other sequence meets it, and rows of its own that do not see it are right, or NaN where torch
    multiplies.
    """
    b, t = problem.k.shape[:2]
    n, j = where % b, where % t
    k, v = problem.k.clone(), problem.v.clone()
    k[n, j], v[n, j] = poison, poison
    seen = problem.visible()
    directions = problem.directions()
    clean, ours = (gradients(p, backend, directions) for p in (problem, problem.change(k=k, v=v)))
    for x in (clean, ours):
        x["lse"] = x["lse"].transpose(1, 2)
    others = torch.arange(b) != n
    rows, keys = (
        ~seen[:, :, j],
        ~(seen & seen[:, :, j, None]).any(1),
    )  # keys that no row sees together with it
    for name, kept in (("out", rows), ("lse", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        torch.testing.assert_close(ours[name][others], clean[name][others], rtol=1e-4, atol=1e-4)
        mine, right = ours[name][n][kept[n]], clean[name][n][kept[n]]
        if backend == "torch" and seen[n, :, j].any():
            right = torch.where(mine.isnan(), mine, right)
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4, equal_nan=True)


@BACKENDS
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(200)])
@pytest.mark.parametrize("options", [(), ("sinks",), ("softcap", "alibi_slopes", "dropout")])
@pytest.mark.parametrize("sizes", [(1100, 1100), (600, 700)])
def test_62_what_lies_outside_the_bounds_is_never_read_across_tiles(backend, mask, options, sizes):
    """Keys before 100 and from 700 on, and queries that see none of the others; torch solves some of these
    fused.
    """
    s, t = sizes if backend == "torch" else (9, 700)
    problem = make(2, s, t, 2, 1, 8, mask=mask, options=options)
    bounds = {"key_starts": torch.full((2,), 100), "key_ends": torch.full((2,), 700)}
    problem = problem.change(options=problem.options | {name: x.int() for name, x in bounds.items()})
    blind = ~problem.visible().any(2)
    q, k, v = (x.clone() for x in problem.tensors)
    q[blind], k[:, :100], v[:, :100], k[:, 700:], v[:, 700:] = (
        torch.nan,
        torch.nan,
        torch.inf,
        torch.inf,
        torch.nan,
    )
    directions = problem.directions()
    ours, clean = (gradients(p, backend, directions) for p in (problem.change(q=q, k=k, v=v), problem))
    assert_same_bits(*((x, clean[name]) for name, x in ours.items()))
    assert blind.any() == (mask != FULL and s == t)


@BACKENDS
@pytest.mark.parametrize("mask", [FULL, CAUSAL, sliding(3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 7, 15, 17, 33])
def test_61_a_nan_query_is_not_hidden(backend, t, mask, dtype):
    problem = make(2, 7, t, 4, 2, 8, mask=mask, dtype=dtype)
    clean = problem.solve(backend=backend)
    seen = bool(problem.visible()[1, 3].any())
    problem.q[1, 3, 2, 5] = torch.nan
    out, lse = problem.solve(backend=backend)
    assert out.isnan().nonzero().tolist() == [[1, 3, 2, e] for e in range(8)] * seen
    assert lse.isnan().nonzero().tolist() == [[1, 2, 3]] * seen
    assert_same_bits((out.nan_to_num(0)[0], clean[0][0]), (out[1, :3], clean[0][1, :3]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("sink", [None, 0.7, -torch.inf])
def test_64_one_sequence_without_keys(backend, sink):
    problem = make(3, 5, 17, 4, 2, 8, mask=FULL)
    if sink is not None:
        problem.options["sinks"] = torch.full((4,), sink)
    ends = torch.tensor([17, 0, 17], dtype=torch.int32)
    ours = gradients(
        problem.change(options=problem.options | {"key_ends": ends}), backend, problem.directions()
    )
    others = problem.solve(backend=backend)
    assert (ours["out"][1] == 0).all()
    assert_same_bits((ours["lse"][1], torch.full((4, 5), -torch.inf if sink is None else sink)))
    assert all((ours[name][1] == 0).all() for name in ("dq", "dk", "dv"))
    assert all(x.isfinite().all() for name, x in ours.items() if name != "lse")
    torch.testing.assert_close(ours["out"][[0, 2]], others[0][[0, 2]])


PATHS = pytest.mark.parametrize("options", [{}, {"softcap": 1e30}, {"sinks": torch.full((1,), -torch.inf)}])


@PATHS
def test_56_logits_far_below_any_sentinel(options):
    k = torch.randn(1, 9, 1, 8)
    q = torch.full((1, 9, 1, 8), -1.0)
    k[..., 0] = 2.45e5 + torch.randn(1, 9, 1)
    options = {"scale": 1.0} | {n: x for n, x in options.items() if n == "sinks"}
    assert_precise(Problem(q, k, torch.randn(1, 9, 1, 8), CAUSAL, options))
    out, lse = attention_with_lse(q, k, k, mask=FULL, **options)
    assert (lse < -2.4e5).all()
    assert (out[..., 0] > 2e5).all()


@BACKENDS
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(8)])
def test_57_an_overflowing_row_leaves_the_others_alone(backend, mask):
    problem = make(1, 9, 9, 2, 1, 8, mask=mask)
    clean = problem.solve(backend=backend)[0]
    problem.q[0, 4] = 3e38
    out = problem.solve(backend=backend)[0]
    assert_same_bits((out[0, :4], clean[0, :4]), (out[0, 5:], clean[0, 5:]))


@PATHS
def test_58_fp16_near_its_largest_number(options):
    problem = make(1, 33, 33, 1, 1, 16, dtype=torch.float16)
    # 57344 = 7 * 2**13: every score is exact in fp32, so that equal ones stay equal.
    large = {name: getattr(problem, name).sign() * 57344 for name in "qkv"}
    for scale in (2.0**-28, 1.0):
        big = problem.change(options=options | {"scale": scale}, **large)
        out, lse = big.solve()
        assert out.isfinite().all()
        assert lse.isfinite().all()
        golden = big.to(torch.float64).solve()
        torch.testing.assert_close(out.double(), golden[0], rtol=2e-3, atol=60)


@pytest.mark.parametrize("dims", [(64, 64), (64, 8)])
def test_59_bf16_constants(dims):
    q, k, v = (torch.full((1, 33, 2, d), 133120.0, dtype=torch.bfloat16) for d in (dims[0], *dims))
    for mask in (CAUSAL, FULL, sliding(5)):
        assert_same_bits((attention(q, k, v, mask=mask), torch.full_like(v, 133120.0)))


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("e", [8, 5])
def test_60_a_single_key_returns_its_value_to_the_bit(backend, dtype, e):
    problem = make(2, 3, 1, 4, 2, 8, e, mask=FULL, dtype=dtype, sigma=3.0)
    out, lse = problem.solve(backend=backend)
    assert_same_bits((out, problem.v.repeat_interleave(2, 2).expand_as(out)))
    logits = (
        torch.einsum("bshd,bthd->bhs", problem.q.double(), problem.k.double().repeat_interleave(2, 2))
        * 8**-0.5
    )
    torch.testing.assert_close(lse.double(), logits, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_63_an_infinite_value_with_a_vanishing_weight_is_nan(backend):
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -1e4]).view(1, 2, 1, 1)
    v = torch.tensor([1.0, torch.inf]).view(1, 2, 1, 1)
    assert attention(q, k, v, mask=FULL, backend=backend).isnan().all()  # 0 times infinity, honestly


@BACKENDS
@pytest.mark.parametrize("dtype", DTYPES)
def test_67_denormals_and_negative_zeros(backend, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    for value in (tiny, -0.0):
        x = torch.full((1, 7, 2, 8), value, dtype=dtype)
        for mask in (CAUSAL, sliding(2)):
            out, lse = attention_with_lse(x, x, x, mask=mask, backend=backend)
            assert ((out - value).abs() <= tiny.__abs__() * 1e-2 if value else out == 0).all()
            assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("sinks",)])
def test_68_a_million_keys(dtype, options):
    assert_precise(make(1, 1, 2**20, 1, 1, 4, options=options, dtype=dtype))


@given(masks(9), st.integers(0, 9), st.integers(0, 9), backends)
def test_nothing_is_left_uninitialised(mask, s, t, backend):
    problem = make(2, s, t, 2, 1, 4, mask=Mask(mask.left, mask.right))
    assert not any(x.isnan().any() for x in gradients(problem, backend, problem.directions()).values())
