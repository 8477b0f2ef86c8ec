"""fp8 inputs on the Triton backend: the plain kernels, and Hopper's own where they run."""

import pytest
import torch
from fp8_cases import E4M3, HALF_OF_BF16, TO_E4M3, TO_FP16, assert_fp8, quantized
from helpers import Problem, assert_same_bits, make, problems
from hypothesis import given
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    Mask,
    attention,
    attention_with_lse,
    cached_attention,
    explain,
    quantize_fp8,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.backends._triton.dense import hopper_tables
from attnlib.backends.operators import flat, flat_over_view
from attnlib.call.cache import key_of
from attnlib.call.call import Call, checked
from attnlib.dispatch.select import CALL_CACHE
from attnlib.fp8 import Descales
from attnlib.masks import selected

MASKS = (FULL, CAUSAL, sliding(100), Mask(150), Mask(None, 0, 40), CAUSAL.shift(-70), CAUSAL.shift(30))
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (128, 64))
NAMES = ("triton:generic",) if INTERPRETED else ("triton", "triton:generic")
# Plain kernels differ from those of 16 bits in how they load alone.
DIMS = (
    [("triton:generic", 64)]
    if INTERPRETED
    else [("triton:generic", 64), *(("triton", d) for d in (64, 128, 256))]
)
CASES = [("triton:generic", d, e, mask) for d, e in (HEADS[0], HEADS[2]) for mask in MASKS[1:3]]
CASES += [] if INTERPRETED else [("triton", d, e, mask) for d, e in HEADS for mask in MASKS]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _however_few_keys(monkeypatch):
    monkeypatch.setattr(hopper_tables, "FEW_KEYS", 0)


def moved(x: tuple) -> dict[str, Tensor]:
    return {name: t.to(DEVICE) for name, t in x._asdict().items()}


def assert_right(problem: Problem, name: str) -> None:
    """What rounding explains: of P to fp16 in the plain kernels, to e4m3 in Hopper's own."""
    x = quantized(problem)
    options = {name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in problem.options.items()}
    call = {**moved(x), **options, "mask": problem.mask, "backend": name}
    of_p = TO_E4M3 if explain(attention, **call).variant == "Hopper" else TO_FP16
    results = tuple(t.cpu() for t in attention_with_lse(**call))
    # The interpreter cuts fp32 off where a GPU rounds it to bf16.
    assert_fp8(problem, x, results, of_p=of_p, of_out=(1 + INTERPRETED) * HALF_OF_BF16)


@given(problem=problems(dims=(8, 16, 24), lengths=(0, 1, 7, 17, 33)))
def test_any_call(problem):
    assert_right(problem, "triton:generic")


@pytest.mark.parametrize(("name", "d", "e", "mask"), CASES)
def test_any_head(name, d, e, mask):
    lengths = ((65, 129),) if INTERPRETED else ((1, 65), (129, 129), (320, 129), (63, 700), (300, 1030))
    for s, t in lengths:
        assert_right(make(2, s, t, 6, 2, d, e, mask=mask), name)


@pytest.mark.parametrize(
    "options",
    [("bounds",), ("softcap", "sinks"), ("alibi_slopes", "scale"), ("per_sequence_slopes",), ("dropout",)],
    ids="+".join,
)
@pytest.mark.parametrize(("name", "d"), DIMS)
def test_any_options(name, d, options):
    s, t = (33, 70) if INTERPRETED else (200, 333)
    for mask in (CAUSAL, sliding(70)):
        assert_right(make(3, s, t, 4, 2, d, mask=mask, options=options), name)


@pytest.mark.parametrize(("name", "d"), DIMS)
def test_maxima_that_move_far(name, d):
    for scale in (0.05, 4.0):
        s, t = (33, 130) if INTERPRETED else (300, 900)
        assert_right(make(1, s, t, 2, 1, d, mask=CAUSAL, sigma=scale), name)


@needs_gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_that_rise_from_block_to_block(d):
    """Where they do, probabilities relative to the maxima so far are too large, and the block is done
    again.
    """
    for mask in (CAUSAL, FULL, sliding(300)):
        for rise in (-0.04, 0.04):
            problem = make(1, 300, 900, 2, 1, d, mask=mask)
            problem.q[..., 0] = 8.0
            problem.q[:, ::7, :, 0] = -8.0  # and falls for some rows
            problem.k[..., 0] = (rise * torch.arange(900.0) * d**0.5 / 8)[None, :, None]
            assert_right(problem, "triton")


@needs_gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_means_over_many_keys_are_kept(d):
    """The tensor cores, left to themselves, lose half of them."""
    q, k, v = (torch.randn(1, n, 1, d, device=DEVICE) for n in (64, 65536, 65536))
    x = quantize_fp8(q, k, 20 * v + 100)
    mean = (x.v.float() * x.v_descale).mean(1, keepdim=True)
    out = attention(**x._asdict(), mask=FULL, backend="triton").float()
    assert ((out - mean).mean() / mean.mean()).abs() < 2.0**-7


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


