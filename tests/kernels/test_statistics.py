"""Largest scores and probabilities from the kernels, against all pairs in fp64, and eager's error."""

import pytest
import torch
from decode_helpers import Sizes, store
from function_cases import MASK_NAMES, SCORE_NAMES, functions, undefined
from helpers import assert_close, make, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from weight_helpers import drawn, forms, oracle

from attnlib import (
    CAUSAL,
    FLOP_FORMULAS,
    FULL,
    KVLayout,
    Mask,
    attention_weights,
    attention_with_lse,
    cached_attention_with_lse,
    mask_mod,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import tables

DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))
SETS = (
    (),
    ("bounds",),
    ("softcap",),
    ("alibi_slopes", "scale"),
    ("per_sequence_slopes", "softcap", "bounds"),
)
TILES = ("maxima", "mass", "row_weights", "mean_weights")
SHIPPED = {name: getattr(tables, name) for name in TILES}

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN inputs


def tile(case, *, keys=0, group=16):
    return tables.LaunchConfig(16, 32, 2, 4)


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    """So that short sequences have many tiles; `test_the_tables_own_tiles` runs the shipped ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in TILES:
            patch.setattr(tables, name, tile)
        yield


def moved(x):
    return {n: y.to(DEVICE) if isinstance(y, Tensor) else y for n, y in x.items()}


def assert_precise(ours, golden, naive, lse) -> None:
    """The error against fp64 is at most twice that of eager torch, whose scores are summed in fp32."""
    sizes = [x[x.isfinite()].abs().max() for x in (golden["scores"], lse) if x.isfinite().any()]
    # Every score and LSE is rounded once, and so is the factor of log2 units.
    noise = 4 * torch.finfo(torch.float32).eps * (1 + float(max(sizes, default=0)))
    assert ours.keys() == golden.keys()
    for name, x in ours.items():
        assert_close(name, x.cpu(), [naive[name]], golden[name], 2, noise)


def assert_forms(q, k, lse, asked, **options) -> None:
    ours = forms(*(x.to(DEVICE) for x in (q, k, lse)), moved(asked), backend="triton", **moved(options))
    golden = oracle(q, k, lse, asked, **options)
    naive = forms(q.float(), k.float(), lse.float(), asked, backend="torch", **options)
    assert_precise(ours, golden, naive, lse)


@pytest.mark.parametrize("options", SETS, ids="+".join)
@settings(max_examples=5)
@given(data=st.data())
def test_any_call(options, data):
    x = data.draw(problems(options=(), lengths=(0, 1, 17, 33, 50), dims=(16,), dtypes=DTYPES))
    b, s, h, d = x.q.shape
    torch.manual_seed(s)
    x = make(b, s, x.k.shape[1], h, x.k.shape[2], d, mask=x.mask, options=options, dtype=x.q.dtype)
    lse = attention_with_lse(*x.tensors, mask=x.mask, **x.options)[1]
    assert_forms(x.q, x.k, lse, drawn(b, s, x.k.shape[1]), mask=x.mask, **x.options)


@pytest.mark.parametrize("d", [1, 7, 59, 96, 160, 192, 264, 576])
def test_any_head_dimension(d):
    x = make(1, 35, 50, 2, 1, d, dtype=torch.float16)
    lse = attention_with_lse(*x.tensors, mask=CAUSAL)[1]
    assert_forms(x.q, x.k, lse, drawn(1, 35, 50), mask=CAUSAL)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(100)], ids=str)
@pytest.mark.covering(1)
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_tables_own_tiles(d, mask, dtype, monkeypatch):
    for name, shipped in SHIPPED.items():
        monkeypatch.setattr(tables, name, shipped)
    x = make(1, 150, 170, 2, 1, d, mask=mask, dtype=dtype)
    lse = attention_with_lse(*x.tensors, mask=mask)[1]
    assert_forms(x.q, x.k, lse, drawn(1, 150, 170), mask=mask)


@pytest.mark.parametrize("heads", [(9, 3), (7, 7), (20, 1)])
def test_groups_of_heads(heads):
    x = make(1, 19, 33, *heads, 16)
    lse = attention_with_lse(*x.tensors, mask=CAUSAL)[1]
    assert_forms(x.q, x.k, lse, drawn(1, 19, 33), mask=CAUSAL)


@pytest.mark.parametrize("mask_name", [*MASK_NAMES, None])
@pytest.mark.parametrize("score_name", SCORE_NAMES)
def test_functions_of_indices(mask_name, score_name):
    masks, scores = functions()
    score = scores.get(score_name, (None,))[0]
    mask = masks.get(mask_name, CAUSAL)
    if score is not None:
        score = score.reading([x.detach() for x in score.tensors])
    options = {"mask": mask, **({} if score is None else {"score": score})}
    q, k = torch.randn(2, 37, 4, 16), torch.randn(2, 60, 2, 16)
    lse, asked = attention_with_lse(q, k, k, **options)[1], drawn(2, 37, 60)
    given = {
        n: x if isinstance(x, Mask) else x.reading([y.to(DEVICE) for y in x.tensors])
        for n, x in options.items()
    }
    ours = forms(*(x.to(DEVICE) for x in (q, k, lse)), moved(asked), backend="triton", **given)
    naive = forms(q, k, lse, asked, backend="torch", **options)
    assert_precise(ours, oracle(q, k, lse, asked, **options), naive, lse)


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize(
    "lengths", [((5, 0, 9, 1), (7, 3, 9, 0)), ((1, 40), (70, 40)), ((0,), (0,)), ((), ())], ids=str
)
def test_packed_sequences(lengths, by_function):
    """The rows after the last offset are NaN, which nobody reads."""
    offsets = [torch.tensor([0, *x]).cumsum(0).int().to(DEVICE) for x in lengths]
    options = {"mask": sliding(30), "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    if by_function:
        options["mask"] &= mask_mod(lambda b, h, i, j: (i + j + b) % 3 != h)
    q, k = (torch.randn(sum(x) + 3, n, 16, device=DEVICE) for x, n in zip(lengths, (4, 2), strict=True))
    q[sum(lengths[0]) :], k[sum(lengths[1]) :] = torch.nan, torch.nan
    lse = varlen_attention_with_lse(q, k, k, backend="torch", **options)[1]
    rows = torch.tensor([len(q) - 1, 0, 1, -1, len(q) // 2, 0, 3], device=DEVICE)
    asked = {"rows": rows, "at": torch.randint(-1, 9, (len(q), 5), device=DEVICE)}
    ours, theirs = (forms(q, k, lse, asked, backend=name, **options) for name in ("triton", "torch"))
    for name, x in ours.items():
        torch.testing.assert_close(
            x, theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_what_nobody_sees_is_never_read():
    """Also in blocks of keys whose visible part is seen by whole tiles of queries."""
    q, k = torch.randn(2, 99, 4, 16), torch.randn(2, 97, 2, 16)
    options = {
        "mask": CAUSAL,
        "key_starts": torch.tensor([1, 0]).int(),
        "key_ends": torch.tensor([97, 20]).int(),
    }
    lse, asked = attention_with_lse(q, k, k, **options)[1], drawn(2, 99, 97)
    wanted = forms(q, k, lse, asked, **options)
    q[:, :2] = k[0, 0] = k[1, 20:] = torch.nan
    ours = forms(*(x.to(DEVICE) for x in (q, k, lse)), moved(asked), backend="triton", **moved(options))
    for name, x in ours.items():
        torch.testing.assert_close(
            x.cpu(), wanted[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_any_lse_is_taken_and_inf_gives_no_probability():
    q, k, lse = torch.randn(1, 19, 2, 16), torch.randn(1, 35, 2, 16), torch.randn(1, 2, 19)
    lse[:, :, 3:7] = -torch.inf
    assert_forms(q, k, lse, drawn(1, 19, 35), mask=FULL)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are hidden
@pytest.mark.parametrize("function", [undefined, lambda score, b, h, i, j, rate: score + (37 - i).log()])
def test_scores_that_are_undefined_where_nobody_looks(function):
    """NaN for hidden pairs, or for queries behind the last one, which a tile has."""
    q, k, rate = torch.randn(2, 37, 4, 16), torch.randn(2, 37, 2, 16), torch.rand(2, 4)
    options = {"mask": CAUSAL, "score": score_mod(function, rate)}
    lse, asked = attention_with_lse(q, k, k, **options)[1], drawn(2, 37, 37)
    naive = forms(q, k, lse, asked, backend="torch", **options)
    given = {"mask": CAUSAL, "score": score_mod(function, rate.to(DEVICE))}
    ours = forms(*(x.to(DEVICE) for x in (q, k, lse)), moved(asked), backend="triton", **given)
    for name, x in ours.items():
        torch.testing.assert_close(x.cpu(), naive[name], rtol=1e-4, atol=1e-4)


def test_strides_do_not_matter():
    q, k = torch.randn(2, 4, 9, 32)[..., ::2].transpose(1, 2), torch.randn(2, 2, 17, 16).transpose(1, 2)
    lse = attention_with_lse(q, k, k, mask=CAUSAL)[1].mT.contiguous().mT
    assert_forms(
        q,
        k,
        lse,
        {name: x.repeat_interleave(2, -1)[..., ::2] for name, x in drawn(2, 9, 17).items()},
        mask=CAUSAL,
    )


@pytest.mark.parametrize(
    "layout", [KVLayout.grouped(2, 16), KVLayout.latent(32, 16, storage_dtype=torch.int8)], ids=str
)
def test_over_a_cache(layout):
    call = store(layout, Sizes((40, 3, 21), (5, 2, 0), 16)).call(4, 4, options=["softcap", "alibi_slopes"])
    q, view, options = call.q.to(DEVICE), call.stored.view, {"mask": CAUSAL, **moved(call.options)}
    lse = cached_attention_with_lse(q, view, **options)[1]
    asked = {
        "rows": torch.tensor([3, 0], device=DEVICE),
        "at": torch.randint(-1, 41, (3, 4, 5), device=DEVICE),
    }
    ours, theirs = (forms(q, view, lse, asked, backend=name, **options) for name in ("triton", "torch"))
    for name, x in ours.items():
        torch.testing.assert_close(
            x, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_the_operator():
    """Under a mode the operator runs, whose results and shapes are those of the direct call."""
    q, k = torch.randn(1, 17, 2, 16, device=DEVICE), torch.randn(1, 17, 2, 16, device=DEVICE)
    lse = attention_with_lse(q, k, k, mask=CAUSAL, backend="torch")[1]
    wanted = attention_weights(q, k, lse, mask=CAUSAL, over="queries", backend="triton")
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        found = attention_weights(q, k, lse, mask=CAUSAL, over="queries", backend="triton")
    assert torch.equal(found, wanted)
    assert counter.get_total_flops() == 2 * 2 * 17 * 17 * 16
