"""Forks that read their common pages once, on the decode kernels: every layout, and graphs that outlive
groups.
"""

from dataclasses import replace

import pytest
import torch
from decode_helpers import plan_for
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor

from attnlib import CAUSAL, KVCache, KVLayout
from attnlib import cached_attention_with_lse as attend
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.cache.prefixes import groups

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
GROUPED, LATENT = KVLayout.grouped(2, 16, dtype=DTYPE), KVLayout.latent(32, 16, dtype=DTYPE)
LAYOUTS = {"grouped": GROUPED, "latent": LATENT, "int8": replace(GROUPED, storage_dtype=torch.int8)}
SIZE, PROMPT = (4, 10) if INTERPRETED else (16, 1500)
DENSE, PACKED = 1, (1, 3, 0, 2)
CASES = [(name, counts) for name in LAYOUTS for counts in (DENSE, PACKED)]
if INTERPRETED:
    CASES = [("grouped", DENSE), ("latent", PACKED), ("int8", DENSE)]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Short prefixes, and on the interpreter small tiles and short splits."""
    monkeypatch.setattr(groups, "SHARED_TOKENS", SIZE)
    plan_for(monkeypatch, **({"tiles": LaunchConfig(16, 16, 2, 4), "small": True} if INTERPRETED else {}))
    yield
    monkeypatch.undo()
    plan_for(monkeypatch)


def tensors(layout: KVLayout, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and what is appended."""
    widths = ((4, layout.dim + layout.rope_dim), (layout.dim,), (layout.rope_dim,))
    if not layout.is_latent:
        widths = ((4, layout.dim), (layout.heads, layout.dim), (layout.heads, layout.value_dim))
    return tuple(torch.randn(*shape, *width, dtype=layout.dtype, device=DEVICE) for width in widths)


def forked(layout: KVLayout) -> tuple[KVCache, list]:
    """Two prompts and a fork of each, all neighbours."""
    sizes = {"pages": 4 * (PROMPT // SIZE + 9), "page_size": SIZE, "max_sequences": 4, "device": DEVICE}
    cache, handles = KVCache.paged([layout], shared_prefixes=2, **sizes), []
    torch.manual_seed(0)
    for _ in range(2):
        (first,) = cache.admit()
        with cache.step({first: PROMPT}) as (kv,):
            kv.append(*tensors(layout, PROMPT)[1:])
        handles += [first, *cache.fork(first)]
    return cache, handles


@pytest.mark.parametrize(("name", "counts"), CASES, ids=str)
@torch.no_grad()
def test_forks_attend_as_if_each_read_all(name, counts):
    layout = LAYOUTS[name]
    cache, handles = forked(layout)
    for sinks in (
        (None, torch.randn(4, device=DEVICE)) if INTERPRETED else (None, None, None)
    ):  # calls that repeat
        q, k, v = tensors(layout, *((4, 1) if counts == DENSE else (sum(counts),)))
        with cache.step(1 if counts == DENSE else dict(zip(handles, counts, strict=True))) as (kv,):
            view = kv.append(k, v)
            out, lse = attend(q, view, mask=CAUSAL, sinks=sinks, backend="triton")
        assert view.route.shared.lengths.tolist() == [PROMPT // SIZE * SIZE] * 2
        plain, plain_lse = attend(q, replace(view), mask=CAUSAL, sinks=sinks, backend="torch")
        eps = 4 * torch.finfo(DTYPE).eps
        torch.testing.assert_close(out, plain, rtol=eps, atol=eps)
        torch.testing.assert_close(lse, plain_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@torch.no_grad()
def test_a_captured_step_follows_the_groups():
    """As many sequences as at the capture, which later share less, other pages, and nothing."""
    eager, captured = (forked(GROUPED) for _ in range(2))
    new, graph = tensors(GROUPED, 4, 1), torch.cuda.CUDAGraph()

    def run(kv) -> tuple[Tensor, Tensor]:
        return attend(new[0], kv.append(*new[1:]), mask=CAUSAL, backend="triton")

    for step in range(12):
        for x in new:
            x.normal_()
        for cache, handles in (eager, captured):
            if step == 6:
                cache.truncate(handles[1], SIZE + 3)
            elif step == 8:
                cache.release(*handles[2:])
                handles[2:] = cache.fork(handles[0], 2)
            elif step == 10:
                for handle in handles:
                    cache.truncate(handle, 5)
        with eager[0].step(1) as (kv,):
            expected = run(kv)
        with captured[0].step(1, replay=step > 2) as (kv,):
            if step < 2:
                out = run(kv)
            elif step == 2:
                with torch.cuda.graph(graph):
                    out = run(kv)
            if step >= 2:
                graph.replay()
        assert_same_bits(*zip(out, expected, strict=True))