@pytest.mark.parametrize("mask", [CAUSAL, sliding(90)], ids=str)
@pytest.mark.parametrize(("name", "d"), DIMS)
def test_packed_sequences_are_each_alone_to_the_bit(name, d, mask):
    """Their scales too; and what is around them may be NaN, or of nobody."""
    lengths = (30, 1, 0, 65) if INTERPRETED else (130, 1, 0, 570, 65, 200)
    cu, total = offsets(*lengths), sum(lengths)
    q, k, v = (torch.randn(total + 7, h, d).to(DEVICE) for h in (4, 2, 2))
    for n, length in enumerate(lengths):
        q[cu[n] :][:length] *= 2.0**n
    for x in (q, k, v):
        x[total:] = torch.nan
    bytes_ = quantize_fp8(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "mask": mask, "backend": name}
    out, lse = varlen_attention_with_lse(**bytes_._asdict(), **packing)
    assert (out[total:] == 0).all()
    for n, length in enumerate(lengths):
        rows = slice(int(cu[n]), int(cu[n]) + length)
        y = [*(t[None, rows] for t in bytes_[:3]), *(t[n : n + 1] for t in bytes_[3:])]
        own = attention_with_lse(**dict(zip(bytes_._fields, y, strict=True)), mask=mask, backend=name)
        assert_same_bits((out[rows], own[0][0]), (lse[:, rows], own[1][0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_outside_reaches_nothing(name):
    q, k, v = (torch.randn(2, 150, h, 64) for h in (4, 2, 2))
    x = quantize_fp8(q, k, v)
    ends = torch.tensor([70, 129], dtype=torch.int32, device=DEVICE)
    call = {"key_ends": ends, "mask": FULL, "backend": name}
    clean = attention(**moved(x), **call)
    for n, end in enumerate(ends.tolist()):
        for t in (x.k, x.v):
            t[n, end:] = torch.full_like(t[n, end:].float(), torch.nan).to(E4M3)
    assert_same_bits((attention(**moved(x), **call), clean))


def test_last_dimensions_in_any_strides():
    x = quantize_fp8(*(torch.randn(2, 40, h, 64) for h in (4, 2, 2)))
    odd = {name: t.mT.contiguous().mT for name, t in moved(x).items()}
    found = (attention(**call, mask=CAUSAL, backend="triton") for call in (odd, moved(x)))
    assert_same_bits(tuple(found))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5] if INTERPRETED else [1, 5, 200])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_over_a_cache_q_may_be_bytes(listed, latent, tokens, packed):
    """Equal to q in bf16 with the same numbers, a factor of each head apart."""
    if INTERPRETED and latent:
        pytest.skip("the interpreter multiplies bf16, in which rotary keys are, wrongly")
    size = {"dtype": torch.bfloat16, "storage_dtype": E4M3}
    layout = KVLayout.latent(128, 64, **size) if latent else KVLayout.grouped(2, 128, **size)
    cache = KVCache.paged([layout], pages=64, page_size=64, max_sequences=2, device=DEVICE)
    first, second = cache.admit(2)
    for count in ({first: 70, second: 300}, {first: tokens, second: 1} if packed else tokens):
        lead = (sum(count.values()),) if isinstance(count, dict) else (2, count)
        sizes = ((128,), (64,)) if latent else ((2, 128), (2, 128))
        with cache.step(count) as (kv,):
            view = kv.append(*(torch.randn(*lead, *n).to(DEVICE, torch.bfloat16) for n in sizes))
    q = torch.randn(*lead, 4, 192 if latent else 128).to(E4M3).float().to(DEVICE)
    descale = 2.0 ** torch.randint(-2, 3, (2, 4)).to(DEVICE)
    owner = torch.tensor([0] * tokens + [1]) if packed else torch.arange(2)[:, None].expand(2, tokens)
    wide = (q * descale[owner.to(DEVICE)][..., None]).bfloat16()
    entries = torch.tensor([4, 0, 1], dtype=torch.int32).expand(*lead, 1, 3)  # blocks of 64 tokens
    near, mask = (CAUSAL & selected(entries.to(x), 64) if listed else CAUSAL for x in ("cpu", DEVICE))
    call = {"mask": mask, "sinks": torch.randn(4, device=DEVICE)}
    ours = cached_attention(q.to(E4M3), view, q_descale=descale, backend="triton", **call)
    expected = cached_attention(
        wide.cpu(), _on_cpu(view), mask=near, sinks=call["sinks"].cpu(), backend="torch"
    )
    assert (ours.cpu() - expected).norm() <= 0.01 * expected.norm()  # torch rounds what is stored to bf16
    if not INTERPRETED:
        theirs = cached_attention(wide, view, backend="triton", **call)
        torch.testing.assert_close(ours, theirs, rtol=2.0**-6, atol=2e-3)


def _on_cpu(view):
    planes = {
        name: None if x is None else x.cpu() for name in FIELDS if (x := getattr(view, name)) is not None
    }
    if view.layout.is_latent:
        planes |= {"v": planes["k"], "v_scale": planes["k_scale"]}
    return type(view)(view.layout, view.page_size, **planes)


FIELDS = ("k", "v", "table", "starts", "lengths", "k_rope", "k_scale", "v_scale", "cu_seqlens_q")


def call_of(x: dict[str, Tensor]) -> Call:
    return Call(
        x["q"], CAUSAL, k=x["k"], v=x["v"], descales=Descales(*(x[name] for name in Descales._fields))
    )


def test_the_operators():
    x = moved(quantize_fp8(*(torch.randn(2, 19, h, 16) for h in (4, 2, 2))))
    arguments = flat(checked(call_of(x)))
    torch.library.opcheck(torch.ops.attnlib.triton_forward.default, arguments, test_utils="test_faketensor")
    layout = KVLayout.grouped(2, 16, dtype=torch.bfloat16, storage_dtype=E4M3)
    cache = KVCache.contiguous([layout], max_sequences=2, max_length=32, device=DEVICE)
    cache.admit(2)
    with cache.step(19, replay=True) as (kv,):
        arguments = flat_over_view(
            checked(Call(x["q"], CAUSAL, kv=kv.view(), descales=Descales(x["q_descale"])))
        )
    torch.library.opcheck(torch.ops.attnlib.triton_cached.default, arguments, test_utils="test_faketensor")


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_call_reads_new_bytes_and_new_descales(name):
    first, second = (
        moved(quantize_fp8(*(factor * torch.randn(2, 700, h, 128) for h in (4, 2, 2)))) for factor in (1, 3)
    )
    attention_with_lse(**first, mask=CAUSAL, backend=name)
    descales = Descales(*(second[n] for n in Descales._fields))
    call = Call(second["q"], CAUSAL, k=second["k"], v=second["v"], descales=descales, lse=True)
    assert CALL_CACHE.find(None, key_of(call, name)) is not None
    again = attention_with_lse(**second, mask=CAUSAL, backend=name)
    CALL_CACHE.clear()
    assert_same_bits(*zip(again, attention_with_lse(**second, mask=CAUSAL, backend=name), strict=True))
    refused = (
        call._replace(descales=call.descales._replace(q_descale=second["q_descale"].requires_grad_())),
        call._replace(descales=call.descales._replace(k_descale=second["k_descale"].mT.contiguous().mT)),
    )
    assert all(key_of(other, name) is None for other in refused)


@needs_gpu
def test_a_repeated_step_reads_new_descales():
    layout = KVLayout.grouped(2, 128, dtype=torch.bfloat16, storage_dtype=E4M3)
    cache = KVCache.paged([layout], pages=16, page_size=64, max_sequences=2, device=DEVICE)
    cache.admit(2)
    with cache.step(300) as (kv,):
        kv.append(*(torch.randn(2, 300, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
    with cache.read(1) as (kv,):
        view = kv.view()
        for _ in range(3):
            q, descale = (
                torch.randn(2, 1, 4, 128, device=DEVICE).to(E4M3),
                torch.rand(2, 4, device=DEVICE) + 0.5,
            )
            ours = cached_attention(q, view, mask=CAUSAL, q_descale=descale)
            assert CALL_CACHE.count(view) == 1
            wide = cached_attention(
                (q.float() * descale[:, None, :, None]).bfloat16(), view, mask=CAUSAL, scale=128**-0.5
            )
            CALL_CACHE.clear()
            cached_attention(q, view, mask=CAUSAL, q_descale=descale)
            torch.testing.assert_close(ours, wide, rtol=2.0**-5, atol=1e-2)


@needs_gpu
@pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores:UserWarning"
)  # quantize_fp8 turns q and k in fp32
def test_compiles_and_captures():
    def call(q, k, v):
        return attention(**quantize_fp8(q, k, v, incoherent=True)._asdict(), mask=CAUSAL, backend="triton")

    inputs = [torch.randn(2, 700, heads, 128, device=DEVICE) for heads in (4, 2, 2)]
    expected = call(*inputs)
    torch.testing.assert_close(
        torch.compile(call, fullgraph=True)(*inputs), expected, rtol=2.0**-4, atol=2e-2
    )
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs)
    with torch.cuda.graph(graph, stream=stream):
        captured = call(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits((captured, expected))
