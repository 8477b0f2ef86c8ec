"""The Triton backend's operators as torch sees them, interpreted and on a GPU."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attnlib import (
    CAUSAL,
    CHECKPOINT_SAVE_OPS,
    FLOP_FORMULAS,
    attention,
    attention_with_lse,
    sliding,
    varlen_attention,
    varlen_attention_with_lse,
)
from attnlib.backends import _triton as triton
from attnlib.call.call import Call, Score, checked

FORWARD, BACKWARD = torch.ops.attnlib.triton_forward, torch.ops.attnlib.triton_backward
solve = partial(attention, mask=CAUSAL, backend="triton")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random ``[..., s, h, d]`` that is dense in the order h, s, d, as transposed heads are."""
    *batch, s, h, d = shape
    return torch.randn(*batch, h, s, d).to(DEVICE, dtype).transpose(-2, -3)


def leaves(tokens: int = 19, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [random(1, tokens, heads, 16, dtype=dtype).requires_grad_() for heads in (2, 1, 1)]


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def arguments(case: str) -> tuple:
    """Arguments of attnlib::triton_forward."""
    e = 24 if case == "everything" else 16
    q, k, v = random(2, 19, 2, 16), random(2, 23, 1, 16), random(2, 23, 1, e)
    if case == "plain":
        return (q[:1], k[:1], v[:1], *(None,) * 15, 0, 0, 0, 0.3, None, 0.0, *(None,) * 5, False, False)
    if case == "packed":
        slopes = torch.rand(2, device=DEVICE)
        offsets = int32(0, 2, 2, 18), int32(0, 5, 9, 23)
        more = 0, 0, 0, 0.3, None, 0.0, 17, 17, None, None, None, False, False
        return (q[0], k[0], v[0], slopes, *(None,) * 3, *offsets, *(None,) * 9, *more)
    seed = torch.tensor([3], device=DEVICE)
    slopes, sinks = torch.rand(2, 2, device=DEVICE), torch.randn(2, device=DEVICE)
    return (
        q,
        k,
        v,
        slopes,
        sinks,
        int32(0, 2),
        int32(23, 6),
        None,
        None,
        seed,
        *(None,) * 7,
        5,
        0,
        0,
        0,
        0.3,
        2.0,
        0.2,
        *(None,) * 5,
        False,
        False,
    )


@pytest.mark.parametrize("case", ["plain", "everything", "packed"])
def test_the_operators_are_what_they_say(case):
    forward = arguments(case)
    torch.library.opcheck(FORWARD.default, forward)
    out, lse = FORWARD(*forward)
    dlse = None if case == "plain" else torch.randn_like(lse)
    torch.library.opcheck(BACKWARD.default, (random(*out.shape), dlse, out, lse, *forward))


@pytest.mark.parametrize("lse", [False, True])
def test_a_prepared_call_has_the_gradients_of_the_first(lse):
    """To the bit, of its results and for any of its tensors, also where no LSE is differentiated."""
    tensors = leaves(dtype=torch.float16)
    run = triton.backend.prepare(checked(Call(*tensors[:1], CAUSAL, Score(), *tensors[1:], lse=lse)))
    for of in ((0, 1), (0,), (1,)) if lse else ((0,),):
        for asked in (tensors, tensors[:1], tensors[1:]):
            found = []
            for results in (run(*tensors), attention_with_lse(*tensors, mask=CAUSAL, backend="triton")):
                found.append(torch.autograd.grad(sum(results[n].float().sin().sum() for n in of), asked))
            assert_same_bits(*zip(*found, strict=True))


def test_compiles_to_one_graph_and_at_most_twice():
    counter = CompileCounterWithBackend("aot_eager")

    def loss(q, k, v, sinks):
        out, lse = attention_with_lse(q, k, v, mask=CAUSAL, sinks=sinks, softcap=5.0, backend="triton")
        return (out * out).sum() + lse.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for tokens in (19, 33, 47):
        inputs = [*leaves(tokens), torch.randn(2, device=DEVICE, requires_grad=True)]
        ours, plain = (torch.autograd.grad(call(*inputs), inputs) for call in (compiled, loss))
        torch.testing.assert_close(ours, plain)
    assert counter.frame_count <= 2


def test_compiles_without_gradients_and_packed():
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, offsets):
        return varlen_attention(
            q, k, k * 2, cu_seqlens_q=offsets, cu_seqlens_k=offsets, mask=sliding(4), backend="triton"
        )

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for cuts in ((0, 4, 9), (0, 0, 9), (0, 1, 7)):
        inputs = (random(9, 4, 16), random(9, 2, 16), int32(*cuts))
        torch.testing.assert_close(compiled(*inputs), call(*inputs))
    assert counter.frame_count == 1


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "whole": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, list(CHECKPOINT_SAVE_OPS)),
    },
}


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpointing_changes_no_bit_and_may_keep_attention(way):
    inputs = leaves()

    def block(q, k, v):
        return solve(q.sin(), k.sin(), v.sin(), softcap=3.0).cos()

    plain = torch.autograd.grad(block(*inputs).sum(), inputs)
    with Calls() as calls:
        checkpoint(block, *inputs, **CHECKPOINTS[way]).sum().backward()
    assert_same_bits(*zip(plain, [x.grad for x in inputs], strict=True))
    assert calls.seen.count(FORWARD.default) == (1 if way == "selective" else 2)
    assert calls.seen.count(BACKWARD.default) == 1


