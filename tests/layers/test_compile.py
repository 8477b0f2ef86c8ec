"""torch.compile(fullgraph=True): no graph break, at most two compiles, and the results of eager."""

import shutil

import pytest
import torch
from layer_helpers import BOTH, Stack, cache_for, grouped, latent, make, sharing, stack, tokens
from torch._dynamo.testing import CompileCounterWithBackend

from attnlib import CAUSAL, FULL, Gate, sliding

COMPILER = next(filter(shutil.which, ("g++", "clang++", "c++")), None)


class SharedAngles(Stack):
    """One computation of the angles for all layers."""

    def forward(self, x, kv=None, **inputs):
        positions = torch.arange(x.shape[1]) if kv is None else kv[0].positions
        return super().forward(x, kv, angles=self.layers[0].rope.angles(positions), **inputs)


MODELS = {
    "gqa": lambda: stack("gqa", (sliding(3), CAUSAL), qk_norm=True, dtype=torch.float32),
    "alibi-sinks-softcap": lambda: stack(
        "mqa", rope=False, alibi=True, sinks=True, softcap=2.0, values="keys", dtype=torch.float32
    ),
    "mla": lambda: stack("mla-auto", gate=Gate("head"), dtype=torch.float32),
    "mla-absorbed": lambda: stack("mla-absorbed", dtype=torch.float32),
    "shared-keys": lambda: sharing("mla-auto", dtype=torch.float32),
    "shared-angles": lambda: SharedAngles(*stack("gqa", dtype=torch.float32).layers),
}


@pytest.fixture(autouse=True)
def _forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend="aot_eager"):
    """The model under compilation, and the counter of its compiles."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def train_step(model, run, x, **inputs):
    model.zero_grad()
    loss = run(x, **inputs).square().mean()
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def check_training(model, run, counter, lengths):
    for length in lengths:
        x = tokens(2, length, dtype=torch.float32)
        ours, eager = train_step(model, run, x), train_step(model, model, x)
        for name, value in eager.items():
            near(ours[name], value)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("mla", "shared-angles")), "alibi-sinks-softcap"],
)
def test_a_training_step_of_two_lengths(name):
    model = MODELS[name]()
    run, counter = compiled(model)
    check_training(model, run, counter, (7, 12, 20))
    assert counter.frame_count >= 1


def test_packed_training():
    model = Stack(grouped(mask=sliding(3), dtype=torch.float32))
    run, counter = compiled(model)
    for lengths in ([3, 4], [5, 6], [2, 9]):
        x = tokens(sum(lengths), dtype=torch.float32)
        offsets = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        ours, eager = (train_step(model, f, x, cu_seqlens=offsets) for f in (run, model))
        for name, value in eager.items():
            near(ours[name], value)
    assert counter.frame_count <= 2


def decode(model, run, page_size, steps, request):
    """Outputs of a prompt in eager mode, then of ``steps`` steps of ``request(cache, i)`` with ``run``."""
    cache = cache_for(model, page_size)
    cache.admit(2)
    outs = []
    for i in range(-1, steps):
        step = 5 if i < 0 else request(cache, i)
        shape = (2, step) if isinstance(step, int) else (sum(step.values()),)
        with torch.no_grad(), cache.step(step) as layers:
            outs.append((model if i < 0 else run)(tokens(*shape, seed=i + 1, dtype=torch.float32), layers))
    return outs


def check_decoding(model, run, counter, page_size, request=lambda cache, i: 1):
    for ours, eager in zip(
        decode(model, run, page_size, 20, request), decode(model, model, page_size, 20, request), strict=True
    ):
        near(ours, eager)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_decode_steps(name, page_size):
    model = MODELS[name]()
    run, counter = compiled(model)
    check_decoding(model, run, counter, page_size)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_twenty_packed_decode_steps(name):
    """One token of each sequence, the second of them first."""
    model = MODELS[name]()
    run, counter = compiled(model)
    check_decoding(
        model, run, counter, 4, lambda cache, i: dict.fromkeys(reversed(cache._sequences.handles), 1)
    )


@pytest.mark.parametrize("kind", BOTH)
def test_sequences_that_come_and_go_compile_at_most_twice(kind):
    """Once for the first batch size and once for all others; forks, truncation and new caches compile
    nothing.
    """
    model = stack(kind, dtype=torch.float32)
    run, counter = compiled(model)
    for _ in range(2):
        cache = cache_for(model)
        for i, batch in enumerate((2, 3, 4, 3, 4)):
            handles = cache._sequences.handles
            if batch < len(handles):
                cache.release(handles[1])
                cache.truncate(handles[0], 2)
            elif i == 4:
                cache.fork(handles[0])
            else:
                cache.admit(batch - len(handles))
            for f in (model, run, run):  # a prompt is not compiled
                with torch.no_grad(), cache.step(1) as layers:
                    f(tokens(batch, 1, dtype=torch.float32), layers)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("kind", BOTH)
def test_cross_attention_to_a_stored_context(kind):
    layer = make(kind, rope=False, mask=FULL, dtype=torch.float32)
    run, counter = compiled(layer)
    cache = cache_for(Stack(layer))
    cache.admit(2)
    with torch.no_grad(), cache.step(6) as (kv,):
        layer.append_context(tokens(2, 6, dtype=torch.float32), kv)
    for i in range(5):
        x = tokens(2, 1, seed=i, dtype=torch.float32)
        with torch.no_grad(), cache.read(1) as (kv,):
            near(run(x, context=kv.view()), layer(x, context=kv.view()))
    assert counter.frame_count <= 2


@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler, and none is on the path")
def test_inductor():
    model = Stack(grouped(dtype=torch.float32), latent(dtype=torch.float32))
    run, counter = compiled(model, "inductor")
    check_decoding(model, run, counter, 4)
