"""The kernel that rounds q, k and v to e4m3 before a forward, and calls that use it."""

import pytest
import torch
from fp8_cases import E4M3
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor

from attnlib import CAUSAL, attention, attention_with_lse, explain, mask_mod, quantize_fp8, varlen_attention
from attnlib.backends._triton.dense import hopper_tables
from attnlib.backends._triton.dense.quantize import quantize
from attnlib.backends.operators import flat
from attnlib.backends.operators import quantize as quantized_by_torch
from attnlib.call.cache import key_of
from attnlib.call.call import Call, Packing, checked
from attnlib.dispatch.select import CALL_CACHE

needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
# The interpreter multiplies bf16 wrongly, so the backend refuses it there.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
IN_FP8 = {"compute_dtype": E4M3}


def rows(*lead: int, d: int, heads: int = 2, dtype: torch.dtype = HALF) -> Tensor:
    """Normal numbers, each head with a scale of its own."""
    return (torch.randn(*lead, heads, d) * 2.0 ** torch.arange(heads)[:, None]).to(DEVICE, dtype)


def assert_quantized(call: Call, tokens: int | None = None) -> None:
    """The bits are those of torch's functions; of packed rows, only up to ``tokens``."""
    a = flat(checked(call))
    pairs = zip(quantize(a)._asdict().items(), quantized_by_torch(a), strict=True)
    for n, ((name, ours), theirs) in enumerate(pairs):
        end = tokens if n < 3 else None
        assert ours.dtype == theirs.dtype, name
        assert_same_bits((ours.float()[:end], theirs.float()[:end]))


SIZES = [(1, 1, 8, 8), (65, 63, 24, 16), (33, 129, 59, 29), (5, 7, 128, 64), (9, 300, 192, 128)]
SIZES += [] if INTERPRETED else [(4096, 3001, 128, 128), (1000, 8192, 64, 64), (65, 127, 576, 512)]


@pytest.mark.parametrize(("s", "t", "d", "e"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_dense(s, t, d, e, dtype):
    q, k, v = (
        rows(2, s, d=d, heads=4, dtype=dtype),
        rows(2, t, d=d, dtype=dtype),
        rows(2, t, d=e, dtype=dtype),
    )
    assert_quantized(Call(q, CAUSAL, k=k, v=v, **IN_FP8))


def test_zeros_and_numbers_that_are_not_finite():
    q, k = rows(2, 65, d=24, heads=4), rows(2, 65, d=24)
    q[0, :, 1], q[0, 5, 2, 3], q[0, 64, 2, 4], q[1, 3, 0, 0] = 0, torch.nan, torch.inf, -torch.inf
    k[1], k[0, :, 0] = 0, torch.nan
    assert_quantized(Call(q, CAUSAL, k=k, v=k, **IN_FP8))


def test_strides():
    """Heads may be transposed, strided or reversed, and rows may begin anywhere."""
    q = rows(2, 4, d=32, heads=65).transpose(1, 2)
    k, v = rows(2, 130, d=32, heads=4)[:, ::2, ::2], rows(2, 65, d=37)[..., 5:]
    assert_quantized(Call(q, CAUSAL, k=k, v=v, **IN_FP8))
    expanded = rows(1, 65, d=32).expand(2, -1, -1, -1)
    assert_quantized(Call(q, CAUSAL, k=expanded, v=expanded, **IN_FP8))


@pytest.mark.parametrize("outside", [torch.nan, 60000.0])
def test_packed_rows_of_nobody_have_no_part(outside):
    lengths = (30, 0, 1, 65, 128) if INTERPRETED else (30, 0, 1, 650, 1280)
    cu, total = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE), sum(lengths)
    q, k, v = rows(total + 70, d=24, heads=4), rows(total + 70, d=24), rows(total + 70, d=16)
    for x in (q, k, v):
        x[total:] = outside
    assert_quantized(Call(q, CAUSAL, k=k, v=v, packing=Packing(cu, cu), **IN_FP8), total)


def test_keys_outside_the_bounds_have_no_part():
    q, k = rows(2, 9, d=24, heads=4), rows(2, 129, d=24)
    starts, ends = torch.tensor([[3, 0], [129, 64]], dtype=torch.int32, device=DEVICE)
    k[0, :3] = k[1, 64:] = 60000.0
    for bounds in ({"key_starts": starts}, {"key_ends": ends}, {"key_starts": starts, "key_ends": ends}):
        assert_quantized(Call(q, CAUSAL, k=k, v=k, **bounds, **IN_FP8))


def solved(q: Tensor, k: Tensor, v: Tensor, backend: str, mask=CAUSAL, **options) -> list[Tensor]:
    """The output and LSE of a call in e4m3, and its gradients."""
    tensors = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = attention_with_lse(*tensors, mask=mask, backend=backend, **options)
    return [out, lse, *torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), tensors)]


