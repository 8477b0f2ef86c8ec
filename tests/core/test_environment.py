"""Other ways to run the same code: asserts off, loaded twice, exported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits

from attnlib import CAUSAL, GroupedQueryAttention, MultiHeadLatentAttention, Rope

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def run(code: str, *flags: str) -> str:
    path = os.pathsep.join(map(str, (ROOT, TESTS / "helpers")))
    command = [sys.executable, *flags, "-c", code]
    kept = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }  # compiled once
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=kept | {"PYTHONPATH": path}
    ).stdout


@pytest.mark.slow
def test_refusals_do_not_need_asserts():
    """Every refused call of two fault tables, under python -O."""
    code = """
import warnings
warnings.simplefilter("ignore")
from attnlib import CAUSAL, MultiHeadLatentAttention
from layer_helpers import HIDDEN, SIZES
from tests.call.test_call import REFUSED
from tests.layers.test_inputs import CONSTRUCTION
calls = [(name, run, error) for name, (run, error, words) in REFUSED.items()]
for name, (kind, options, error, words) in CONSTRUCTION.items():
    sizes = SIZES if kind is MultiHeadLatentAttention else {}
    options = {"num_heads": 4, "mask": CAUSAL} | sizes | options
    calls.append((name, lambda kind=kind, options=options: kind(HIDDEN, **options), error))
for name, run, error in calls:
    try:
        run()
    except error:
        continue
    raise SystemExit(f"{name} was not refused")
print(__debug__, len(calls))
"""
    debug, refused = run(code, "-O").split()
    assert debug == "False"
    assert int(refused) > 80


def test_two_copies_in_one_process():
    """The second runs the operators of the first, and neither breaks the other."""
    code = """
import sys, torch, attnlib as first
for name in [name for name in sys.modules if name.split(".")[0] == "attnlib"]:
    del sys.modules[name]
import attnlib as second
assert second is not first and second.Mask is not first.Mask
q = torch.randn(1, 20, 2, 8, requires_grad=True)
results = []
for copy in (first, second):
    out = copy.attention(q, q, q, mask=copy.CAUSAL, softcap=3.0)
    results.append((out, *torch.autograd.grad(out.sum(), q)))
    cache = copy.KVCache.paged([copy.KVLayout.grouped(2, 8)], pages=2, page_size=4, max_sequences=1)
    cache.admit()
    with torch.no_grad(), cache.step(3) as (kv,):
        results[-1] += (copy.cached_attention(q[:, :3], kv.append(q[:, :3], q[:, :3]), mask=copy.CAUSAL),)
print(all(map(torch.equal, *results)))
"""
    assert run(code).split() == ["True"]


def test_two_versions_in_one_process_are_refused():
    code = """
import torch
other = torch.library.Library("attnlib", "FRAGMENT")
other.define("torch_forward(Tensor q, Tensor k) -> Tensor")
try:
    import attnlib
except ImportError as error:
    print(error)
"""
    assert "another version is loaded in this process, with another operator torch_forward" in run(code)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
@torch.no_grad()
def test_an_exported_layer_is_the_layer_at_any_length(kind):
    if kind == "gqa":
        layer = GroupedQueryAttention(24, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(6))
    else:
        sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        layer = MultiHeadLatentAttention(
            24, 4, mask=CAUSAL, q_lora_rank=None, rope=Rope(4), form="expanded", **sizes
        )
    lengths = {1: torch.export.Dim("s", min=2, max=4096)}
    exported = torch.export.export(layer.eval(), (torch.randn(2, 5, 24),), dynamic_shapes=(lengths,))
    assert "attnlib.torch_forward" in exported.graph_module.code
    for s in (5, 33):
        x = torch.randn(2, s, 24)
        assert_same_bits((exported.module()(x), layer(x)))
