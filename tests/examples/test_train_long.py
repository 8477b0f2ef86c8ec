"""Training on sequences that ranks share: the losses of one process, weights that anybody loads, refusals."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import train_long

EXAMPLE = Path(train_long.__file__)
SMALL = ("--device", "cpu", "--tokens", "64", "--width", "32", "--steps", "4", "--margin", "-9")


def run(ranks: int, text_file: Path, *more: str) -> str:
    """What the example prints on so many processes."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    command = [sys.executable, *launch, str(EXAMPLE), "--text", str(text_file), *SMALL, *more]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"step +\d+ +(\S+) bits/byte", text)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what reads the weights is one process
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, ("--form", "ring", "--checkpointing")),
        pytest.param(2, ("--context-parallel", "1"), marks=pytest.mark.slow),
        pytest.param(2, ("--attention", "mla", "--form", "gather"), marks=pytest.mark.slow),
        pytest.param(4, ("--context-parallel", "2", "--form", "heads"), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_losses_are_the_same_for_any_number_of_ranks(ranks, more, text_file, tmp_path):
    alone = run(1, text_file, *more, "--context-parallel", "1", "--out", str(tmp_path / "alone"))
    shared = run(ranks, text_file, *more, "--out", str(tmp_path / "shared"))
    assert len(losses(alone)) == 4
    torch.testing.assert_close(losses(shared), losses(alone), rtol=0, atol=1e-4)
    assert losses(alone)[0] != losses(alone)[-1]
    assert len(list((tmp_path / "shared").glob("*.safetensors"))) == ranks
    found = [weights(tmp_path / name, more) for name in ("alone", "shared")]
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-4)


def weights(folder: Path, more: tuple[str, ...]) -> dict:
    """What was saved, read by one process."""
    options = train_long.parse([*SMALL, *more])
    state = train_long.make_model(options, None).state_dict()
    state.pop("lm_head.weight")
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


def test_learning_beats_byte_frequencies(text_file, capsys):
    options = ("--text", str(text_file), *SMALL[:6], "--steps", "60", "--rate", "1e-2", "--form", "ring")
    train_long.main(options)
    text = capsys.readouterr().out
    assert "ranks: 1, 1 per sequence, with 64 of 64 tokens each" in text
    assert re.search(r"step +60 ", text)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--tokens", "63"), "--tokens: expected a multiple of 2 x 1 ranks, got 63"),
        (
            ("--tokens", "1000000"),
            "--tokens: expected fewer than the text's .*, got 1,000,000; use a longer",
        ),
        (("--context-parallel", "3"), "--context-parallel: expected a divisor of the 1 ranks, got 3"),
        (("--margin", "0.9"), "bits/byte: expected at most .*; train longer"),
        (("--text", "nowhere"), "No such file"),
    ],
)
def test_what_cannot_be_is_said(more, why, text_file):
    with pytest.raises(SystemExit, match=why):
        train_long.main(["--text", str(text_file), *SMALL, "--steps", "1", *more])


def test_groups_need_as_many_sequences():
    options = train_long.parse([*SMALL, "--sequences", "3", "--context-parallel", "2"])
    with pytest.raises(ValueError, match="--sequences: expected a multiple of the 2 groups of ranks, got 3"):
        train_long.check(options, 4)


def test_a_rank_says_what_it_receives():
    options = train_long.parse([*SMALL, "--form", "gather", "--context-parallel", "2"])
    text = train_long.describe(options, 4)
    assert text.startswith(
        "ranks: 4, 2 per sequence, with 32 of 64 tokens each; per sequence, a layer receives 16 KiB"
    )
