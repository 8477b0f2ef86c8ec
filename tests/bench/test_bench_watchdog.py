"""A case that hangs: named, and the end of the run."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from bench_helpers import place, tiny

from attnlib import KVLayout
from attnlib.bench import decode, memory, speed, steps, tables
from attnlib.bench.stored import Decoding
from attnlib.bench.watchdog import HANGS, watched

TABLES = {table.name: table for _, table in tables.GPU}
GQA = Decoding("gqa", 3, 4, 40, KVLayout.grouped(2, 16, dtype=torch.float32))
STEPS = steps.StepCase("2 x 9", 2, 9, layers=2, width=64, heads=4, kv_heads=2, dtype=torch.float32)

HANGING = """
import time
from functools import partial
from pathlib import Path
import sys
from bench_helpers import place, tiny
from attnlib.bench import speed, tables
from attnlib.bench.watchdog import watched

def clock(call):
    if len(seen) == 2:
        time.sleep(60)  # as a kernel does that waits for what never comes
    return 1e-3

def fill(where, wanted):
    for case in (tiny(8), tiny(16)):
        yield from speed.rows(where, wanted, [case], ("eager",))
        seen.append(case)

seen = [None]
speed.watched = partial(watched, seconds=2)
[entry] = [tables.TableEntry(fill, table) for _, table in tables.GPU if table.name == "forward"]
tables.run(place(clock), [entry], Path(sys.argv[1]), "the command")
"""


def test_a_case_that_hangs_is_named_and_ends_the_run(tmp_path):
    paths = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.returncode == HANGS
    assert "forward, 16: not done after 2 s" in run.stderr
    assert "in clock" in run.stderr  # who was called
    assert "| 8 |" in (tmp_path / "forward.md").read_text()  # what was done before is kept


def test_what_ends_in_time_is_left_alone():
    with pytest.raises(KeyError), watched("one", 0.01):
        raise KeyError
    with watched("two", 0.01):
        pass
    time.sleep(0.05)  # else the process would end here


def test_every_case_on_a_gpu_is_watched(monkeypatch):
    names = []

    @contextmanager
    def remember(name):
        names.append(name)
        yield

    for module in (decode, memory, speed, steps):
        monkeypatch.setattr(module, "watched", remember)
    work = {
        "forward": partial(speed.rows, work=[tiny()], peers=("eager",)),
        "launch": partial(speed.overhead, case=tiny(), batches=1),
        "memory": partial(memory.rows, work=[tiny()], peers=("eager",)),
        "decode": partial(decode.rows, work=[GQA], fills=decode.STORAGES, peers=("FA2",)),
        "decode-launch": partial(steps.rows, work=[STEPS], measure=partial(steps.launches, batches=1)),
    }
    for name, fill in work.items():
        assert len(list(fill(place(), [TABLES[name]]))) >= 1
    assert names == ["forward, 24", "launch, 24", "memory, 24", "decode, gqa", "decode-launch, 2 x 9"]
