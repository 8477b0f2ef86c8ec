"""Tables of several ranks, filled by processes on a CPU; who differs is not timed; what there must be."""

import pytest
import torch
import torch.distributed as dist
from bench_helpers import place

from attnlib.__main__ import main
from attnlib.bench import parallel, tables
from attnlib.bench.compare import Failure
from attnlib.bench.place import cpu

TABLES = {table.name: table for _, table in tables.PARALLEL_CPU}


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield cpu()
    dist.destroy_process_group()


def test_a_run_of_two_processes(tmp_path, capsys):
    assert main(["bench", "--parallel", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "`python -m attnlib bench --parallel`" in text
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in TABLES for kind in ("md", "json")
    }
    for name, rows in (("parallel", 2), ("parallel-peers", 2), ("parallel-decode", 1)):
        lines = (tmp_path / f"{name}.md").read_text().splitlines()
        found = [line for line in lines if line.startswith("| 2 ranks, ")]
        assert len(found) == rows
        assert not any(word in line for line in found for word in ("fails", "differs"))
    assert "| ms | ring | gather | heads | one rank |" in text


def test_one_of_the_tables_alone():
    found = list(parallel.rows(place(), [TABLES["parallel-decode"]], parallel.latents, parallel.SMALL_CACHES))
    [(table, row)] = found
    assert (table.name, row.name) == ("parallel-decode", "2 ranks, 8 heads, 2 x 500")
    assert set(row.cells) == {"sharded", "copied", "one rank"}
    assert not any(isinstance(x, Failure) for x in row.cells.values())


def test_a_rank_that_fails_is_told():
    with pytest.raises(RuntimeError, match="KeyError: 'no such thing'"):
        list(parallel.rows(place(), [TABLES["parallel"]], missing, [parallel.SMALL_SEQUENCES[0]]))


def missing(place, mesh, case):
    raise KeyError("no such thing")


def test_who_differs_from_one_rank_is_not_timed(alone):
    expected = [torch.randn(9, 9), torch.randn(9)]
    checked = [
        parallel._checked(x, lambda x: [y * x for y in expected], expected, alone)
        for x in (1.0, 1.1, torch.nan)
    ]
    assert checked == [1.0, "differs from one rank by 1e-01", "differs from one rank by nan"]
    assert isinstance(checked[1], Failure)


def test_ranks_are_powers_of_two(monkeypatch, capsys):
    for count, ranks in ((2, [2]), (4, [2, 4]), (6, [2, 4]), (8, [2, 4, 8])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert parallel.counts(place()._replace(device="cuda")) == ranks
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "--gpu", "--parallel"]) == 2
    assert (
        "--parallel: expected at least 2 GPUs, got 1; without --gpu it runs on the CPU"
        in capsys.readouterr().err
    )