class Calls(TorchDispatchMode):
    """Lists the operators that really run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# The interpreter reads no bf16 well.
@pytest.mark.parametrize(
    "dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16], ids=str
)
def test_autocast_is_a_cast_of_all_three(dtype):
    inputs = leaves()
    with torch.autocast(DEVICE, dtype):
        out = solve(*inputs)
    assert out.dtype == dtype
    by_hand = solve(*(x.to(dtype) for x in inputs))
    ours, expected = (torch.autograd.grad(x.float().sin().sum(), inputs) for x in (out, by_hand))
    assert {grad.dtype for grad in ours} == {torch.float32}
    assert_same_bits((out, by_hand), *zip(ours, expected, strict=True))


def test_flops_are_counted_with_and_without_gradients():
    product = 2 * 2 * 19 * 19 * 16  # of two heads
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        solve(*leaves()).sum().backward()
        with torch.no_grad():
            solve(*leaves())
    assert counter.get_flop_counts()["Global"] == {FORWARD: 4 * product, BACKWARD: 5 * product}


@pytest.mark.filterwarnings(
    "ignore:Warning. Profiler clears events:UserWarning"
)  # torch 2.11, once a process
def test_a_profiler_sees_the_operators():
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        solve(*leaves()).sum().backward()
        with torch.no_grad():
            solve(*leaves())
    calls = {event.key: event.count for event in trace.key_averages()}
    assert calls["attnlib::triton_forward"] == 2
    assert calls["attnlib::triton_backward"] == 1


@pytest.mark.parametrize("options", [{}, {"sinks": True}], ids=("joins the batch", "a loop"))
def test_vmap_keeps_gradients_and_function_transforms_are_refused(options):
    q = random(3, 1, 9, 2, 16).requires_grad_()
    sinks = torch.rand(2, device=DEVICE) if options else None

    def call(x):
        return attention_with_lse(x, x, x, mask=CAUSAL, sinks=sinks, backend="triton")

    together = torch.vmap(call)(q)
    each = [torch.stack(x) for x in zip(*map(call, q), strict=True)]
    ours, theirs = (
        torch.autograd.grad((out * out).sum() + lse.sin().sum(), q) for out, lse in (together, each)
    )
    torch.testing.assert_close(together, tuple(each))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: call(x)[0].sum())(q[0].detach())


def test_an_exported_call_keeps_gradients():
    class Call(torch.nn.Module):
        def forward(self, q, k):
            out, lse = attention_with_lse(q, k, k, mask=CAUSAL, backend="triton")
            return (out * out).sum() + lse.sin().sum()

    q, k = random(1, 9, 4, 16).requires_grad_(), random(1, 9, 2, 16).requires_grad_()
    exported = torch.export.export(Call(), (q, k)).module()
    torch.testing.assert_close(
        torch.autograd.grad(exported(q, k), (q, k)), torch.autograd.grad(Call()(q, k), (q, k))
    )


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA graph")
@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_step_replays_on_other_inputs(packed):
    inputs = [random(*(() if packed else (2,)), 130, heads, 64).requires_grad_() for heads in (4, 2, 2)]
    sinks, slopes = (torch.rand(4, device=DEVICE, requires_grad=True) for _ in range(2))
    inputs += [sinks, slopes]
    offsets = int32(0, 5, 130)
    call = attention_with_lse
    if packed:
        call = partial(varlen_attention_with_lse, cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = call(*inputs[:3], mask=CAUSAL, sinks=sinks, alibi_slopes=slopes, backend="triton")
        return out, *torch.autograd.grad((out * out).sum() + lse.sin().sum(), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.rand_like(x))
        offsets.copy_(int32(0, 70, 129))
    graph.replay()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    assert_same_bits(*zip(captured, expected, strict=True))
