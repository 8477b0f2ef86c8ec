"""The table of docs/features.md is what the backends answer today."""

import runpy

import pytest
import torch
from source import ROOT

from attnlib import KVLayout
from attnlib.backends import _torch
from attnlib.backends._triton.launching.launch import has_gluon, plan_cache
from attnlib.call.call import checked
from attnlib.dispatch.select import backend_of

pytest.importorskip("triton")
if not has_gluon():
    pytest.skip("this Triton lacks names that the Hopper kernels use", allow_module_level=True)

PAGE = ROOT.parent / "docs/features.md"
SCRIPT = runpy.run_path(str(ROOT.parent / "docs/features.py"))
ROWS = {feature.name: feature for feature in (*SCRIPT["ON_TENSORS"], *SCRIPT["OVER_CACHES"])}


def test_the_page_is_what_the_script_writes():
    assert SCRIPT["written"](PAGE.read_text()) == PAGE.read_text(), "python docs/features.py writes it anew"


def test_a_refusal_is_in_its_cell(monkeypatch):
    feature = ROWS["dropout"]
    assert SCRIPT["cell"]("torch", feature) == ("yes", [])
    monkeypatch.setattr(_torch, "unsupported", lambda spec: ["no dropout"] * spec.dropout)
    assert SCRIPT["cell"]("torch", feature) == ("no", ["no dropout"])
    monkeypatch.setattr(_torch, "unsupported", lambda spec: ["no backward"] * spec.grad)
    assert SCRIPT["cell"]("torch", feature) == ("forward", ["no backward"])


@pytest.mark.parametrize(
    ("variant", "cell"),
    [
        ("Hopper", "yes"),
        ("Hopper forward, ordered Hopper backward", "yes"),
        ("Hopper forward, plain backward", "forward"),
        ("plain forward, Hopper backward", "backward"),
        ("plain", "generic"),
    ],
)
def test_a_cell_of_the_hopper_column_names_the_kernels(variant, cell):
    assert SCRIPT["_of_variant"](variant, "yes") == cell


def test_calls_of_a_row_that_differ_are_refused():
    layouts = (KVLayout.grouped(8, 128, dtype=dtype) for dtype in (torch.bfloat16, torch.float64))
    with pytest.raises(ValueError, match="expected one answer of triton, got"):
        SCRIPT["cell"]("triton", SCRIPT["cached"]("two dtypes", *layouts))


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_plan_for_another_gpu_is_left(deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    with SCRIPT["on_hopper"](deterministic=deterministic):
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        backend_of("triton").variant(checked(ROWS["dropout"].calls[0](False)))
        assert plan_cache.cache_info().currsize
    assert torch.are_deterministic_algorithms_enabled() == before
    assert plan_cache.cache_info().currsize == 0
