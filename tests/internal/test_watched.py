"""Calls on a torch whose private functions are missing or wrong are the same calls, and only what must be is
slower.
"""

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from probing import forgotten
from torch.autograd import forward_ad, profiler
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import attnlib
from attnlib import CAUSAL, KVCache, KVLayout, attention, cached_attention, explain, varlen_attention
from attnlib.internal import probes, torch_questions, watched

OFFSETS = torch.tensor([0, 3, 9], dtype=torch.int32)
dense = partial(attention, mask=CAUSAL)
packed = partial(varlen_attention, mask=CAUSAL, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS)
QUESTIONS = [x.name for x in torch_questions.QUESTIONS]
NEEDED = ("dispatch modes", "transforms", "profilers")  # for which there is no public function


def missing():
    raise AttributeError("no such name")


WRONG = {  # in place of what looks a private function up
    "missing": missing,
    "always no": lambda: lambda: None,
    "always yes": lambda: lambda: 1,
    "raises": lambda: missing,
}


@pytest.fixture
def broken(monkeypatch):
    """``broken(name, how)`` makes torch answer one question otherwise, as if it had just been imported."""

    def change(name, how):
        probes.ANSWERS.clear()
        changed = [x._replace(find=WRONG[how]) if x.name == name else x for x in torch_questions.QUESTIONS]
        monkeypatch.setattr(torch_questions, "QUESTIONS", tuple(changed))
        if name == "transforms":
            monkeypatch.setattr(watched, "_peek", None if how == "missing" else WRONG[how]())

    with forgotten():
        yield change


def gradients(call, *tensors):
    out = call(*tensors)
    return out, *torch.autograd.grad(out.sin().sum(), tensors)


def batched_gradients(call, *tensors):
    out = call(*tensors)
    return torch.autograd.grad(
        out, tensors, torch.stack([out.detach(), out.detach() ** 2]), is_grads_batched=True
    )


def mapped(call, *tensors):
    return (torch.vmap(call)(*(torch.stack([x, x + 1]) for x in tensors)),)


def compiled(call, *tensors):
    torch.compiler.reset()
    return (torch.compile(call, backend="eager", fullgraph=True)(*tensors),)


def leaves(call):
    batch = (9,) if call is packed else (2, 9)
    return [torch.randn(*batch, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


def goes_through_dispatcher(call) -> bool:
    """True if a call runs an operator while nobody follows: its result is the operator's, not a
    Function's.
    """
    return "_Attention" not in type(call(*leaves(call)).grad_fn).__name__


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("call", [dense, packed], ids=("dense", "packed"))
def test_results_are_the_same_where_one_answer_is_wrong(call, name, how, broken):
    """First asked by a plain call, from inside a transform or a compiler, and by a backward."""
    tensors = leaves(call)
    ways = (gradients, batched_gradients, mapped, *([compiled] if how == "missing" else []))
    known = [way(call, *tensors) for way in ways]
    for way, right in zip(ways, known, strict=True):
        broken(name, how)
        assert all(torch.equal(x, y) for x, y in zip(way(call, *tensors), right, strict=True)), way.__name__


@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_wrong_answer_costs_one_question(name, how, broken):
    """The fast path stays where a public function answers in its place, and explain names what failed."""
    assert not goes_through_dispatcher(dense)
    broken(name, how)
    assert goes_through_dispatcher(dense) == (name in NEEDED)
    told = str(explain(dense.func, *leaves(dense), mask=CAUSAL))
    assert f"fast path off: {name}: " in told
    assert told.count("fast path off") == 1
    assert "to do: update attnlib" in told
    assert "fast paths: on" not in told


@pytest.mark.parametrize("how", WRONG)
def test_gradients_are_the_same_where_batches_are_not_told(how, broken, monkeypatch):
    tensors = leaves(dense)
    known = batched_gradients(dense, *tensors)
    broken("no question", how)
    if how == "missing":
        monkeypatch.delattr(torch._C._functorch, "is_legacy_batchedtensor")
    else:
        monkeypatch.setattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: WRONG[how]()())
    assert all(torch.equal(x, y) for x, y in zip(batched_gradients(dense, *tensors), known, strict=True))
    assert watched.are_batched(torch.zeros(1))
    assert [x.partition(":")[0] for x in watched.failures()] == ["batched gradients"]


@torch.no_grad()
def test_cached_calls_are_the_same_where_an_answer_is_missing(broken):
    q, k, v = (torch.randn(2, 3, heads, 8) for heads in (4, 2, 2))

    def steps():
        cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=8, page_size=2, max_sequences=2)
        cache.admit(2)
        for i in range(3):
            with cache.step(1) as (kv,):
                yield cached_attention(
                    q[:, i : i + 1], kv.append(k[:, i : i + 1], v[:, i : i + 1]), mask=CAUSAL
                )

    known = list(steps())
    broken("dispatch modes", "missing")
    assert all(torch.equal(x, y) for x, y in zip(known, steps(), strict=True))


