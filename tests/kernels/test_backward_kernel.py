"""The backward kernels under Triton's interpreter, against autograd of eager attention in fp64.

The interpreter is chosen when triton is imported, hence by ``TRITON_INTERPRET=1`` in the environment.
"""

import os

import pytest
import torch
from helpers import Problem, assert_close, assert_same_bits, eager, make

from attnlib import (
    CAUSAL,
    FULL,
    Mask,
    attention,
    sliding,
    varlen_attention,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import shapes as triton_plans
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.backends._triton.launching.launch import plan_cache

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)
pytest.importorskip("triton")

import triton
from triton import language as tl

from attnlib.backends._triton.kernels.band import KeyBand, query_range

# numpy, in which the interpreter computes, tells of every NaN that it makes.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
DTYPES = (torch.float32, torch.float16)


def launch(
    q, k, v, out, lse, dout, dlse=None, *, mask, cu_q=None, cu_k=None, scale=None, softcap=None,
    alibi_slopes=None, sinks=None, key_starts=None, key_ends=None, dropout_p=0.0, dropout_seed=None,
    block_m=16, block_n=16, values_apart=False,
):  # fmt: skip
    """The gradients of q, k, v and of the slopes, by tiles of this size."""
    tiles = LaunchConfig(block_m, block_n, 1, 4)
    of_values = tiles._replace(block_m=32) if values_apart else None
    terms = (alibi_slopes, sinks, key_starts, key_ends, cu_q, cu_k, dropout_seed, *(None,) * 7)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    numbers = (mask.left, mask.right, mask.prefix, 0, scale, softcap, dropout_p, *(None,) * 5, False, True)
    plan_cache.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("backward_keys", "backward_queries"):
            patch.setattr(triton_plans.tables, name, lambda case, *, keys: tiles)
        patch.setattr(triton_plans.tables, "backward_values", lambda case, *, keys: of_values)
        return torch.ops.attnlib.triton_backward(dout, dlse, out, lse, q, k, v, *terms, *numbers)[:4]


def solve(problem: Problem, dout, dlse=None, *, backend="reference", **sizes):
    """The kernels' gradients, from an output and an LSE that were rounded once."""
    out, lse = problem.to(torch.float64).solve(backend=backend)
    dtype = problem.q.dtype
    rounded = (
        out.to(dtype),
        lse.float().contiguous(),
        dout.to(dtype),
        None if dlse is None else dlse.float(),
    )
    return launch(*problem.tensors, *rounded, mask=problem.mask, **problem.options, **sizes)


