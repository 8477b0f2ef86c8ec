"""Every table of the GPU benchmark, filled on a CPU; what is printed, written and drawn."""

import json
import subprocess
import sys

import pytest
import torch
from bench_helpers import place, tiny

from attnlib import FULL, sliding
from attnlib.__main__ import main
from attnlib.bench import gpu, memory, overhead, plots, speed
from attnlib.bench.cases import packed
from attnlib.bench.race import Failure
from attnlib.bench.report import Claim, Report, Row, Table, digits, line, markdown

PNG = b"\x89PNG\r\n\x1a\n"
FACTS = {"command": "python -m attnlib bench --gpu", "device": "a device", "date": "2026-01-01"}
TABLES = {table.name: table for group in gpu.GROUPS for table in group.tables}
SPEEDS = Table("speeds", "Speeds", "TFLOP/s", "forward")
ROWS = (
    Row("one", {"ours": 400.0, "peer": 500.0, "lost": Failure("OOM")}, Claim(0.8, 0.9), 1024),
    Row("two", {"ours": 90.0, "peer": 30.0, "lost": 9.0}, Claim(3.0, 1), 2048),
)


def tables(*names):
    return tuple(TABLES[name] for name in names)


def test_forward_and_backward_are_filled_together():
    cases = (tiny(24), tiny(24, FULL)._replace(name="full"))
    wanted = tables("forward", "backward")
    rows = list(speed.training(place(), wanted, cases, peers=("FA2", "eager")))
    assert [(table.name, row.name) for table, row in rows] == [
        ("forward", "24"),
        ("backward", "24"),
        ("forward", "full"),
        ("backward", "full"),
    ]
    for (table, row), case in zip(rows, (cases[0], cases[0], cases[1], cases[1]), strict=True):
        assert row.cells == dict.fromkeys(("ours", "FA2", "eager"), case.flops(table.what) / 1e-3 / 1e12)


def test_one_table_of_a_group_alone():
    [(table, _)] = speed.training(place(), tables("backward"), [tiny()], peers=("eager",))
    assert table.name == "backward"


def test_growing_rows_carry_their_tokens():
    rows = [row for _, row in speed.growing(place(), tables("growing"), [tiny(8), tiny(16)], peers=("eager",))]
    assert [row.tokens for row in rows] == [8, 16]


def test_long_asks_to_be_faster_than_flash_attention_2():
    seconds = iter([2e-3, 1e-3] * 3)
    where = place(lambda call: next(seconds))
    [(_, row)] = speed.long(where, tables("long"), [tiny()], peers=("FA2",))
    assert row.cells == {"ours": 2.0, "FA2": 1.0}
    assert row.claim == Claim(0.5, 1)
    assert not row.claim.met


def test_varlen():
    case = packed(12, 12)._replace(dtype=torch.float32)
    dense = tiny(12, batch=2)._replace(heads=16, kv_heads=16, dim=128, value_dim=128)
    rows = [row for _, row in speed.varlen(place(), tables("varlen"), [(case, dense)])]
    assert [row.name for row in rows] == ["2 x 12, forward", "2 x 12, backward"]
    assert all(list(row.cells) == ["packed", "dense"] and row.claim == Claim(1, 0.92) for row in rows)


def test_window():
    work = tiny(24, sliding(4)), tiny(24)
    rows = [row for _, row in speed.window(place(), tables("window"), work, peer="eager")]
    assert [row.name for row in rows] == [f"4 of 24 keys, {x}" for x in ("forward", "backward", "forward + backward")]
    assert [row.claim for row in rows] == [None, None, Claim(1, 5)]
    assert list(rows[0].cells) == ["sliding", "causal", "eager, sliding"]


def test_grouped():
    work = tiny(24, kv_heads=2)._replace(name="few"), tiny(24)._replace(name="many")
    rows = [row for _, row in speed.grouped(place(), tables("gqa"), work)]
    assert [row.cells for row in rows] == [{"few": 1.0, "many": 1.0}] * 2
    assert all(row.claim.met for row in rows)


