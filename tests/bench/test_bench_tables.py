"""Every table of the benchmark, filled on a CPU; what is printed, written and drawn."""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from bench_helpers import place, tiny

from attnlib import FULL, sliding
from attnlib.__main__ import main
from attnlib.bench import command, cpu, memory, plots, speed, tables
from attnlib.bench.cases import packed
from attnlib.bench.compare import Failure
from attnlib.bench.place import gpu_seconds, host_seconds
from attnlib.bench.report import Line, Report, Table, digits, line, markdown
from attnlib.bench.steps import StepCase

PNG = b"\x89PNG\r\n\x1a\n"
FACTS = {"command": "python -m attnlib bench --gpu", "device": "a device", "date": "2026-01-01"}
TABLES = {entry.table.name: entry.table for entry in (*tables.GPU, *tables.CPU)}
SPEEDS = Table("speeds", "Speeds", "TFLOP/s", "forward")
ROWS = (
    Line("one", {"ours": 400.0, "peer": 500.0, "lost": Failure("OOM")}, 1024),
    Line("two", {"ours": 90.0, "peer": 30.0, "lost": 9.0}, 2048),
)


def named(*names):
    return tuple(TABLES[name] for name in names)


def test_forward_and_backward_are_filled_together():
    cases = (tiny(24), tiny(24, FULL)._replace(name="full"))
    rows = list(speed.rows(place(), named("forward", "backward"), cases, ("FA2", "eager")))
    assert [(table.name, row.name) for table, row in rows] == [
        ("forward", "24"),
        ("backward", "24"),
        ("forward", "full"),
        ("backward", "full"),
    ]
    for (table, row), case in zip(rows, (cases[0], cases[0], cases[1], cases[1]), strict=True):
        assert row.cells == dict.fromkeys(("ours", "FA2", "eager"), case.flops(table.what) / 1e-3 / 1e12)


def test_one_of_two_tables_alone():
    [(table, _)] = speed.rows(place(), named("backward"), [tiny()], ("eager",))
    assert table.name == "backward"


def test_growing_rows_carry_their_tokens():
    rows = [row for _, row in speed.rows(place(), named("growing"), [tiny(8), tiny(16)], ("eager",))]
    assert [row.tokens for row in rows] == [8, 16]


def test_varlen():
    case = packed(12, 12)._replace(dtype=torch.float32)
    dense = tiny(12, batch=2)._replace(heads=16, kv_heads=16, dim=128, value_dim=128)
    rows = [row for _, row in speed.varlen(place(), named("varlen"), [(case, dense)])]
    assert [row.name for row in rows] == ["2 x 12, forward", "2 x 12, backward"]
    assert all(set(row.cells) == {"packed", "dense"} and row.cells["packed"] > 0 for row in rows)


def test_window():
    work = tiny(24, sliding(4)), tiny(24)
    rows = [row for _, row in speed.window(place(), named("window"), work, peer="eager")]
    assert [row.name for row in rows] == [
        f"4 of 24 keys, {x}" for x in ("forward", "backward", "forward + backward")
    ]
    assert [row.cells for row in rows] == [{"sliding": 1.0, "causal": 1.0, "eager, sliding": 1.0}] * 3


def test_grouped():
    work = tiny(24, kv_heads=2)._replace(name="few"), tiny(24)._replace(name="many")
    rows = [row for _, row in speed.grouped(place(), named("gqa"), work)]
    assert [row.cells for row in rows] == [{"few": 1.0, "many": 1.0}] * 2


def test_memory_counts_what_must_be_held():
    case = tiny(8, batch=2, kv_heads=2)._replace(value_dim=8)
    made = memory.needed(case)
    assert (
        made == sum(x.nbytes for x in case.tensors("cpu")) + 2 * 4 * 2 * 8 * 4
    )  # as many gradients; LSE and delta
    [(_, row)] = memory.rows(place(peak=lambda call: 2 * made), named("memory"), [case], peers=("eager",))
    assert row.cells == {"ours": made / 2**19, "eager": made / 2**19, "must be held": made / 2**20}


