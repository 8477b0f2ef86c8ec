"""Processes that share a student: the weights of one, and a run that was killed goes on with another number
of them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from healing_folders import SMALL, contents, heal
from safetensors.torch import load_file

from attnlib.__main__ import main

USUAL = ("--layerwise", 0.25, "--save-every", 3)
KILLED = """
import os, signal, sys
from attnlib.internal import files
from attnlib.__main__ import main
left, replace = [int(sys.argv.pop(1))], os.replace

class Os:
    def __getattr__(self, name):
        return getattr(os, name)

    def replace(self, *paths):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        replace(*paths)

files.os = Os()
main(sys.argv[1:])
"""


def start(folders, out, *options, ranks=1, code=None, source="half"):
    """The command in processes of its own; with ``code``, that in place of the module."""
    given = ("finetune", folders / source, out, "--teacher", folders / "original", "--text", folders / "text")
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    program = ["-c", code[0], str(code[1])] if code is not None else [*launch, "-m", "attnlib"]
    command = [sys.executable, *program, *map(str, (*given, *SMALL, *USUAL, *options))]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_a_run_that_is_killed_while_it_saves_goes_on(folders, tmp_path):
    """At its second state, which is written and not yet in place: the first one counts."""
    killed, whole = tmp_path / "killed" / "out", tmp_path / "whole" / "out"
    for out in (killed, whole):
        out.parent.mkdir()
    assert start(folders, killed, code=(KILLED, 1)).returncode == -9
    assert not killed.exists()
    [left] = killed.parent.glob("out.partial-*")
    assert len((left / "log.csv").read_text().splitlines()) == 7  # six steps, of which the state knows three
    for out in (killed, whole):
        assert heal(folders, out, *USUAL) == 0
    assert contents(killed) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("--train", "all", "--checkpointing"), ("--lora", 2), ("--accumulate", 2, "--objective", "text")],
)
def test_two_ranks_learn_what_one_does(folders, tmp_path, options):
    assert heal(folders, tmp_path / "one", *USUAL, *options) == 0
    ran = start(folders, tmp_path / "two", *options, ranks=2)
    assert ran.returncode == 0, ran.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--train", "all", "--checkpointing")])
def test_two_ranks_train_index_branches_as_one_does(folders, tmp_path, options):
    """Alone for half of the steps, where no output of a layer has a gradient."""
    select = ("--select", "top=4,heads=2", "--no-calibration", "--quiet")
    made = ("convert", folders / "original", folders / "chosen", "--to", "attnlib", *select, "--overwrite")
    assert main([str(x) for x in made]) == 0
    options = (*options, "--layerwise", 0.5, "--index-rate", 1e-2)
    assert heal(folders, tmp_path / "one", *USUAL, *options, source="chosen") == 0
    ran = start(folders, tmp_path / "two", *options, ranks=2, source="chosen")
    assert ran.returncode == 0, ran.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=0, atol=1e-4)
    reports = [json.loads((tmp_path / name / "finetune_report.json").read_text()) for name in ("one", "two")]
    for name, recall in reports[0]["mass_recall"].items():
        assert reports[1]["mass_recall"][name] == pytest.approx(recall, abs=1e-4)


@pytest.mark.slow
def test_ranks_end_together_when_the_first_refuses(folders, tmp_path):
    (tmp_path / "mine").write_text("")
    ran = start(folders, tmp_path, ranks=2)
    assert ran.returncode != 0
    assert ran.stderr.count("OUT: expected an empty folder") >= 1
    ran = start(folders, tmp_path / "out", "--batch", 3, ranks=2)
    assert "--batch: expected a multiple of 2" in ran.stderr
    (tmp_path / "out.lock").mkdir()
    ran = start(folders, tmp_path / "out", ranks=2)
    assert ran.returncode != 0
    assert not list(tmp_path.glob("out.partial-*"))