def test_memory_counts_what_must_be_held():
    case = tiny(8, batch=2, kv_heads=2)._replace(value_dim=8)
    given, made = memory.needed(case)
    q, k, v, dout = case.tensors("cpu")
    assert given == q.nbytes + k.nbytes + v.nbytes + dout.nbytes
    assert made == given + 2 * 4 * 2 * 8 * 4  # the output and three gradients; LSE and delta
    where = place(peak=lambda call: made + given)
    [(_, row)] = memory.rows(where, tables("memory"), [case], peers=("eager",))
    assert row.cells == {"ours": (made + given) / 2**20, "eager": (made + given) / 2**20, "must be held": made / 2**20}
    assert row.claim.ratio == (made + 2 * given) / (made + given)
    assert row.claim.most
    assert not row.claim.met


def test_memory_marks_what_does_not_fit():
    def peak(call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    [(_, row)] = memory.rows(place(peak=peak), tables("memory"), [tiny()], peers=("eager",))
    assert row.cells["ours"] == row.cells["eager"] == "OOM"
    assert row.claim is None


def test_overhead_is_timed_with_and_without_gradients(monkeypatch):
    grad, clock = [], overhead.host_seconds
    monkeypatch.setattr(overhead, "host_seconds", lambda *args: grad.append(torch.is_grad_enabled()) or clock(*args))
    rows = [row for _, row in overhead.rows(place(), tables("launch"), tiny(), batches=2)]
    assert [row.name for row in rows] == ["24 without gradients", "24 with gradients"]
    for row, bound in zip(rows, (1.5, 2.5), strict=True):
        assert set(row.cells) == {"ours", "SDPA"}
        assert all(value > 0 for value in row.cells.values())
        assert row.claim == Claim(row.cells["ours"] / row.cells["SDPA"], bound, most=True)
    assert grad == [False] * 4 + [True] * 4


def test_a_table_in_markdown():
    assert markdown(SPEEDS, ROWS, FACTS) == (
        "## Speeds\n"
        "`python -m attnlib bench --gpu`, a device, 2026-01-01\n\n"
        "| TFLOP/s | ours | peer | lost | asked |\n"
        "|---|---:|---:|---:|---|\n"
        "| one | 400 | 500 (0.80x) | OOM | 0.80x, asked >= 0.9x: **missed** |\n"
        "| two | 90.0 | 30.0 (3.00x) | 9 (10.00x) | 3.00x, asked >= 1x |\n"
    )
    assert "asked" not in markdown(SPEEDS, [row._replace(claim=None) for row in ROWS], FACTS)


def test_less_time_is_a_lead():
    row = Row("one", {"ours": 2.0, "peer": 3.0}, Claim(1.5, 1.4, most=True))
    text = line(SPEEDS._replace(unit="ms"), row)
    assert text == "speeds, one: ours 2, peer 3 (1.50x) [ms]; 1.50x, asked <= 1.4x: **missed**"


def test_rows_may_have_different_columns():
    rows = [Row("one", {"ours": 1.0}), Row("two", {"ours": 1.0, "late": 2.0})]
    assert "| one | 1 |  |\n| two | 1 | 2 (0.50x) |" in markdown(SPEEDS, rows, FACTS)


@pytest.mark.parametrize(("x", "text"), [(1234.4, "1234"), (56.78, "56.8"), (0.1234, "0.123"), (7.0, "7")])
def test_digits(x, text):
    assert digits(x) == text


def test_a_claim_is_judged_as_it_is_printed():
    assert Claim(0.9951, 1).met
    assert not Claim(0.9949, 1).met
    assert Claim(1.0549, 1.05, most=True).met
    assert not Claim(1.056, 1.05, most=True).met


def test_the_files_are_whole_after_every_row(tmp_path):
    said = []
    report = Report(tmp_path / "deep" / "er", FACTS, said.append)
    for n, row in enumerate(ROWS, 1):
        report.add(SPEEDS, row)
        record = json.loads((tmp_path / "deep/er/speeds.json").read_text())
        assert len(record["rows"]) == len(said) == n
        assert (tmp_path / "deep/er/speeds.md").read_text() == markdown(SPEEDS, ROWS[:n], FACTS)
    assert record["facts"] == FACTS
    assert record["unit"] == "TFLOP/s"
    assert record["rows"][0] == {
        "name": "one",
        "cells": {"ours": 400.0, "peer": 500.0, "lost": "OOM"},
        "claim": {"ratio": 0.8, "bound": 0.9, "most": False, "unit": "x", "of": ""},
        "tokens": 1024,
    }


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=("two rows", "one row"))
@pytest.mark.parametrize("unit", ["TFLOP/s", "ms"])
def test_pictures(tmp_path, growing, rows, unit):
    path = tmp_path / "x.png"
    plots.draw(SPEEDS._replace(growing=growing, unit=unit), rows, path)
    assert path.read_bytes()[:8] == PNG


