"""``bench --shape``: how the options are read, which implementations run, and what is printed and written."""

import json
from contextlib import nullcontext

import pytest
import torch
from bench_helpers import place

from attnlib import CAUSAL, FULL, Mask, attention, sliding
from attnlib.__main__ import main
from attnlib.bench import command, shape
from attnlib.bench.compare import Failure
from attnlib.bench.implementations import implementation
from attnlib.bench.report import Line, Table

# torch warns once in a process, so any of these tests may be the one that it warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention")

TIMES = Table("shape", "A call", "ms")


@pytest.fixture
def on_a_clock(monkeypatch, tmp_path):
    """``bench`` on a CPU whose calls all take a millisecond; FlexAttention is not compiled."""
    monkeypatch.setattr(command, "cpu", lambda: place(backend=None))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return lambda *options: main(["bench", "--shape", *options, "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2,8,2,128,64", (2, 8, 2, 128, 64, 64)), ("1,4,4,7,192/128", (1, 4, 4, 7, 192, 128))],
)
def test_a_shape(text, sizes):
    case = shape.case_of(text, "causal", torch.float16)
    assert case[1:7] == sizes
    assert (case.mask, case.dtype) == (CAUSAL, torch.float16)
    assert case.name == f"{text}, causal, float16"


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", CAUSAL),
        ("full", FULL),
        ("sliding:5", sliding(5)),
        ("prefix:3", Mask(right=0, prefix=3)),
    ],
)
def test_a_mask(text, mask):
    assert shape.mask_of(text) == mask


@pytest.mark.parametrize("mask", ["causal", "full", "sliding:5", "prefix:70"])
@pytest.mark.parametrize("name", ["transposed", "SDPA", "Flex", "eager"])
def test_every_implementation_computes_every_mask(monkeypatch, name, mask):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = shape.case_of("1,4,2,128,16", mask, torch.float32)
    call, heads_first = implementation(name, case, place())
    q, k, v, _ = case.tensors("cpu")
    found = call(*((x.transpose(1, 2) for x in (q, k, v)) if heads_first else (q, k, v)))
    expected = attention(q, k, v, mask=case.mask)
    torch.testing.assert_close(found.transpose(1, 2) if heads_first else found, expected)


def test_all_implementations_are_timed(on_a_clock, capsys, tmp_path):
    assert on_a_clock("1,4,2,128,16") == 0
    text = capsys.readouterr().out
    assert "## 1,4,2,128,16, causal, float32\n`python -m attnlib bench --shape 1,4,2,128,16`" in text
    row = "| inference | 1 | 1 (1.00x) | 1 (1.00x) | 1 (1.00x) |"
    assert f"| ms | ours | SDPA | Flex | eager |\n|---|---:|---:|---:|---:|\n{row}\n" in text
    assert text.endswith(
        "inference: attnlib runs at 1.00x the speed of SDPA, the fastest other implementation\n"
    )
    assert json.loads((tmp_path / "shape.json").read_text())["rows"][0]["cells"]["ours"] == 1.0


def test_the_backward_is_timed_by_whoever_has_one(on_a_clock, tmp_path):
    options = ("--mask", "sliding:9", "--dtype", "bfloat16", "--backward")
    assert on_a_clock("1,4,2,128,32/16", *options) == 0
    record = json.loads((tmp_path / "shape.json").read_text())
    ours = {"ours": 1.0, "SDPA": 1.0, "Flex": "refuses", "eager": 1.0}
    assert record["rows"] == [
        {"name": name, "cells": ours, "tokens": None}
        for name in ("forward", "backward", "forward + backward")
    ]
    assert record["facts"]["command"] == (
        "python -m attnlib bench --backward --shape 1,4,2,128,32/16 --mask sliding:9 --dtype bfloat16"
    )


