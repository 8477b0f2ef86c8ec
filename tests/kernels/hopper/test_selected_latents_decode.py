"""Hopper's kernel for selected tokens of latents in a cache, against the torch backend in fp64."""

from dataclasses import replace

import pytest
import torch
from decode_helpers import Call, Sizes, moved_pages, near, plan_for, store
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED, wait_for
from selected_cases import lists
from torch import Tensor

from attnlib import (
    CAUSAL,
    FULL,
    KVLayout,
    Mask,
    attention_with_lse,
    cached_attention_with_lse,
    explain,
    masks,
    sliding,
)
from attnlib.masks import selected

LATENT = KVLayout.latent(512, 64, dtype=torch.bfloat16)
LENGTHS, STARTS = (3000, 5, 0, 513, 2000, 64), (100, 0, 0, 512, 0, 0)
PACKED = (1, 3, 0, 1, 2, 1)
BYTES = torch.int8, torch.float8_e4m3fn

if INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU: Gluon has no interpreter", allow_module_level=True)


@pytest.fixture
def divided(monkeypatch):
    """Call it for plans of a device with so many multiprocessors: lists are not divided, or often."""
    yield lambda processors: plan_for(monkeypatch, processors=processors)
    monkeypatch.undo()
    plan_for(monkeypatch)


def call_of(
    heads=128, counts=1, page_size=64, mask=CAUSAL, options=(), dtype=torch.bfloat16, stored=None
) -> Call:
    layout = replace(LATENT, dtype=dtype, storage_dtype=stored)
    return store(layout, Sizes(LENGTHS, STARTS, page_size)).call(counts, heads, mask, options)


def listed(call: Call, n: int, tokens: int = 3000, seed: int = 0) -> Tensor:
    """Lists for all heads: with repeats, -1, tokens that do not exist, and empty ones among them."""
    *rows, _, _ = call.q.shape
    return lists(1, torch.Size(rows).numel(), 1, n, tokens, seed=seed).reshape(*rows, 1, n)


def attend(call: Call, indices: Tensor, backend: str = "triton") -> tuple[Tensor, Tensor]:
    """The output and LSE of a call by a backend, on the CPU; torch's are computed there too."""
    device, view = (DEVICE, call.stored.view) if backend == "triton" else ("cpu", near(call.stored.view))
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    mask = call.mask & selected(indices.to(device))
    found = cached_attention_with_lse(call.q.to(device), view, mask=mask, backend=backend, **options)
    wait_for()
    return tuple(x.cpu() for x in found)


def variant(call: Call, indices: Tensor, size: int = 1) -> str:
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in call.options.items()}
    mask = call.mask & selected(indices.to(DEVICE), size)
    run = cached_attention_with_lse
    return explain(run, call.q.to(DEVICE), call.stored.view, mask=mask, backend="triton", **options).variant


