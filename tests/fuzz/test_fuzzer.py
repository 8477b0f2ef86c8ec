"""The fuzzer: its oracle by itself, a share of its cases on a CPU, and bugs planted for it to find."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz.__main__ import main
from fuzz.cases import KINDS, failures, run
from fuzz.oracle import Rule, Sequence, attend, philox, quantised
from fuzz.planted import PLANTED

HERE = Path(__file__).parent
# Cases of each kind: 45 s on one core of an EPYC. The first CHUNK run by default, the others with -m slow.
TURNS = 350
CHUNK = 25
DEEP = (
    "a forked page lost in a failed step",
    "a stale table after a failed step",
)  # bugs that take many cases to find
SHARES = [pytest.param(n, marks=[pytest.mark.slow] if n >= CHUNK else []) for n in range(0, TURNS, CHUNK)]


@pytest.mark.parametrize("name", ["oracle.py", "judge.py", "draw.py"])
def test_what_says_what_is_right_shares_no_code_with_the_library(name):
    imported = set()
    for node in ast.walk(ast.parse((HERE / name).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0] if not node.level else f".{node.module}")
    assert imported <= {
        "collections",
        "dataclasses",
        "numpy",
        "random",
        "torch",
        "typing",
        ".draw",
        ".judge",
        ".oracle",
    }


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_oracles_bits_are_the_known_answers(counter, key, words):
    """Those that come with Random123, of the paper's authors."""
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == words


def test_the_oracle_by_hand():
    """Two queries, the last of three keys of one channel, of which the second query sees the last two."""
    q, k, v = (
        torch.tensor(x, dtype=torch.float64)[:, None, None]
        for x in ([5.0, 2.0], [9.0, 3.0, -1.0], [8.0, 1.0, 4.0])
    )
    x = Sequence(q, k, v, slopes=torch.tensor([0.5]), sinks=torch.tensor([0.25]))
    out, lse = attend(x, Rule(left=1, right=0, scale=0.5, softcap=2.0))
    logits = 2 * math.tanh(3.0 / 2) - 0.5, 2 * math.tanh(-1.0 / 2)
    total = sum(map(math.exp, (*logits, 0.25)))
    assert float(lse[0, 1]) == pytest.approx(math.log(total))
    assert float(out[1]) == pytest.approx((math.exp(logits[0]) * 1 + math.exp(logits[1]) * 4) / total)


def test_the_oracle_rounds_as_one_byte_does():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    assert torch.equal(quantised(every, torch.float8_e4m3fn), every)
    x = torch.cat((torch.randn(5000) * 10.0 ** torch.randint(-3, 3, (5000,)), torch.tensor([448.0])))
    x = x[x.abs() <= 448]
    assert torch.equal(quantised(x, torch.float8_e4m3fn), x.to(torch.float8_e4m3fn).double())
    steps = torch.tensor([127.0, -3.4, 2.5, 3.5, 0.0])
    assert quantised(steps, torch.int8).tolist() == [127, -3, 2, 4, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", SHARES)
def test_a_share_of_the_cases_finds_nothing(kind, first):
    found = [str(failure) for failure in failures(first, CHUNK, "cpu", (kind,))]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if x in DEEP else []) for x in PLANTED]
)
def test_a_planted_bug_is_found(name, monkeypatch):
    kind, most, where, attribute, bug = PLANTED[name]
    monkeypatch.setattr(where, attribute, bug(getattr(where, attribute)))
    found = next(failures(0, most, "cpu", (kind,)), None)
    assert found is not None
    assert str(found).startswith(f"python tests/fuzz --seed {found.seed} --kind {kind} --device cpu\n")
    assert str(run(found.seed, kind, "cpu")) == str(found)


def test_the_command_prints_what_failed_and_ends_with_1(monkeypatch, capsys):
    kind, most, where, attribute, bug = PLANTED["scale squared"]
    monkeypatch.setattr(where, attribute, bug(getattr(where, attribute)))
    assert main(["--seed", "0", "--count", str(most), "--kind", kind]) == 1
    told = capsys.readouterr().out
    assert (
        f"\npython tests/fuzz --seed {next(failures(0, most, 'cpu', (kind,))).seed} --kind {kind} --device "
        "cpu\n" in told
    )
    assert f"{most} cases on cpu from seed 0 on" in told


def test_the_command_runs_from_the_root():
    command = [sys.executable, "tests/fuzz", "--seed", "3", "--kind", "dense"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith(
        "1 cases on cpu from seed 3 on"
    )  # behind lines of progress, if slow