def test_memory_marks_what_does_not_fit():
    def peak(call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    [(_, row)] = memory.rows(place(peak=peak), named("memory"), [tiny()], peers=("eager",))
    assert row.cells["ours"] == row.cells["eager"] == "OOM"


def test_overhead_is_timed_with_and_without_gradients(monkeypatch):
    tracked = []

    def clock(call, **options):
        tracked.append(isinstance(call(), tuple))
        return host_seconds(call, **options)

    monkeypatch.setattr(speed, "host_seconds", clock)
    rows = [row for _, row in speed.overhead(place(), named("launch"), tiny(), batches=2)]
    assert [row.name for row in rows] == ["24, inference", "24, forward + backward"]
    assert all(set(row.cells) == {"ours", "SDPA"} and min(row.cells.values()) > 0 for row in rows)
    assert tracked == [False] * 4 + [True] * 4


@pytest.mark.parametrize(("what", "tracked"), [("inference", False), ("forward", True)])
def test_inference_keeps_nothing_for_a_backward(what, tracked):
    ready = speed.line_up(place(), speed.same_case(tiny(), ("ours", "eager")))
    assert all(run.action(what)().requires_grad == tracked for run in ready.values())


def test_a_gpu_is_timed_by_triton(monkeypatch):
    testing = pytest.importorskip("triton.testing")
    parameters = inspect.signature(testing.do_bench)

    def clock(*arguments, **options):
        assert parameters.bind(*arguments, **options).arguments["return_mode"] == "median"
        return 2.0

    monkeypatch.setattr(testing, "do_bench", clock)
    assert gpu_seconds(lambda: None) == 2e-3


def test_cpu_calls_with_and_without_gradients():
    work = ((tiny(8), ("inference",)), (tiny(16), ("inference", "both")))
    rows = [row for _, row in cpu.calls(place(), named("cpu"), work)]
    assert [row.name for row in rows] == ["8, inference", "16, inference", "16, forward + backward"]
    assert all(row.cells == {"ours": 1.0, "SDPA": 1.0} for row in rows)


SMALL_STEPS = StepCase("tiny", 2, 5, layers=2, width=32, heads=4, kv_heads=2, dtype=torch.float32)


def test_cpu_decoding():
    rows = [row for _, row in cpu.decoding(place(backend=None), named("cpu-decode"), [SMALL_STEPS])]
    assert [row.name for row in rows] == ["tiny, static cache under a mask", "tiny, slices"]
    assert all(row.cells == {"ours": 1.0, "SDPA": 1.0} for row in rows)


@torch.no_grad()
def test_cpu_decoders_agree_until_the_cache_is_full_and_beyond():
    model = cpu.Stack(SMALL_STEPS, place(backend=None))
    given = model, torch.randn(2, 5, 32), torch.randn(2, 1, 32)
    ours, peers = cpu.OurDecoder(*given), [cpu.PeerDecoder(*given, masked=masked) for masked in (True, False)]
    for _ in range(12):
        expected = ours()
        for peer in peers:
            torch.testing.assert_close(peer(), expected)


def test_a_table_in_markdown():
    assert markdown(SPEEDS, ROWS, FACTS) == (
        "## Speeds\n"
        "`python -m attnlib bench --gpu`, a device, 2026-01-01\n\n"
        "| TFLOP/s | ours | peer | lost |\n"
        "|---|---:|---:|---:|\n"
        "| one | 400 | 500 (0.80x) | OOM |\n"
        "| two | 90.0 | 30.0 (3.00x) | 9 (10.00x) |\n"
    )


def test_less_time_is_a_lead():
    text = line(SPEEDS._replace(unit="ms"), Line("one", {"ours": 2.0, "peer": 3.0}))
    assert text == "speeds, one: ours 2, peer 3 (1.50x) [ms]"


def test_rows_may_have_different_columns():
    rows = [Line("one", {"ours": 1.0}), Line("two", {"ours": 1.0, "late": 2.0})]
    assert "| one | 1 |  |\n| two | 1 | 2 (0.50x) |" in markdown(SPEEDS, rows, FACTS)


@pytest.mark.parametrize(("x", "text"), [(1234.4, "1234"), (56.78, "56.8"), (0.1234, "0.123"), (7.0, "7")])
def test_digits(x, text):
    assert digits(x) == text


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
        "tokens": 1024,
    }


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=("two rows", "one row"))
@pytest.mark.parametrize("unit", ["TFLOP/s", "ms"])
def test_pictures(tmp_path, rows, unit):
    path = tmp_path / "x.png"
    plots.draw(SPEEDS._replace(growing=True, unit=unit), rows, path, "attnlib on a device")
    assert path.read_bytes()[:8] == PNG