def exact(call: Call, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The output and LSE in fp64, of each sequence without a cache."""
    out = call.q.new_zeros(*call.q.shape[:-1], 512, dtype=torch.float64)
    lse = torch.full((*call.q.shape[:-3], *call.q.shape[-3:-1][::-1]), -torch.inf, dtype=torch.float64)
    of_lists = indices.flatten(-2).transpose(-1, -2)  # in the form of an LSE, so that call.of() can part it
    for n, problem in enumerate(call.problems()):
        own_out, own_lse = call.of(n, out, lse)
        own = call.of(n, out, of_lists)[1].transpose(1, 2).unflatten(-1, indices.shape[-2:])
        options = problem.options | {"key_starts": problem.options["key_starts"].int()}
        found = attention_with_lse(
            *problem.tensors, mask=call.mask & selected(own), backend="torch", **options
        )
        own_out.copy_(found[0])
        own_lse.copy_(found[1])
    return out, lse


def assert_right(call: Call, indices: Tensor) -> None:
    """The Hopper kernel runs, with an error of at most twice that of the torch backend in the same dtype."""
    assert variant(call, indices) == "Hopper"
    largest = max((one.change(mask=FULL).largest_score() for one in call.problems()), default=0.0)
    results = attend(call, indices), attend(call, indices, "torch"), exact(call, indices)
    for ours, theirs, right in zip(*results, strict=True):
        assert torch.equal(ours == -torch.inf, right == -torch.inf)
        assert ours.dtype == theirs.dtype
        noise = 4 * torch.finfo(ours.dtype).eps + 2 * torch.finfo(torch.float32).eps * largest
        noise *= max(1, right.nan_to_num(0, 0, 0).abs().max().item())
        ours, theirs, right = (x.double().nan_to_num(torch.nan, 0, 0) for x in (ours, theirs, right))
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + noise


@pytest.mark.parametrize("processors", [1, 132, 5000])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 129, 300, 2048])
@pytest.mark.parametrize("heads", [64, 128])
def test_any_length_of_lists(heads, n, processors, divided):
    """Divided among programs or not. Tokens that nobody sees are NaN, and entries of the table garbage."""
    divided(processors)
    for dtype in (torch.bfloat16, torch.float16):
        call = call_of(heads, dtype=dtype)
        assert_right(call, listed(call, n))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("page_size", [64, 16, 1, 24, 256, None])
@pytest.mark.parametrize("counts", [1, 5, PACKED], ids=str)
def test_any_page_and_new_tokens(counts, page_size, processors, divided):
    divided(processors)
    call = call_of(128, counts, page_size)
    assert_right(call, listed(call, 300))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("options", [("softcap",), ("sinks",), ("softcap", "sinks", "scale")], ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(700), Mask(None, 0, 90), Mask(900, -2)], ids=str)
def test_any_mask_and_option(mask, options, processors, divided):
    divided(processors)
    for counts in (2, PACKED):
        call = call_of(64, counts, 16, mask, options)
        assert_right(call, listed(call, 700))


@pytest.mark.parametrize("processors", [1, 132, 5000])
@pytest.mark.parametrize("n", [1, 64, 129, 2048])
@pytest.mark.parametrize("stored", BYTES, ids=str)
def test_stored_bytes(stored, n, processors, divided):
    divided(processors)
    for dtype in (torch.bfloat16, torch.float16):
        call = call_of(64, 2, 64, CAUSAL, ("softcap", "sinks"), dtype, stored)
        assert_right(call, listed(call, n))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("page_size", [64, 16, 1, 24, None])
@pytest.mark.parametrize("stored", BYTES, ids=str)
def test_bytes_give_the_same_bits_as_their_values_in_16_bits(stored, page_size, processors, divided):
    """With lists of any length, and of new tokens of any number."""
    divided(processors)
    for counts, n in ((1, 1), (1, 63), (5, 65), (PACKED, 200), (2, 700), (1, 2048)):
        call = call_of(128, counts, page_size, stored=stored)
        view, indices = call.stored.view, listed(call, n)
        k = (view.k.float() * view.k_scale[..., None]).bfloat16()
        wide = call.over(layout=LATENT, k=k, v=k, k_scale=None, v_scale=None)
        assert variant(call, indices) == variant(wide, indices) == "Hopper"
        assert_same_bits(*zip(attend(wide, indices), attend(call, indices), strict=True))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("n", [0, 1, 3, 200])
@pytest.mark.parametrize("stored", [None, *BYTES], ids=str)
def test_rows_that_select_nothing(stored, n, processors, divided):
    """Give 0, and the LSE of the sink if there is one."""
    divided(processors)
    for options in ((), ("sinks",)):
        call = call_of(options=options, stored=stored)
        indices = torch.full((len(LENGTHS), 1, 1, n), 2**31 - 1, dtype=torch.int32)
        indices[..., 1::2] = -1
        out, lse = attend(call, indices)
        assert not out.any()
        sinks = call.options.get("sinks", torch.full((128,), -torch.inf))
        torch.testing.assert_close(lse, sinks.float()[None, :, None].expand_as(lse))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("stored", [None, *BYTES], ids=str)
def test_tokens_that_are_not_selected_are_not_read(stored, processors, divided):
    divided(processors)
    layout = replace(LATENT, storage_dtype=stored)
    call = store(layout, Sizes((3000,), page_size=16)).call(1, 128, Mask(2500, -300))
    indices, view = listed(call, 200, seed=1), call.stored.view
    before = attend(call, indices)
    hidden = torch.ones(3000, dtype=torch.bool)
    chosen = indices[(indices >= 499) & (indices <= 2699)].long()
    hidden[chosen] = False
    at = hidden.nonzero()[:, 0].to(DEVICE)
    for plane in (view.k if stored is None else view.k_scale, view.k_rope):
        plane[view.table[0, at // 16].long(), at % 16] = torch.nan
    assert len(chosen)
    assert_same_bits(*zip(before, attend(call, indices), strict=True))


@pytest.mark.parametrize("stored", [None, *BYTES], ids=str)
def test_other_pages_are_the_same_bits_a_hundred_times(stored, divided):
    for processors in (1, 5000):
        divided(processors)
        call = call_of(counts=2, page_size=16, stored=stored)
        indices = listed(call, 2048)
        first = attend(call, indices)
        assert_same_bits(*zip(first, attend(moved_pages(call), indices), strict=True))
        for _ in range(100):
            assert_same_bits(*zip(first, attend(call, indices), strict=True))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("stored", [None, *BYTES], ids=str)
def test_calls_that_follow_each_other_at_once(stored, processors, divided):
    """Their kernels start before the ones before them end, and their lists take the same memory."""
    divided(processors)
    call = call_of(counts=2, page_size=16, stored=stored)
    q, view = call.q.to(DEVICE), call.stored.view
    chosen = [listed(call, n, seed=n).to(DEVICE) for n in (2048, 2040, 130)]
    apart = []

    def run(indices: Tensor) -> tuple[Tensor, Tensor]:
        return cached_attention_with_lse(q, view, mask=CAUSAL & selected(indices), backend="triton")

    for indices in chosen:
        apart.append(run(indices))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(chosen[n % 3]) for n in range(30)]
    graph.replay()
    for found in (captured, [run(chosen[n % 3]) for n in range(300)]):
        for n, one in enumerate(found):
            assert_same_bits(*zip(one, apart[n % 3], strict=True))


@pytest.mark.parametrize("processors", [1, 5000])
@pytest.mark.parametrize("stored", [None, *BYTES], ids=str)
def test_a_graph_takes_other_entries_and_lengths(stored, processors, divided):
    divided(processors)
    call = call_of(counts=2, page_size=16, stored=stored)
    view, q, indices = call.stored.view, call.q.to(DEVICE), listed(call, 700).to(DEVICE)
    run = lambda: cached_attention_with_lse(q, view, mask=CAUSAL & selected(indices), backend="triton")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    indices.copy_(indices.flip(-1) // 2)
    view.lengths.sub_(2).clamp_(min=0)
    graph.replay()
    assert_same_bits(*zip(captured, run(), strict=True))


def test_other_calls_are_for_the_generic_kernel():
    call = call_of()
    indices = listed(call, 65)
    assert variant(call, indices, 2) == "plain"
    assert variant(replace(call, mask=CAUSAL & masks.dilated(2)), indices) == "plain"
    assert variant(call_of(96), indices) == "plain"
    assert variant(call_of(options=("alibi_slopes",)), indices) == "plain"
    assert variant(call_of(96, stored=torch.int8), indices) == "plain"
