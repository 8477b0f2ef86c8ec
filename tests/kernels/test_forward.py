"""The forward kernel, by the accuracy rule: every mask and option, any lengths, heads and strides."""

from itertools import pairwise

import pytest
import torch
from helpers import OPTIONS, assert_same_bits, make, problems
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import DEVICE, INTERPRETED, assert_forward, solve

from attnlib import CAUSAL, FULL, Mask, attention_with_lse, sliding, varlen_attention_with_lse
from attnlib.backends._triton.dense import tables

# The interpreter multiplies bf16 by its bit patterns.
DTYPES = (torch.float32, torch.float16) + (() if INTERPRETED else (torch.bfloat16,))
# One configuration each: a compiled kernel for every drawn set of options would take minutes.
SETS = (
    (),
    ("bounds",),
    ("softcap", "sinks"),
    ("alibi_slopes", "scale"),
    ("per_sequence_slopes", "dropout"),
    OPTIONS,
)

SHIPPED = tables.forward

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of NaN inputs


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    """So that short sequences have many tiles; `test_the_tables_own_tiles` runs the shipped ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "forward", lambda case, *, keys: tables.LaunchConfig(32, 16, 2, 4))
        yield


@pytest.mark.parametrize("options", SETS, ids="+".join)
@given(data=st.data())
def test_any_call(options, data):
    drawn = data.draw(problems(options=(), lengths=(0, 1, 17, 33, 50), dims=(16,), dtypes=DTYPES))
    b, s, h, d = drawn.q.shape
    sizes = b, s, drawn.k.shape[1], h, drawn.k.shape[2], d, drawn.v.shape[3]
    torch.manual_seed(s)
    assert_forward(make(*sizes, mask=drawn.mask, options=options, dtype=drawn.q.dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("d", "e"),
    [
        (1, 1),
        (7, 5),
        (40, 40),
        (59, 59),
        (160, 16),
        (96, 96),
        (192, 128),
        (264, 264),
        (333, 300),
        (512, 512),
        (576, 512),
    ],
)
def test_any_head_dimension(d, e, dtype):
    assert_forward(make(1, 35, 50, 2, 1, d, e, dtype=dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[INTERPRETED:], ids=str)  # fp32 has tiles of its own
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (192, 128), (256, 128), (320, 320), (512, 512)])
def test_the_tables_own_tiles(d, e, mask, dtype, monkeypatch):
    monkeypatch.setattr(tables, "forward", SHIPPED)
    assert_forward(make(1, 300, 333, 2, 1, d, e, mask=mask, dtype=dtype))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [CAUSAL, sliding(9), FULL, Mask(None, 2, 5)], ids=str)
@pytest.mark.parametrize("options", [(), ("alibi_slopes", "sinks", "dropout")], ids=("plain", "all"))
def test_packed_sequences_equal_each_alone(mask, options):
    queries, keys = [3, 0, 70, 1, 0, 33], [3, 5, 70, 40, 0, 31]
    p = make(1, sum(queries) + 4, sum(keys) + 2, 4, 2, 16, mask=mask, options=options)
    q, k, v = (x[0].to(DEVICE) for x in p.tensors)
    p.options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in p.options.items()}
    cu = [
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (queries, keys)
    ]
    offsets = {"cu_seqlens_q": cu[0].to(DEVICE), "cu_seqlens_k": cu[1].to(DEVICE)}
    out, lse = varlen_attention_with_lse(q, k, v, mask=mask, backend="triton", **offsets, **p.options)
    golden, golden_lse = varlen_attention_with_lse(
        *(x[0] for x in p.tensors),
        mask=mask,
        backend="reference",
        cu_seqlens_q=cu[0],
        cu_seqlens_k=cu[1],
        **{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in p.options.items()},
    )
    torch.testing.assert_close(out.cpu(), golden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), golden_lse, rtol=1e-5, atol=1e-5)
    assert not out[sum(queries) :].any()  # rows after the last offset
    for (a, b), (c, d) in zip(pairwise(cu[0].tolist()), pairwise(cu[1].tolist()), strict=True):
        if not options and b > a:
            alone, _ = attention_with_lse(
                q[None, a:b], k[None, c:d], v[None, c:d], mask=mask, backend="triton"
            )
            torch.testing.assert_close(out[a:b], alone[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [CAUSAL, sliding(9), Mask(4, 7), Mask(None, -3, 6)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_broken_number_stays_in_its_sequence(mask, value):
    """Those that see it are not finite. A value may spoil its own channel for others too, a key spoils nobody
    else.
    """
    clean = make(3, 70, 70, 2, 1, 16, mask=mask)
    before = solve(clean)
    poisoned = clean.change(v=clean.v.clone(), k=clean.k.clone())
    poisoned.v[0, 37, 0, 3] = value
    poisoned.k[1, 41] = value
    after = solve(poisoned)
    seen, kept = clean.visible(), torch.ones(3, 70, dtype=torch.bool)
    assert (~after[0][0, seen[0, :, 37], :, 3].isfinite()).all()
    assert (~after[0][1, seen[1, :, 41]].isfinite()).any(-1).all()
    kept[1, seen[1, :, 41]] = False
    others = torch.arange(16) != 3
    assert_same_bits((before[0][kept][..., others], after[0][kept][..., others]))
    assert_same_bits((before[0][1:][kept[1:]], after[0][1:][kept[1:]]))


def test_bounds_hide_whatever_is_beyond():
    p = make(2, 33, 70, 2, 1, 16, mask=FULL)
    p.options = {
        "key_starts": torch.tensor([3, 17], dtype=torch.int32),
        "key_ends": torch.tensor([70, 40], dtype=torch.int32),
    }
    before = solve(p)
    for n, (start, end) in enumerate(((3, 70), (17, 40))):
        for x in (p.k, p.v):
            x[n, :start], x[n, end:] = float("nan"), float("inf")
    assert_same_bits(*zip(before, solve(p), strict=True))


def test_any_strides():
    """Slices of one fused projection, heads first, expanded heads, an odd offset: the same bits as
    contiguous.
    """
    b, s, h, d = 2, 45, 4, 16
    fused = torch.randn(b, s, 3 * h, d, device=DEVICE)
    heads_first = torch.randn(b, h, s, d, device=DEVICE).transpose(1, 2)
    expanded = torch.randn(b, s, 1, d, device=DEVICE).expand(b, s, h, d)
    shifted = torch.randn(b, s, h, d + 1, device=DEVICE)[..., 1:]
    for q, k, v in (
        fused.split(h, 2),
        (heads_first, heads_first, fused[:, :, :h]),
        (shifted, expanded, shifted),
    ):
        results = []
        for tensors in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
            results.append(attention_with_lse(*tensors, mask=CAUSAL, backend="triton"))
        assert_same_bits(*zip(*results, strict=True))


def test_terms_of_any_strides():
    p = make(2, 33, 40, 4, 2, 16, options=("sinks", "per_sequence_slopes", "bounds"))
    before = solve(p)
    for name, x in p.options.items():
        p.options[name] = torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]
    assert not any(x.is_contiguous() for x in p.options.values())
    assert_same_bits(*zip(before, solve(p), strict=True))


@pytest.mark.parametrize(
    "offsets", [[0, 9, 4, 30], [5, 9, 20, 30], [0, -7, 12, 30], [0, 9, 1 << 30, 30], [99, 98, 97, 96]]
)
def test_wrong_offsets_stay_inside_the_tensors(offsets):
    """On a GPU nobody waits to check them; compute-sanitizer says that nothing beyond is touched."""
    q, cu = torch.randn(30, 2, 16, device=DEVICE), torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    varlen_attention_with_lse(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=CAUSAL, backend="triton")
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_rows_that_are_too_far_apart_are_refused():
    q = torch.empty(1, 1, 1, 16, device=DEVICE).as_strided((1, 1, 1, 16), (0, 1 << 24, 16, 1))
    with pytest.raises(
        NotImplementedError, match=r"rows of q lie 16777216 elements apart; call .contiguous\(\)"
    ):
        attention_with_lse(q, q, q, mask=CAUSAL, backend="triton")


def test_offsets_beyond_int32():
    """The second sequence, and the last rows, begin more than 2**31 elements into the storage."""
    if DEVICE == "cpu":
        pytest.skip("takes 18 GB")
    far, rows = (1 << 31) + 16, 1 << 23
    storage = torch.empty(2 * far, dtype=torch.float16, device=DEVICE)
    for strides in ((far, 16, 16, 1), (16, rows, 16, 1)):
        x = storage.as_strided((2, 300, 1, 16), strides)
        x.copy_(torch.randn(2, 300, 1, 16))
        assert x[-1, -1].data_ptr() - storage.data_ptr() > 2 * (1 << 31)
        near = attention_with_lse(*[x.contiguous()] * 3, mask=CAUSAL, backend="triton")
        assert_same_bits(*zip(attention_with_lse(x, x, x, mask=CAUSAL, backend="triton"), near, strict=True))


def test_calls_repeat_to_the_bit():
    p = make(1, 65, 65, 3, 1, 16, options=OPTIONS)
    first = solve(p)
    for _ in range(3 if DEVICE == "cpu" else 250):
        assert_same_bits(*zip(first, solve(p), strict=True))


def test_compiles_to_one_graph():
    if DEVICE == "cpu":
        pytest.skip("Dynamo cannot trace the interpreter")
    call = torch.compile(
        lambda q, k, v: attention_with_lse(q, k, v, mask=CAUSAL, backend="triton"),
        fullgraph=True,
        dynamic=True,
    )
    for s in (33, 70):
        q = torch.randn(2, s, 4, 16, device=DEVICE)
        assert_same_bits(
            *zip(
                call(q, q + 1, q - 1),
                attention_with_lse(q, q + 1, q - 1, mask=CAUSAL, backend="triton"),
                strict=True,
            )
        )


def test_the_operator():
    q = torch.randn(1, 5, 2, 16, device=DEVICE)
    arguments = (*(None,) * 15, 0, 0, 0, 0.25, None, 0.0, *(None,) * 5, False, False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.attnlib.triton_forward.default, (q, q + 1, q - 1, *arguments), test_utils=tests
    )


@pytest.mark.skipif(INTERPRETED, reason="numpy has no fused sums, and takes minutes")
def test_the_lse_of_many_keys_does_not_drift(monkeypatch):
    """A tile whose scores are all below the maximum changes nothing but by its weights."""
    monkeypatch.setattr(tables, "forward", SHIPPED)
    q, k = torch.randn(1, 64, 1, 64) * 4, torch.randn(1, 1 << 17, 1, 64)
    q, k = q.to(DEVICE, torch.bfloat16), k.to(DEVICE, torch.bfloat16)
    golden = torch.logsumexp(q[0, :, 0].double() @ k[0, :, 0].double().T / 8, -1)
    _, lse = attention_with_lse(q, k, k, mask=FULL, backend="triton")
    assert (lse[0, 0] - golden).abs().max() < 3e-5


def test_packed_calls_of_no_sequence():
    """All rows belong to nobody, and have no gradient."""
    nowhere = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for tokens in (0, 5):
        q = torch.randn(tokens, 2, 16, device=DEVICE, requires_grad=True)
        offsets = {"cu_seqlens_q": nowhere, "cu_seqlens_k": nowhere}
        out, lse = varlen_attention_with_lse(q, q, q, **offsets, mask=CAUSAL, backend="triton")
        assert not out.any()
        assert (lse == -torch.inf).all()
        assert not torch.autograd.grad(out.sum(), q)[0].any()