def fill(where, wanted):
    return speed.rows(where, wanted, [tiny()], ("eager",))


def broken(where, wanted):
    yield wanted[0], Line("first", {"ours": 1.0})
    raise RuntimeError("lost the device")


BROKEN = tables.TableEntry(broken, Table("broken", "Broken", "ms"))
SMALL = tuple(tables.TableEntry(fill, table) for table in named("growing", "growing-training"))


def test_a_run_writes_everything_and_goes_on_after_a_failure(tmp_path, capsys):
    assert tables.run(place(), (BROKEN, *SMALL), tmp_path, "the command") == 1
    names = {path.name for path in tmp_path.iterdir()}
    written = {
        f"{name}.{kind}" for name in ("growing", "growing-training", "broken") for kind in ("md", "json")
    }
    assert names == written | {"growing.png", "growing-training.png"}
    text = capsys.readouterr().out
    assert "## 48 heads d64, causal forward, bf16" in text
    assert "ours failed: broken, the rest" in text
    assert "fails: RuntimeError: lost the device" in (tmp_path / "broken.md").read_text()


def test_tables_of_one_function_are_filled_together(tmp_path):
    asked = []

    def together(where, wanted):
        asked.append([table.name for table in wanted])
        return fill(where, wanted)

    assert (
        tables.run(
            place(), [tables.TableEntry(together, table) for _, table in SMALL], tmp_path, "the command"
        )
        == 0
    )
    assert asked == [["growing", "growing-training"]]
    for function, names in ((tables.TRAINING, ["forward", "backward"]), (tables.GROWING, asked[0])):
        assert [table.name for filled_by, table in tables.GPU if filled_by is function] == names


def test_a_run_of_one_table(tmp_path):
    assert tables.run(place(), SMALL[1:], tmp_path, "the command") == 0
    assert {path.stem for path in tmp_path.iterdir()} == {"growing-training"}
    facts = json.loads((tmp_path / "growing-training.json").read_text())["facts"]
    assert facts["command"] == "the command"
    assert facts["torch"] == f"torch {torch.__version__}"
    assert {"device", "date"} < set(facts)


def test_without_matplotlib_there_are_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    assert tables.run(place(), SMALL[:1], tmp_path, "the command") == 0
    assert not list(tmp_path.glob("*.png"))
    assert capsys.readouterr().out.count("no pictures without matplotlib") == 1


def test_the_choice_of_tables():
    every = [table.name for _, table in tables.choose(tables.GPU, ())]
    assert every[:2] == ["forward", "backward"]
    assert {*every, "cpu", "cpu-decode"} == set(TABLES)
    [(_, one)] = tables.choose(tables.GPU, ("growing-training",))
    assert one.name == "growing-training"
    with pytest.raises(ValueError, match=r"expected some of forward, backward.*got nothing, none"):
        tables.choose(tables.GPU, ("nothing", "forward", "none"))


def test_table_names_are_file_names():
    assert len(TABLES) == len(tables.GPU) + len(tables.CPU)
    assert all(name.replace("-", "").isalnum() for name in TABLES)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--only", "forward"], "--only: expected some of cpu, cpu-decode, got forward"),
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


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_command_hands_its_options_on(monkeypatch, tmp_path, where):
    asked = []
    monkeypatch.setattr(command, where, place)
    monkeypatch.setattr(command, "fill", lambda *arguments: asked.append(arguments[1:]) or 0)
    options, names = (["--gpu"], "window,gqa") if where == "cuda" else ([], "cpu-decode")
    assert main(["bench", *options, "--only", names, "--out", str(tmp_path)]) == 0
    [(entries, folder, words)] = asked
    assert [table.name for _, table in entries] == names.split(",")
    assert folder == tmp_path
    assert words.split() == ["python", "-m", "attnlib", "bench", *options, "--only", names]


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