def assert_precise(problem: Problem, *, with_dlse=True, **sizes):
    """Errors against fp64 within three times those of eager attention at the same dtype (slopes: six
    times).
    """
    dtype = problem.q.dtype
    dout, dlse = problem.directions()
    dlse = dlse if with_dlse else torch.zeros_like(dlse)
    dq, dk, dv, dslopes = solve(problem.to(dtype), dout, dlse if with_dlse else None, **sizes)
    naive = [problem.to(dtype).with_gradients(eager, dout, dlse, order=order) for order in (0, 1)]
    golden = problem.to(torch.float64).with_gradients(eager, dout.double(), dlse.double(), order=2)
    largest = max(problem.largest_score(), float(golden["lse"].nan_to_num(0, 0, 0).abs().amax()))
    noise = torch.finfo(dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
    ours = {"dq": dq, "dk": dk, "dv": dv}
    if "alibi_slopes" in problem.options:
        ours["dalibi_slopes"] = dslopes
    for name, x in ours.items():
        few = name == "dalibi_slopes"
        assert_close(
            name, x, [n[name] for n in naive], golden[name], 6 if few else 3, (32 if few else 1) * noise
        )


MASKS = {
    "full": FULL,
    "causal": CAUSAL,
    "sliding": sliding(7),
    "wide window": sliding(35),
    "later": CAUSAL.shift(5),
    "earlier": CAUSAL.shift(-19),
    "band": Mask(20, 18),
    "hollow": Mask(-3, -9),
    "after": Mask(-2, None),
    "prefix": Mask(None, -3, 21),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("s", "t"), [(33, 50), (35, 17)])
def test_masks_and_lengths(mask, s, t):
    assert_precise(make(1, s, t, 1, 1, 16, mask=mask))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("mask", [CAUSAL, sliding(37)], ids=str)
def test_blocks_of_other_shapes(dtype, block_m, block_n, mask):
    assert_precise(make(1, 65, 65, 1, 1, 16, mask=mask, dtype=dtype), block_m=block_m, block_n=block_n)


@pytest.mark.parametrize(("d", "e"), [(144, 48), (40, 40), (40, 24), (16, 48), (8, 5), (59, 32)])
def test_head_dimensions(d, e):
    assert_precise(make(1, 23, 30, 2, 1, d, e, mask=CAUSAL))


@pytest.mark.covering(1)
@pytest.mark.parametrize("values_apart", [False, True])
@pytest.mark.parametrize(("d", "e"), [(264, 264), (320, 320), (384, 384), (301, 300), (512, 512), (576, 512)])
def test_wide_heads(d, e, values_apart):
    assert_precise(make(1, 35, 40, 2, 1, d, e, mask=CAUSAL, options=("sinks",)), values_apart=values_apart)


@pytest.mark.parametrize("options", [("softcap", "dropout"), ("alibi_slopes", "bounds")], ids=str)
@pytest.mark.parametrize("mask", [sliding(7), Mask(None, -3, 9)], ids=str)
def test_values_apart_give_the_same_bits(mask, options):
    """A pass for dv alone computes what a pass for dk and dv does, in tiles of the same size."""
    problem = make(1, 35, 37, 2, 1, 16, mask=mask, options=options)
    directions = problem.directions()
    together, apart = (
        solve(problem, *directions, backend="torch", block_m=32, values_apart=x) for x in (False, True)
    )
    assert_same_bits(*((x, y) for x, y in zip(together, apart, strict=True) if x is not None))


@triton.jit
def write_range(ptr, j0, j1, first, last, left, right, prefix):
    band = KeyBand(0, 0, left, right, prefix, 0, 0)
    low, high, all_low, all_high = query_range(j0, j1, first, last, band)
    tl.store(ptr, low)
    tl.store(ptr + 1, high)
    tl.store(ptr + 2, all_low)
    tl.store(ptr + 3, all_high)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_query_range_is_exact(mask):
    """Every query of the range sees some key, none outside it does, and likewise each key; brute force."""
    mine = torch.empty(4, dtype=torch.int32)
    for j0, j1, first, last in (
        (0, 16, -4, 60),
        (16, 32, 0, 70),
        (20, 27, 9, 33),
        (48, 64, 10, 64),
        (7, 7, 0, 30),
    ):
        write_range[(1,)](mine, j0, j1, first, last, mask.left, mask.right, mask.prefix or None)
        low, high, all_low, all_high = mine.tolist()
        queries = range(first, last)
        seen = {i: [mask.visible(i, j) for j in range(j0, j1)] for i in queries}
        some = [i for i in queries if any(seen[i])]
        assert set(some) <= set(range(low, high)), (j0, j1)
        if mask != MASKS["hollow"]:
            assert some == list(range(low, high)), (j0, j1)
        if j0 < j1:
            assert [i for i in queries if all(seen[i])] == list(range(all_low, all_high)), (j0, j1)


def test_strides_are_free():
    """Heads before rows in memory, and gradients that autograd expanded."""
    problem = make(2, 19, 19, 2, 1, 16)
    moved = problem.change(
        **{n: getattr(problem, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    )
    dout, dlse = torch.randn(16).expand(2, 19, 2, 16), torch.ones(()).expand(2, 2, 19)
    assert_same_bits(*zip(solve(moved, dout, dlse), solve(problem, dout.clone(), dlse.clone()), strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("names", [(), ("softcap", "alibi_slopes", "sinks", "dropout")], ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, sliding(6)], ids=str)
def test_packed(mask, names):
    """Empty sequences, ones without keys or without queries, and rows that belong to none, whose gradients
    are 0.
    """
    cu_q = torch.tensor([0, 18, 18, 23, 23, 56], dtype=torch.int32)
    cu_k = torch.tensor([0, 20, 25, 25, 25, 60], dtype=torch.int32)
    problem = make(1, 59, 64, 4, 2, 16, mask=mask, options=names)
    q, k, v = (x[0] for x in problem.tensors)
    offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    wide = problem.to(torch.float64)
    leaves = [x[0].clone().requires_grad_() for x in wide.tensors]
    slopes = wide.options.get("alibi_slopes")
    if slopes is not None:
        leaves.append(slopes.requires_grad_())
    out, lse = varlen_attention_with_lse(
        *leaves[:3], **offsets, mask=mask, **wide.options, backend="reference"
    )
    dout, dlse = torch.randn(out.shape), torch.randn(lse.shape)
    total = (out * dout).sum() + (lse * dlse).masked_fill(lse == -torch.inf, 0).sum()
    golden = torch.autograd.grad(total, leaves)
    out, lse = out.detach().float(), lse.detach().float()
    ours = launch(q, k, v, out, lse, dout, dlse, cu_q=cu_q, cu_k=cu_k, mask=mask, **problem.options)
    for x, expected in zip(ours, golden, strict=False):
        torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert not ours[0][56:].any()
    assert not ours[1][60:].any()
    assert not ours[2][60:].any()


def test_keys_that_nobody_sees_get_exactly_zero():
    problem = make(1, 20, 50, 2, 1, 16, mask=Mask(3, 0))
    _, dk, dv, _ = solve(problem, *problem.directions())
    unseen = ~problem.visible()[0].any(0)
    assert unseen.sum() == 27
    assert not dk[:, unseen].any()
    assert not dv[:, unseen].any()


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=str)
def test_nothing_comes_out_of_keys_beyond_the_bounds(mask):
    options = {"key_starts": torch.tensor([3, 0, 30]), "key_ends": torch.tensor([35, 0, 70])}
    clean = make(3, 33, 49, 2, 1, 16, mask=mask)
    clean = clean.change(options={name: x.int() for name, x in options.items()})
    outside = ~(
        (torch.arange(49) >= options["key_starts"][:, None])
        & (torch.arange(49) < options["key_ends"][:, None])
    )
    k, v = (x.masked_fill(outside[..., None, None], torch.nan) for x in (clean.k, clean.v))
    dout, dlse = clean.directions()
    broken = solve(clean.change(k=k, v=v), dout, dlse, backend="torch")
    assert_same_bits(*zip(broken, solve(clean, dout, dlse, backend="torch"), strict=True))
    assert not broken[1][outside].any()
    assert not broken[2][outside].any()


@pytest.mark.covering(1)
@pytest.mark.parametrize(("value", "softcap"), [(torch.nan, None), (torch.inf, None), (-torch.inf, 3.0)])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(("d", "mask"), [(136, sliding(21))], ids=str)
def test_a_broken_number_stays_in_its_sequence(where, value, softcap, d, mask):
    """It reaches the gradients of what sees it; bits of another sequence are as without it."""
    options = {} if softcap is None else {"softcap": softcap}
    clean = make(2, 40, 40, 2, 1, d, mask=mask).change(options=options)
    dout, dlse = clean.directions()
    broken = {"q": clean.q.clone(), "k": clean.k.clone(), "v": clean.v.clone(), "dout": dout.clone()}
    broken[where][0, 20, 0, d - 2] = value
    problem = clean.change(**{n: broken[n] for n in "qkv"})
    ours = solve(problem, broken["dout"], dlse, backend="torch")[:3]
    without = solve(clean, dout, dlse, backend="torch")[:3]
    dq, dk, dv = ((~x[0].isfinite()).flatten(1).any(-1) for x in ours)
    seen = problem.visible()[0]
    reached, by = {"q": (dk, seen[20]), "dout": (dv, seen[20])}.get(where, (dq, seen[:, 20]))
    assert reached[by].all()
    assert_same_bits(*((x[1], old[1]) for x, old in zip(ours, without, strict=True)))


def test_a_query_that_sees_nothing_gives_nothing_whatever_it_is():
    """Its LSE is its sink, which is finite where the query is not."""
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 2, 1, 16)
    sinks = torch.randn(2)

    def gradients(first: float) -> tuple[torch.Tensor, ...]:
        rows = torch.cat((torch.full_like(q[:, :1], first), q[:, 1:]), 1)
        leaves = [x.clone().requires_grad_() for x in (rows, k, sinks)]
        out = attention(*leaves[:2], leaves[1], mask=CAUSAL, sinks=leaves[2], backend="triton")
        return torch.autograd.grad(out.square().sum(), leaves)

    assert_same_bits(*zip(gradients(torch.nan), gradients(1.0), strict=True))


def test_slopes_of_a_sequence_hear_of_no_other():
    offsets, q = torch.tensor([0, 20, 50], dtype=torch.int32), torch.randn(50, 2, 16)
    slopes = torch.rand(2, 2)

    def gradient(scale: float) -> torch.Tensor:
        given, leaf = torch.cat((q[:20] * scale, q[20:])), slopes.clone().requires_grad_()
        packing = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        out = varlen_attention(
            given, given, given, **packing, mask=CAUSAL, alibi_slopes=leaf, backend="triton"
        )
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    spoiled, whole = gradient(torch.nan), gradient(1.0)
    assert spoiled[0].isnan().all()
    assert_same_bits((spoiled[1], whole[1]))