@pytest.mark.parametrize("backend", ["triton:generic"] if INTERPRETED else ["triton", "triton:generic"])
def test_attention_and_gradients(backend, monkeypatch):
    """The output equals the call on quantized inputs; gradients are within 4 % of torch's."""
    monkeypatch.setattr(hopper_tables, "FEW_KEYS", 0)
    d, s = (24, 40) if INTERPRETED else (128, 1000)
    q, k, v = (torch.randn(2, s, heads, d).to(DEVICE, HALF) for heads in (4, 2, 2))
    ours = solved(q, k, v, backend, **IN_FP8)
    x = quantize_fp8(q, k, v)
    out, lse = attention_with_lse(**x._asdict(), mask=CAUSAL, backend=backend)
    assert_same_bits((ours[0], out.to(HALF)), (ours[1], lse))
    theirs = solved(q.cpu(), k.cpu(), v.cpu(), "torch", **IN_FP8)
    for mine, golden in zip(ours, theirs, strict=True):
        assert (mine.cpu().float() - golden.float()).norm() <= 0.04 * golden.float().norm()


def test_functions_softcap_and_dropout():
    d, s = (24, 40) if INTERPRETED else (128, 1000)
    q, k, v = (torch.randn(2, s, heads, d).to(DEVICE, HALF) for heads in (4, 2, 2))
    found = []
    for backend, device in (("triton", DEVICE), ("torch", "cpu")):
        seed = torch.tensor([5], device=device)
        mask = CAUSAL & mask_mod(lambda b, h, i, j: (i + j) % 3 != 1)
        options = {"mask": mask, "softcap": 5.0, "dropout_p": 0.2, "dropout_seed": seed, **IN_FP8}
        found.append(solved(*(x.to(device) for x in (q, k, v)), backend, **options))
    for mine, golden in zip(*found, strict=True):
        seen = golden > -torch.inf
        mine, golden = mine.cpu()[seen].float(), golden[seen].float()
        assert (mine - golden).norm() <= 0.04 * golden.norm()


def test_packed_sequences_are_each_alone_to_the_bit():
    lengths = (30, 0, 33) if INTERPRETED else (2100, 0, 1500, 2700)  # for which the same kernels run
    cu, total = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE), sum(lengths)
    q, k = (rows(total + 9, d=64, heads=heads) for heads in (4, 2))
    for x in (q, k):
        x[total:] = torch.nan
    options = {"mask": CAUSAL, "backend": "triton", **IN_FP8}
    packed = varlen_attention(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    assert (packed[total:] == 0).all()
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        own = [x[None, start:end] for x in (q, k, k)]
        assert_same_bits((packed[start:end], attention(*own, **options)[0]))


@needs_gpu
def test_a_repeated_call_reads_new_tensors():
    first, second = ([n * rows(2, 700, d=128, heads=h) for h in (4, 2, 2)] for n in (1, 3))
    options = {"mask": CAUSAL, "backend": "triton", **IN_FP8}
    attention_with_lse(*first, **options)
    call = Call(second[0], CAUSAL, k=second[1], v=second[2], lse=True, **IN_FP8)
    assert CALL_CACHE.find(None, key_of(call, "triton")) is not None
    again, grads = attention_with_lse(*second, **options), solved(*second, "triton", **IN_FP8)
    repeated = solved(*second, "triton", **IN_FP8)
    CALL_CACHE.clear()
    assert_same_bits(*zip(again, attention_with_lse(*second, **options), strict=True))
    assert_same_bits(*zip(grads[:2], repeated[:2], strict=True))
    for x, y in zip(grads[2:], repeated[2:], strict=True):  # whose sums may have another order
        torch.testing.assert_close(x, y, rtol=2.0**-6, atol=1e-2)


@needs_gpu
def test_compiles_and_captures():
    inputs = [rows(2, 700, d=128, heads=heads) for heads in (4, 2, 2)]

    def call(q, k, v):
        return attention(q, k, v, mask=CAUSAL, backend="triton", **IN_FP8)

    expected = call(*inputs)
    assert_same_bits((torch.compile(call, fullgraph=True)(*inputs), expected))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs)
    with torch.cuda.graph(graph, stream=stream):
        captured = call(*inputs)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits((captured, expected))


@needs_gpu
def test_hopper_runs_its_own_kernels_for_both_passes():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    inputs = [rows(2, 4096, d=128, heads=heads).requires_grad_() for heads in (4, 2, 2)]
    found = explain(attention, *inputs, mask=CAUSAL, **IN_FP8).variant
    assert found == "Hopper forward, ordered Hopper backward"  # tests run deterministic algorithms


def test_offsets_and_bounds_of_any_stride():
    """A column of a table is read as its contiguous copy is."""
    q, k = rows(2, 16, d=16, heads=4), rows(2, 16, d=16)
    table = torch.tensor([[0, 6, 16], [2, 1, 9], [0, 0, 0]], dtype=torch.int32, device=DEVICE)
    starts, ends = table[:2, 1], table[:2, 2]
    options = {"mask": CAUSAL, "backend": "triton", **IN_FP8}
    found = [
        attention(q, k, k, key_starts=x, key_ends=y, **options)
        for x, y in ((starts, ends), (starts.contiguous(), ends.contiguous()))
    ]
    assert_same_bits(tuple(found))
    cu = torch.tensor([[0, 9], [5, 9], [16, 9]], dtype=torch.int32, device=DEVICE)[:, 0]
    found = [
        varlen_attention(q[0], k[0], k[0], cu_seqlens_q=x, cu_seqlens_k=x, **options)
        for x in (cu, cu.contiguous())
    ]
    assert_same_bits(tuple(found))