def _small_groups(monkeypatch):
    def fill(where, wanted):
        return speed.training(where, wanted, [tiny()], peers=("eager",))

    def broken(where, wanted):
        yield wanted[0], Row("first", {"ours": 1.0})
        raise RuntimeError("lost the device")

    groups = (gpu.GROUPS[0]._replace(fill=fill), gpu.Group(broken, (Table("broken", "Broken", "ms"),)))
    monkeypatch.setattr(gpu, "GROUPS", groups)


def test_a_run_writes_everything_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    _small_groups(monkeypatch)
    assert gpu.run(place(), (), tmp_path) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.{kind}" for name in ("forward", "backward", "broken") for kind in ("md", "json", "png")}
    text = capsys.readouterr().out
    assert "## Forward, bf16" in text
    assert "ours failed: broken, the rest" in text
    assert "fails: RuntimeError: lost the device" in (tmp_path / "broken.md").read_text()


def test_a_run_of_one_table(tmp_path, monkeypatch):
    _small_groups(monkeypatch)
    assert gpu.run(place(), ("backward",), tmp_path) == 0
    assert {path.stem for path in tmp_path.iterdir()} == {"backward"}
    facts = json.loads((tmp_path / "backward.json").read_text())["facts"]
    assert facts["command"] == "python -m attnlib bench --gpu --only backward"
    assert facts["torch"] == f"torch {torch.__version__}"
    assert {"device", "triton", "cuDNN", "date"} < set(facts)


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch, capsys):
    _small_groups(monkeypatch)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.run(place(), ("forward",), tmp_path) == 0
    assert not list(tmp_path.glob("*.png"))
    assert capsys.readouterr().out.count("no pictures without matplotlib") == 1


def test_the_choice_of_tables():
    every = [table.name for _, tables in gpu.choose(()) for table in tables]
    assert every[:2] == ["forward", "backward"]
    assert set(TABLES) - set(every) == {"full", "full-training"}
    [(_, [one])] = gpu.choose(("full-training",))
    assert one.name == "full-training"
    with pytest.raises(ValueError, match=r"expected some of forward, backward.*got nothing, none"):
        gpu.choose(("nothing", "forward", "none"))


def test_table_names_are_file_names():
    assert len(TABLES) == sum(len(group.tables) for group in gpu.GROUPS)
    assert all(name.replace("-", "").isalnum() for name in TABLES)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--only", "forward"], "--only chooses from the GPU's tables; add --gpu"),
        (["--gpu", "--only", "sideways"], "got sideways"),
        (["--gpu"], "no CUDA device"),
    ],
)
def test_what_the_command_refuses(options, why, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *options]) == 2
    assert why in capsys.readouterr().err


def test_help_lists_every_table(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in TABLES)


def test_the_command_hands_its_options_on(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("attnlib.bench.command.cuda", place)
    monkeypatch.setattr(gpu, "run", lambda where, names, folder: asked.append((names, folder)) or 0)
    assert main(["bench", "--gpu", "--only", "window,gqa", "--out", str(tmp_path)]) == 0
    assert asked == [(("window", "gqa"), tmp_path)]


def test_the_command_line_is_light():
    """The help needs neither Triton nor matplotlib, nor FlexAttention's compiler, nor a device."""
    code = """
import sys
import attnlib.__main__
assert not {name.split(".")[0] for name in sys.modules} & {"triton", "matplotlib"}
assert "torch.nn.attention.flex_attention" not in sys.modules
import torch
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cpu_cases_run_without_options(monkeypatch, capsys):
    from attnlib.bench import cpu
    from attnlib.bench.timing import Row

    monkeypatch.setattr(cpu, "rows", lambda: iter([Row("a case", 1e-6, 2e-6, 1.0)]))
    assert main(["bench"]) == 0
    assert "a case" in capsys.readouterr().out
