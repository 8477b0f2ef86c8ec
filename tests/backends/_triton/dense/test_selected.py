"""The plans of calls whose mask selects keys by lists, as on a Hopper GPU."""

from collections.abc import Iterator

import pytest
import torch

from attnlib import CAUSAL, masks
from attnlib.backends._triton.dense import hopper, shapes
from attnlib.backends._triton.launching.launch import has_gluon, plan_cache
from attnlib.backends._triton.launching.layouts import key_of
from attnlib.backends.operators import flat
from attnlib.call.call import Call, Score, checked
from attnlib.masks import selected

pytest.importorskip("triton")
INDICES = torch.zeros(2, 3, 1, 70, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch) -> Iterator[None]:
    plan_cache.cache_clear()
    monkeypatch.setattr(shapes, "arch_of", lambda device: 90)
    yield
    plan_cache.cache_clear()


def kernels(mask, *, same_start: bool = True, h: int = 128, apart: int = 0, **score) -> list[str]:
    """The names of the kernels that a call over latents launches."""
    q, latents = torch.zeros(2, 3, h, 576).half(), torch.zeros(2, 90, 1, 576 + apart).half()[..., :576]
    a = flat(checked(Call(q, mask, Score(**score), latents, latents[..., :512])))
    plan = hopper.forward(key_of(a, a.q, a.k, a.v)._replace(same_start=same_start))
    names = [launch.kernel.__name__ for launch in plan.launches]
    assert (plan.variant == "Hopper") == ("selected_latents" in names)
    return names


@pytest.mark.skipif(not has_gluon(), reason="this Triton lacks names of Gluon")
def test_the_dedicated_kernel_takes_tokens_of_latents():
    dedicated = ["list_blocks", "selected_latents"]
    mask = CAUSAL & selected(INDICES)
    assert kernels(mask) == kernels(mask, h=64) == kernels(mask, apart=8) == dedicated
    assert kernels(mask, softcap=30.0, sinks=torch.zeros(128)) == dedicated


def test_the_generic_kernel_takes_the_others():
    generic = ["list_blocks", "selected_forward"]
    mask = CAUSAL & selected(INDICES)
    assert kernels(mask, same_start=False) == kernels(mask, h=32) == kernels(mask, apart=4) == generic
    assert kernels(mask, alibi_slopes=torch.zeros(128)) == kernels(mask, softcap=5000.0) == generic
    assert kernels(CAUSAL & selected(INDICES, 2)) == kernels(mask & masks.dilated(2)) == generic
