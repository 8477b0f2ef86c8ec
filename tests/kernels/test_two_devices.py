"""Two GPUs in one process, in turns: what was compiled and planned for one is not launched on the other."""

import pytest
import torch

from attnlib import CAUSAL, KVCache, KVLayout, attention_with_lse, cached_attention_with_lse
from attnlib.backends._triton.decode import schedule, writes
from attnlib.backends._triton.launching.layouts import Key
from attnlib.backends.operators import WriteArguments

LAYOUTS = (KVLayout.grouped(2, 64, dtype=torch.float16), KVLayout.latent(64, 16, dtype=torch.float16))
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_plans_are_for_one_device(monkeypatch):
    monkeypatch.setattr(writes, "arch_of", lambda device: 90)  # of devices that need not be here
    one, other = (torch.device("cuda", n) for n in range(2))
    numbers = (torch.Size((1, 1, 4, 8)), 4, 16, 16, 16)
    for device in (one, other):
        same = schedule._plan(torch.device(device), *numbers)
        assert schedule._plan(device, *numbers) is same
    assert schedule._plan(one, *numbers) is not schedule._plan(other, *numbers)
    plane, new = ((4, 4, 2, 8), (64, 16, 8, 1), torch.float16), ((1, 3, 2, 8), (48, 16, 8, 1), torch.float16)
    tensors = (plane, plane, None, None, new, new, None, None, ((3,), (1,), torch.int64), False, False)
    keys = (Key(device, False, True, WriteArguments(*tensors)) for device in (one, other))
    assert writes.plan(next(keys)) is not writes.plan(next(keys))


def decode(device: torch.device, steps: int) -> list[torch.Tensor]:
    """Prompt and single tokens over pages, from the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache.paged(LAYOUTS, pages=64, page_size=16, max_sequences=2, device=device)
    cache.admit(2)
    found = []
    for tokens in (100, *[1] * steps):
        with cache.step(tokens) as layers, torch.no_grad():
            for kv in layers:
                layout = kv.layout
                widths = ((64,), (16,)) if layout.is_latent else ((2, 64), (2, 64))
                new = [torch.randn(2, tokens, *x, generator=generator).half().to(device) for x in widths]
                q = (
                    torch.randn(2, tokens, 4, layout.dim + layout.rope_dim, generator=generator)
                    .half()
                    .to(device)
                )
                found += cached_attention_with_lse(q, kv.append(*new), mask=CAUSAL, backend="triton")
    return [x.cpu() for x in found]


def train(device: torch.device) -> list[torch.Tensor]:
    """Results and gradients of a dense call."""
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, 130, h, 64, generator=generator).half().to(device).requires_grad_() for h in (4, 2, 2)
    ]
    out, lse = attention_with_lse(*leaves, mask=CAUSAL, backend="triton")
    return [
        x.detach().cpu()
        for x in (out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves))
    ]


class Captured:
    """A cache on one device whose decoding steps are one graph, replayed."""

    def __init__(self, device: torch.device):
        self.device, self.generator = device, torch.Generator().manual_seed(0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):  # where graphs are captured
            self.cache = KVCache.paged(LAYOUTS, pages=64, page_size=16, max_sequences=2, device=device)
            self.cache.admit(2)
            self.given = self.new(1)
            self.attend(self.new(100))
            for _ in range(2):  # the warm-up, which compiles
                self.attend(self.given)
            with self.cache.step(1) as layers, torch.no_grad():
                torch.cuda.synchronize(device)
                with torch.cuda.graph(
                    self.graph, stream=torch.cuda.Stream(device)
                ):  # torch keeps one, of one device
                    self.found = self.over(layers, self.given)
                self.graph.replay()

    def new(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        """Queries, keys and values of each layer, from the same numbers on every device."""
        made = []
        for layout in LAYOUTS:
            widths = ((64,), (16,)) if layout.is_latent else ((2, 64), (2, 64))
            shapes = ((4, layout.dim + layout.rope_dim), *widths)
            made.append(
                tuple(
                    torch.randn(2, tokens, *x, generator=self.generator).half().to(self.device)
                    for x in shapes
                )
            )
        return made

    def over(self, layers, tensors) -> list[torch.Tensor]:
        found = []
        for kv, (q, *new) in zip(layers, tensors, strict=True):
            found += cached_attention_with_lse(q, kv.append(*new), mask=CAUSAL, backend="triton")
        return found

    def attend(self, tensors) -> None:
        with self.cache.step(tensors[0][0].shape[1]) as layers, torch.no_grad():
            self.over(layers, tensors)

    def replayed(self) -> list[torch.Tensor]:
        """What the next step finds, over tensors that are new."""
        for old, new in zip(self.given, self.new(1), strict=True):
            for x, y in zip(old, new, strict=True):
                x.copy_(y)
        with torch.cuda.device(self.device), self.cache.step(1, replay=True):
            self.graph.replay()
        return [x.cpu() for x in self.found]


@pytest.mark.gpu2
@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_graphs_of_two_devices_replay_in_turns(current):
    """With training on both between the replays: the bits of a device that is alone."""
    one, other = (torch.device("cuda", n) for n in range(2))
    with torch.cuda.device(current):
        alone, trained = Captured(one), train(one)
        expected = [alone.replayed() for _ in range(4)]
        captured = [Captured(device) for device in (other, one)]
        for step in expected:
            for each in captured:
                for ours, theirs in zip(each.replayed(), step, strict=True):
                    assert torch.equal(ours, theirs)
                for ours, theirs in zip(train(each.device), trained, strict=True):
                    assert torch.equal(ours, theirs)


@pytest.mark.gpu2
@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_devices_in_turns_give_the_same_bits(current):
    one, other = (torch.device("cuda", n) for n in range(2))
    with torch.cuda.device(current):
        for run in (lambda device: decode(device, 3), train):
            expected = run(one)
            for device in (other, one, other):
                for ours, theirs in zip(run(device), expected, strict=True):
                    assert torch.equal(ours, theirs)
