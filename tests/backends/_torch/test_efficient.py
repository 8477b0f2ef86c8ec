"""torch's memory-efficient attention. Its operators exist on GPUs alone, so stand-ins check what they get."""

import pytest
import torch
from helpers import assert_close, assert_precise, eager, make
from probing import forgotten

from attnlib import CAUSAL, FULL, Mask, attention, sliding, varlen_attention_with_lse
from attnlib.backends._torch import efficient, fused
from attnlib.internal import probes


def hidden(s, t, kind):
    """The pairs that torch's mask hides: kind 0 hides none, 2 is causal and aligns the last query and key."""
    assert kind in (0, 2)
    return torch.ones(s, t, dtype=torch.bool).triu(1 + t - s) if kind else torch.zeros(s, t, dtype=torch.bool)


def check(*tensors):
    """torch's kernels read rows that start at multiples of 16 bytes, of as many heads in all tensors."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert not any(n * x.element_size() % 16 for n in (*x.stride()[:-1], x.storage_offset()))
    assert len({x.shape[2] for x in tensors}) == 1


def probabilities(q, k, kind, scale):
    scores = scale * torch.einsum("bshd,bthd->bhst", q.double(), k.double())
    return scores.masked_fill(hidden(q.shape[1], k.shape[1], kind), -torch.inf)


def run_forward(q, k, v, bias, cu_q, cu_k, most_q, most_k, dropout, kind, with_lse, *, scale):
    check(q, k, v)
    assert (bias, cu_q, cu_k, most_q, most_k, dropout, with_lse) == (None,) * 5 + (0.0, True)
    scores, s = probabilities(q, k, kind, scale), q.shape[1]
    out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v.double()).to(q.dtype)
    lse = torch.nn.functional.pad(scores.logsumexp(-1).float(), (0, -s % 32), value=torch.inf)
    return out, lse, torch.empty(()), torch.empty(()), s, k.shape[1]


def run_backward(
    dout, q, k, v, bias, out, cu_q, cu_k, s, t, lse, dropout, seed, offset, kind, with_bias, *, scale
):
    check(dout, q, k, v, out)
    assert out.is_contiguous()  # torch 2.11 computes the distance of its rows from its shape
    assert (bias, cu_q, cu_k, dropout, with_bias) == (None, None, None, 0.0, False)
    assert (s, t) == (q.shape[1], k.shape[1])
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert bool(torch.isposinf(lse[:, :, s:]).all())
    do, rest = dout.double(), [x.double() for x in (q, k, v, out)]
    p = (probabilities(q, k, kind, scale) - lse[:, :, :s, None].double()).exp()
    delta = (do * rest[3]).sum(-1).transpose(1, 2)[..., None]
    ds = scale * p * (torch.einsum("bshd,bthd->bhst", do, rest[2]) - delta)
    dq, dk = torch.einsum("bhst,bthd->bshd", ds, rest[1]), torch.einsum("bhst,bshd->bthd", ds, rest[0])
    dv = torch.einsum("bhst,bshd->bthd", p, do)
    return *(x.to(q.dtype) for x in (dq, dk, dv)), None


@pytest.fixture
def ran(monkeypatch):
    """Lets the CPU pass for a GPU with these operators; returns the list of the calls that they ran."""
    calls = []

    def counted(run):
        def on(*given, **options):
            calls.append(run)
            return run(*given, **options)

        return on

    found = [counted(run) for run in (run_forward, run_backward)]
    with forgotten():
        probes.ANSWERS.clear()
        monkeypatch.setattr(efficient, "operators", lambda: found)
        monkeypatch.setattr(fused, "device_of", lambda x: "cuda")
        monkeypatch.setattr(fused, "TRIED_ON", "cpu")
        for dtype in efficient.DTYPES:  # their trials
            assert fused.failures("cuda", dtype) == []
        calls.clear()
        yield calls


@pytest.mark.parametrize("dtype", efficient.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("s", "t", "mask"), [(33, 33, CAUSAL), (9, 40, CAUSAL), (40, 9, FULL), (1, 5, CAUSAL)]
)
def test_calls_are_precise(s, t, mask, heads, dtype, ran):
    problem = make(2, s, t, *heads, 24, 16, mask=mask, dtype=dtype)
    assert_precise(problem, "torch")
    dout, _ = problem.directions()
    assert {*ran} == {run_forward}  # a gradient of the LSE is left to the tiles

    def gradients(call, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in problem.tensors]
        out = call(*leaves, mask=mask)[0]
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    ours = gradients(lambda *given, **options: (attention(*given, **options, backend="torch"),), dtype)
    assert run_backward in ran
    every = zip("qkv", ours, gradients(eager, dtype), gradients(eager, torch.float64), strict=True)
    for name, x, naive, golden in every:
        assert_close(name, x, [naive], golden, 3, torch.finfo(dtype).eps)


def test_keys_are_not_copied_for_groups(ran, monkeypatch):
    """And rows that are not aligned are."""
    seen = []

    def on(q, k, v, *given, **options):
        seen.append((k.data_ptr(), v.data_ptr()))
        return run_forward(q, k, v, *given, **options)

    monkeypatch.setattr(efficient, "operators", lambda: (on, run_backward))
    q, k = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8)
    apart = torch.randn(1, 9, 2, 9)[..., :8]
    _, lse = varlen_attention_with_lse(
        q[0], k[0], apart[0], mask=CAUSAL, backend="torch",
        cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 4, 9], dtype=torch.int32),
    )  # fmt: skip
    assert [at for at, _ in seen] == [k.data_ptr(), k[0, 4].data_ptr()]
    assert not {at for _, at in seen} & {apart.data_ptr(), apart[0, 4].data_ptr()}
    assert lse.isfinite().all()


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": sliding(7)},
        {"mask": Mask(None, 0, 5)},
        {"mask": CAUSAL.shift(1)},
        {"mask": CAUSAL.shift(-1)},
        {"s": 25},
        {"d": 12},
        {"e": 12},
        {"t": 0},
        {"dtype": torch.float64},
        *({"options": (name,)} for name in ("softcap", "alibi_slopes", "sinks", "dropout")),
    ],
    ids=str,
)
def test_other_calls_are_computed_tile_by_tile(changes, ran):
    sizes = {
        "s": 17,
        "t": 19,
        "d": 8,
        "e": 8,
        "mask": CAUSAL,
        "options": (),
        "dtype": torch.bfloat16,
    } | changes
    s, t, d, e = (sizes.pop(name) for name in "sted")
    assert_precise(make(1, s, t, 2, 2, d, e, **sizes), "torch")
    assert not ran


@pytest.mark.parametrize(("end", "calls"), [(19, 1), (17, 0), (15, 1)])
def test_keys_that_end_before_the_last_query(end, calls, ran):
    """The first query sees 15 keys: all, or fewer than torch's causal mask would show it."""
    problem = make(1, 5, 19, 2, 2, 8).change(options={"key_ends": torch.tensor([end], dtype=torch.int32)})
    assert_precise(problem, "torch")
    assert len(ran) == calls


WRONG = {
    "scale": lambda out, lse, *rest: (out * 1.2, lse, *rest),
    "base of the LSE": lambda out, lse, *rest: (out, lse * 1.4427, *rest),
    "order": lambda out, lse, *rest: (lse, out, *rest),
}


@pytest.mark.parametrize("what", [*WRONG, "top left", "missing"])
def test_operators_that_compute_something_else_are_not_used(what, monkeypatch, ran):
    def on(*given, **options):
        if what == "missing":
            raise AttributeError("no such operator")
        if what == "top left":
            s, t = given[0].shape[1], given[1].shape[1]
            given = (given[0], *(x[:, :s] for x in given[1:3] if given[9] or s < t), *given[3:])
        return WRONG.get(what, lambda *x: x)(*run_forward(*given, **options))

    problem = make(1, 17, 17, 2, 2, 8, dtype=torch.bfloat16)
    probes.ANSWERS.clear()
    monkeypatch.setattr(efficient, "operators", lambda: (on, run_backward))
    assert_precise(problem, "torch")
    (failure,) = fused.failures("cuda", torch.bfloat16)
    assert failure.startswith("torch's memory-efficient attention: ")
    assert "tile by tile" in failure
