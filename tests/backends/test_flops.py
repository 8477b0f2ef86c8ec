"""Attention under FlopCounterMode: as much as torch's own attention, packed and cached as their parts."""

import ast
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from attnlib import (
    CAUSAL,
    FLOP_FORMULAS,
    KVCache,
    KVLayout,
    attention,
    cached_attention,
    masks,
    sliding,
    varlen_attention,
)


def flops(call) -> tuple[int, int]:
    """What torch counts of ``call()`` forward, and of its gradients."""
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        out = call()
        forward = counter.get_total_flops()
        if out.requires_grad:
            out.sum().backward()
    return forward, counter.get_total_flops() - forward


def torchs_own(q, k, v):
    """torch's attention with gradients on meta tensors, of which it counts every pair."""
    k, v = (
        x.expand(-1, -1, q.shape[-2] // x.shape[-2], -1, -1).flatten(2, 3)
        for x in (k[:, :, None], v[:, :, None])
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0]


@pytest.mark.parametrize(
    ("b", "s", "t", "h", "g", "d", "e"),
    [(2, 9, 9, 4, 4, 8, 8), (3, 1, 40, 8, 2, 64, 64), (1, 40, 7, 6, 1, 24, 16), (2, 0, 5, 2, 2, 8, 8)],
)
def test_flops_are_those_of_torchs_own_attention(b, s, t, h, g, d, e):
    tensors = [
        torch.empty(b, *shape, device="meta", requires_grad=True)
        for shape in ((s, h, d), (t, g, d), (t, g, e))
    ]
    expected = flops(lambda: torchs_own(*tensors))
    assert flops(lambda: attention(*tensors, mask=CAUSAL)) == expected
    assert flops(lambda: attention(*tensors, mask=sliding(3), softcap=2.0)) == expected
    assert expected[1] > expected[0] or s == 0


def test_flops_of_a_packed_call_are_those_of_its_sequences():
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    of_q, of_k = (torch.tensor(cuts, dtype=torch.int32) for cuts in ([0, 2, 2, 7], [0, 1, 4, 9]))
    call = partial(varlen_attention, q, k, v, cu_seqlens_q=of_q, mask=CAUSAL)
    apart = [flops(lambda s=s, t=t: attention(q[None, :s], k[None, :t], v[None, :t], mask=CAUSAL))
             for s, t in ((2, 1), (0, 3), (5, 5))]  # fmt: skip
    assert flops(lambda: call(cu_seqlens_k=of_k)) == tuple(map(sum, zip(*apart, strict=True)))
    square = flops(lambda: attention(q[None, :2], k[None, :2], v[None, :2], mask=CAUSAL)), apart[2]
    assert flops(lambda: call(cu_seqlens_k=of_q)) == tuple(map(sum, zip(*square, strict=True)))


@pytest.mark.parametrize("n", [2, 5])
def test_flops_of_selected_keys_are_those_of_full_lists(n):
    """Blocks of 2 keys: a list has room for 4 keys, or for more than there are."""
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    indices = torch.full((9, 2, n), -1, dtype=torch.int32)

    def some(t):
        return flops(lambda: attention(q[None], k[None, :t], v[None, :t], mask=CAUSAL))

    mask = CAUSAL & masks.selected(indices[None], 2)
    assert flops(lambda: attention(q[None], k[None], v[None], mask=mask)) == some(min(9, 2 * n))
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    call = partial(varlen_attention, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    found = flops(lambda: call(mask=CAUSAL & masks.selected(indices, 2)))
    whole = flops(lambda: call(mask=CAUSAL))
    pairs = 3 * 3 + 6 * min(6, 2 * n)
    assert found == tuple(x * pairs // (3 * 3 + 6 * 6) for x in whole)


@torch.no_grad()
def test_flops_of_selected_keys_over_a_cache():
    cache = KVCache.paged([KVLayout.grouped(2, 8)], pages=16, page_size=4, max_sequences=2)
    first, second = cache.admit(2)
    with cache.step({first: 12, second: 3}) as (kv,):
        view = kv.append(torch.randn(15, 2, 8), torch.randn(15, 2, 8))
        mask = CAUSAL & masks.selected(torch.zeros(15, 1, 5, dtype=torch.int32))
        found, _ = flops(lambda: cached_attention(torch.randn(15, 4, 8), view, mask=mask))
    assert found == 2 * 4 * (12 * 5 + 3 * 3) * (8 + 8)


@pytest.mark.parametrize(("longest", "keys"), [(None, 9), (4, 4)])
def test_flops_of_a_fake_packed_call_are_as_if_every_sequence_were_the_longest(longest, keys):
    with FakeTensorMode():
        q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
        of_q, of_k = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
        options = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_k": longest, "mask": CAUSAL}
        dense = flops(lambda: attention(q[None], k[None, :keys], v[None, :keys], mask=CAUSAL))
        assert flops(lambda: varlen_attention(q, k, v, **options)) == dense


@torch.no_grad()
@pytest.mark.parametrize("layout", [KVLayout.grouped(2, 8, 5), KVLayout.latent(8, 4)])
def test_flops_over_a_cache_are_those_over_its_keys(layout):
    cache = KVCache.paged([layout], pages=16, page_size=4, max_sequences=2)
    long, short = cache.admit(2)
    width = layout.dim + layout.rope_dim

    def dense(s, t):
        shapes = ((1, s, 4, width), (1, t, layout.heads, width), (1, t, layout.heads, layout.value_dim))
        return flops(lambda: attention(*(torch.randn(shape) for shape in shapes), mask=CAUSAL))[0]

    for tokens, expected in (
        ({long: 7, short: 2}, dense(7, 7) + dense(2, 2)),
        (1, dense(1, 8) + dense(1, 3)),
    ):
        with cache.step(tokens) as (kv,):
            q = torch.randn(*((2, 1) if tokens == 1 else (9,)), 4, width)
            lead = q.shape[:-2]
            new = (torch.randn(*lead, 8), torch.randn(*lead, 4))
            if not layout.is_latent:
                new = (torch.randn(*lead, 2, 8), torch.randn(*lead, 2, 5))
            view = kv.append(*new)
            assert flops(lambda: cached_attention(q, view, mask=CAUSAL))[0] == expected  # noqa: B023


COUNT = """
q, offsets = torch.randn(1, 3, 2, 8, requires_grad=True), torch.tensor([0, 1, 3], dtype=torch.int32)
cache = attnlib.KVCache.paged([attnlib.KVLayout.grouped(2, 8)], pages=2, page_size=4, max_sequences=1)
cache.admit(1)
with FlopCounterMode(display=False, {given}) as counter:
    attnlib.attention(q, q, q, mask=attnlib.FULL).sum().backward()
    packing = {{"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}}
    attnlib.varlen_attention(q[0], q[0], q[0], **packing, mask=attnlib.FULL).sum().backward()
    with torch.no_grad(), cache.step(1) as (kv,):
        attnlib.cached_attention(q[:, :1], kv.append(q[:, :1], q[:, :1]), mask=attnlib.FULL)
print({{str(name): flops for name, flops in counter.flop_counts["Global"].items()}})
"""
AFTER = "import torch, attnlib; from torch.utils.flop_counter import FlopCounterMode"
BEFORE = "import torch; from torch.utils.flop_counter import FlopCounterMode; import attnlib"
TOLD = """
from torch.utils.flop_counter import flop_registry
told = {operator: formula for operator, formula in flop_registry.items() if "attnlib" in str(operator)}
assert told == dict(attnlib.FLOP_FORMULAS) and len(told) == 9, told
"""
GIVEN = "custom_mapping=attnlib.FLOP_FORMULAS"


def run(code: str) -> str:
    """What a new process prints that runs this code."""
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_flops_are_the_same_in_either_order_of_imports():
    """And torch is told each formula that is exported, if it counts before."""
    before = f"{BEFORE}\n{TOLD}\n{COUNT.format(given='')}\n{COUNT.format(given=GIVEN)}"
    counts = [*run(before).splitlines(), *run(f"{AFTER}\n{COUNT.format(given=GIVEN)}").splitlines()]
    pairs = 3 * 3 + 1 + 2 * 2
    expected = {
        "forward": 2 * 2 * pairs * (8 + 8),
        "backward": 2 * 2 * pairs * 5 * 8,
        "cached": 2 * 2 * (8 + 8),
    }
    assert ast.literal_eval(counts[0]) == {f"attnlib.torch_{name}": flops for name, flops in expected.items()}
    assert counts[1] == counts[2] == counts[0]


def test_the_import_leaves_no_hook():
    run("""
import sys, torch
before = list(sys.meta_path)
import attnlib
assert sys.meta_path == before
assert "torch.utils.flop_counter" not in sys.modules
""")


def test_a_counter_that_does_not_know_attention_raises():
    run(f"""{AFTER}
def check(q):
    out = attnlib.attention(q, q, q, mask=attnlib.FULL)
    calls = [lambda: attnlib.attention(q, q, q, mask=attnlib.FULL)]
    if q.requires_grad:
        calls += [out.sum().backward, lambda: torch.autograd.grad(out.sum(), q, create_graph=True)]
    for call in calls:
        try:
            with FlopCounterMode(display=False):
                call()
        except RuntimeError as error:
            assert "custom_mapping=attnlib.FLOP_FORMULAS" in str(error), error
        else:
            raise AssertionError(f"counted as nothing: {{q.device}}, {{q.requires_grad}}")

q = torch.randn(1, 3, 2, 8)
for x in (q, q.to("meta"), torch.nn.Parameter(q), q.clone().requires_grad_()):
    check(x)
""")
