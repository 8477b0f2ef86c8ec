"""Decoding with heads and caches that ranks share: as one process, with half of its cache on each of two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import serve_parallel
import torch

EXAMPLE = Path(serve_parallel.__file__)
SMALL = ("--device", "cpu", "--width", "64", "--prompt-tokens", "128", "--new-tokens", "5", "--prompts", "2")


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.endswith("KiB")]


@pytest.mark.parametrize("attention", ["mla", pytest.param("mqa", marks=pytest.mark.slow)])
def test_two_ranks_decode_as_one(attention):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLE),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, *SMALL, "--attention", attention], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    (one, _, alone, _), (two, _, shared, _) = table(ended.stdout)
    assert (one, two) == ("1", "2")
    assert 0.5 <= float(shared) / float(alone) <= 0.6  # a page more of each sequence at most
    assert "the logits agree within" in ended.stdout


def test_one_process_is_enough(capsys):
    serve_parallel.main(SMALL)
    (one, _, alone, _), (again, _, shared, _) = table(capsys.readouterr().out)
    assert (one, alone) == (again, shared)


def test_other_logits_and_other_bytes_fail(monkeypatch):
    found = serve_parallel.Decoded(torch.zeros(1, 1), torch.ones(1, 1, 4), 1.0, 1)
    with pytest.raises(
        SystemExit, match=r"logits: expected those of one process within 0.0001 .*, got 1.0e-03"
    ):
        serve_parallel.check_same(found._replace(logits=found.logits * 1.001), found)
    monkeypatch.setattr(serve_parallel, "cache_bytes", lambda *a, **k: 7)
    with pytest.raises(SystemExit, match="cache of a rank: expected 7 bytes by formula, got"):
        serve_parallel.main(SMALL)


def test_heads_that_ranks_cannot_share(monkeypatch):
    monkeypatch.setattr(serve_parallel, "share_heads", refuse)
    with pytest.raises(SystemExit, match="the heads do not divide"):
        serve_parallel.main(SMALL)


def refuse(model, mesh):
    raise ValueError("the heads do not divide")