def test_the_backend_is_the_one_of_the_option(on_a_clock, monkeypatch, tmp_path):
    asked = []

    def attend(q, k, v, **options):
        asked.append(options["backend"])
        return attention(q, k, v, **options)

    monkeypatch.setattr("attnlib.bench.implementations.attention", attend)
    assert on_a_clock("1,4,2,8,16", "--backend", "torch") == 0
    assert {*asked} == {"torch"}
    assert "--backend torch" in json.loads((tmp_path / "shape.json").read_text())["facts"]["command"]


def test_a_wrong_result_is_not_timed(on_a_clock, monkeypatch, capsys):
    monkeypatch.setattr(
        "attnlib.bench.implementations.attention", lambda q, k, v, **options: torch.zeros_like(q)
    )
    assert on_a_clock("1,4,2,8,16") == 1
    assert "inference: attnlib has no result (differs from SDPA by" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "checked"), [(8192, True), (8193, False)])
def test_eager_is_left_out_if_its_scores_are_large(tokens, checked):
    case = shape.case_of(f"2,2,2,{tokens},64", "causal", torch.float32)
    assert ("eager" in [column.name for column in shape.columns(case, place())]) == checked


def test_the_implementations_of_a_gpu(monkeypatch):
    monkeypatch.setattr(shape, "present", lambda names: [name for name in names if name != "FA4"])
    case = shape.case_of("1,4,2,128,16", "causal", torch.bfloat16)
    made = shape.columns(case, place()._replace(device="cuda"))
    assert [(column.name, column.implementation) for column in made] == [
        (name, name) for name in ("ours", "cuDNN", "FA2", "efficient", "Flex", "SDPA", "eager")
    ]


@pytest.mark.parametrize("heads", ["4,2", "4,4"])
def test_efficient_attention_gets_the_keys_of_every_head(heads, monkeypatch):
    """It takes no groups; here all kernels of torch do, so that a CPU can run it."""
    options = []

    def attend(q, k, v, **given):
        options.append((k.shape[1], given["enable_gqa"]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **given)

    monkeypatch.setattr("attnlib.bench.implementations.scaled_dot_product_attention", attend)
    monkeypatch.setattr("attnlib.bench.implementations.sdpa_kernel", lambda backend: nullcontext())
    case = shape.case_of(f"1,{heads},33,16", "causal", torch.float32)
    call, _ = implementation("efficient", case, place())
    q, k, v, _ = case.tensors("cpu")
    out = call(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out, attention(q, k, v, mask=CAUSAL))
    assert options == [(4, False)]


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ({"ours": 2.0, "a": 3.0, "b": 1.0, "c": Failure("OOM")}, "at 0.50x the speed of b, the fastest"),
        ({"ours": Failure("differs from a by 1e+00"), "a": 1.0}, "no result (differs from a by 1e+00)"),
        ({"ours": 2.0, "a": Failure("refuses")}, "no other implementation ran this call"),
    ],
)
def test_the_verdict(cells, text):
    assert text in shape.verdict(TIMES, Line("forward", cells))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--shape", "2,8,2,128"], "--shape: expected b,h,g,s,d, such as"),
        (["--shape", "2,8,2,128,64/64/64"], "--shape: expected b,h,g,s,d, such as"),
        (["--shape", "2,8,2,0,64"], "got 2,8,2,0,64"),
        (["--shape", "2,8,3,128,64"], "multiple of g=3, got 8"),
        (["--shape", "2,8,2,128,64", "--mask", "sliding"], "--mask: expected causal, full, sliding:WINDOW"),
        (["--shape", "2,8,2,128,64", "--mask", "causal:3"], "got causal:3"),
        (["--shape", "2,8,2,128,64", "--only", "cpu"], "drop --only, --parallel and --blocks"),
        (["--shape", "2,8,2,128,64", "--gpu"], "no CUDA device"),
        (["--mask", "full"], "--mask: needs --shape b,h,g,s,d"),
        (["--backward"], "--backward: needs --shape b,h,g,s,d"),
        (["--blocks", "--parallel"], "--blocks: runs on one device"),
    ],
)
def test_options_that_are_refused(options, why, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *options]) == 2
    assert why in capsys.readouterr().err
