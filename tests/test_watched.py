"""Calls on a torch whose private state is not known are the same calls, all through the dispatcher."""

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import attnlib
from attnlib import CAUSAL, KVCache, KVLayout, attention, cached_attention, varlen_attention, watched

OFFSETS = torch.tensor([0, 3, 9], dtype=torch.int32)
dense = partial(attention, mask=CAUSAL)
packed = partial(varlen_attention, mask=CAUSAL, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)


def gradients(call, *tensors):
    out = call(*tensors)
    return out, *torch.autograd.grad(out.sin().sum(), tensors)


def batched_gradients(call, *tensors):
    out = call(*tensors)
    return torch.autograd.grad(out, tensors, torch.stack([out.detach(), out.detach() ** 2]), is_grads_batched=True)


def mapped(call, *tensors):
    return (torch.vmap(call)(*(torch.stack([x, x + 1]) for x in tensors)),)


def compiled(call, *tensors):
    return (torch.compile(call, backend="eager", fullgraph=True)(*tensors),)


def leaves(call):
    batch = (9,) if call is packed else (2, 9)
    return [torch.randn(*batch, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def through_dispatcher(call) -> bool:
    """Whether a call runs an operator while nobody follows: its result is the operator's, not a Function's."""
    return "_Attention" not in type(call(*leaves(call)).grad_fn).__name__


@pytest.mark.parametrize("way", [gradients, batched_gradients, mapped, compiled])
@pytest.mark.parametrize("call", [dense, packed], ids=("dense", "packed"))
def test_results_are_the_same_on_an_unknown_torch(call, way, monkeypatch):
    tensors = leaves(call)
    known = way(call, *tensors)
    monkeypatch.setattr(watched, "IS_KNOWN", False)
    torch.compiler.reset()
    unknown = way(call, *tensors)
    assert all(torch.equal(x, y) for x, y in zip(known, unknown, strict=True))


@torch.no_grad()
def test_cached_calls_are_the_same_on_an_unknown_torch(monkeypatch):
    q, k, v = (torch.randn(2, 3, heads, 8) for heads in (4, 2, 2))

    def steps():
        cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=8, page_size=2, max_sequences=2)
        cache.admit(2)
        for i in range(3):
            with cache.step(1) as (kv,):
                yield cached_attention(q[:, i : i + 1], kv.append(k[:, i : i + 1], v[:, i : i + 1]), mask=CAUSAL)

    known = list(steps())
    monkeypatch.setattr(watched, "IS_KNOWN", False)
    assert all(torch.equal(x, y) for x, y in zip(known, steps(), strict=True))


def test_only_a_known_torch_goes_around_the_dispatcher(monkeypatch):
    assert not through_dispatcher(dense)
    monkeypatch.setattr(watched, "IS_KNOWN", False)
    assert through_dispatcher(dense)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("is_known", [True, False])
def test_forward_mode_is_refused_on_any_torch(is_known, which, monkeypatch):
    monkeypatch.setattr(watched, "IS_KNOWN", is_known)
    tensors = [*(x.detach() for x in leaves(dense)), torch.zeros(4)]
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            dense(*tensors[:3], sinks=tensors[3])


@pytest.mark.parametrize("is_known", [True, False])
def test_functional_gradients_are_refused_on_any_torch(is_known, monkeypatch):
    monkeypatch.setattr(watched, "IS_KNOWN", is_known)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda *x: dense(*x).sum())(*leaves(dense))


def test_which_torch_is_known():
    code = """
import importlib, torch
from attnlib import watched
def is_known():
    return importlib.reload(watched).IS_KNOWN
for version in ("2.11.0", "2.12.1+cu130", "2.13.0a0+git0"):
    torch.__version__ = version
    assert is_known(), version
for version in ("2.1.1", "2.14.0", "3.0", "unknown"):
    torch.__version__ = version
    assert not is_known(), version
torch.__version__ = "2.13.0"
del torch.autograd._profiler_enabled
assert not is_known()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["spec.py", "prepared.py", "backends/autograd.py"])
def test_private_state_is_read_in_one_file(name):
    tree = ast.parse((Path(attnlib.__file__).parent / name).read_text())
    found = {ast.unparse(x) for x in ast.walk(tree) if isinstance(x, ast.Attribute) and x.attr.startswith("_")}
    torchs = {x for x in found if x.split(".")[0] in ("torch", "forward_ad", "functorch")}
    assert not torchs