class Follows(TorchFunctionMode):
    """A mode that follows torch's functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


counter = partial(FlopCounterMode, display=False, custom_mapping=attnlib.FLOP_FORMULAS)


@pytest.mark.parametrize("how", [None, *WRONG])
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("dispatch modes", counter),
        ("profilers", profiler.emit_itt),
        ("function modes", Follows),
    ],
)
def test_followers_are_seen_whatever_torch_answers(name, inside, how, broken):
    broken(name, how) if how else probes.ANSWERS.clear()
    with inside():  # before anything has been tried
        assert goes_through_dispatcher(dense)
    goes_through_dispatcher(dense)
    with inside():
        assert goes_through_dispatcher(dense)


def test_nothing_is_remembered_of_a_first_call_that_is_followed(broken):
    probes.ANSWERS.clear()
    with counter():
        dense(*leaves(dense))
        assert "cannot be tried here, since" in str(explain(attention, *leaves(dense), mask=CAUSAL))
    compiled(dense, *leaves(dense))
    mapped(dense, *leaves(dense))
    with profiler.emit_itt():
        dense(*leaves(dense))
    assert watched.SEEN not in probes.ANSWERS
    assert not goes_through_dispatcher(dense)
    assert watched.SEEN in probes.ANSWERS


def test_a_default_device_follows_nothing(broken):
    probes.ANSWERS.clear()
    with torch.device("cpu"):
        assert not goes_through_dispatcher(dense)
    broken("function modes", "missing")
    with torch.device("cpu"):
        assert goes_through_dispatcher(dense)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("how", [None, *WRONG])
def test_forward_mode_is_refused_whatever_torch_answers(how, which, broken):
    broken("forward mode", how) if how else probes.ANSWERS.clear()
    tensors = [*(x.detach() for x in leaves(dense)), torch.zeros(4)]
    for _ in range(2):  # before and after the trial
        with forward_ad.dual_level():
            tensors[which] = forward_ad.make_dual(tensors[which].detach(), torch.ones_like(tensors[which]))
            with pytest.raises(NotImplementedError, match="forward-mode"):
                dense(*tensors[:3], sinks=tensors[3])
        dense(*(x.detach() for x in tensors[:3]))


@pytest.mark.parametrize("how", [None, *WRONG])
def test_functional_gradients_are_refused_whatever_torch_answers(how, broken):
    broken("transforms", how) if how else probes.ANSWERS.clear()
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda *x: dense(*x).sum())(*leaves(dense))


def test_a_version_that_nobody_knows_keeps_the_fast_path():
    code = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("9.7.0")
from attnlib import CAUSAL, attention, explain
q = torch.randn(1, 17, 2, 8, requires_grad=True)
out = attention(q, q, q, mask=CAUSAL)
assert "_Attention" in type(out.grad_fn).__name__, out.grad_fn
assert "fast paths: on" in str(explain(attention, q, q, q, mask=CAUSAL))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_this_torch_answers_every_question():
    assert watched.failures() == []


@pytest.mark.parametrize("name", ["call/spec.py", "call/cache.py", "backends/autograd.py"])
def test_private_state_is_read_in_one_file(name):
    tree = ast.parse((Path(attnlib.__file__).parent / name).read_text())
    found = {
        ast.unparse(x) for x in ast.walk(tree) if isinstance(x, ast.Attribute) and x.attr.startswith("_")
    }
    torchs = {x for x in found if x.split(".")[0] in ("torch", "forward_ad", "functorch")}
    assert not torchs
