"""The command ``python -m attnlib finetune``: its options, its summary and its exit codes."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert.checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError
from ..convert.wording import in_options

if TYPE_CHECKING:
    from .settings import Settings

NAMES = ("original", "before", "after", "window")  # the scores of a report, in the order of the summary
EPILOG = """\
exit codes:
  0    the result was written and verified
  1    the result could not be written
  2    invalid request
  3    a folder cannot be used
  4    the result failed verification
  5    not enough disk space
  130  interrupted

To resume an interrupted run, run the same command again.

examples:
  python -m attnlib finetune llama-gqa llama-gqa-healed --teacher llama --text my.txt
  python -m attnlib finetune llama-sparse llama-healed --teacher llama --text my.txt --context 8192
  torchrun --nproc-per-node 8 -m attnlib finetune llama-gqa llama-gqa-healed --teacher llama \\
      --text my.txt --batch 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser; options left out get their defaults from :class:`Settings`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Distill a converted checkpoint back to the quality of the original that it was converted from. New\n"
        "index branches (convert --select) first learn alone; then the model learns over the chosen keys."
    )
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the converted checkpoint folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write the result to")
    needed = parser.add_argument_group("required")
    needed.add_argument(
        "--teacher",
        type=Path,
        required=True,
        metavar="ORIGINAL",
        help="the checkpoint folder that SOURCE was converted from",
    )
    needed.add_argument(
        "--text",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="UTF-8 text files to train on; the last tenth of each is held out for scoring",
    )
    _add_training(parser)
    files = parser.add_argument_group("machine and files")
    files.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    files.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="precision of matrix products (default: bf16 on a GPU, else fp32)",
    )
    files.add_argument(
        "--checkpointing", action="store_true", help="save memory: recompute activations in the backward"
    )
    files.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help="save a state every N steps (default: an eighth of the steps)",
    )
    files.add_argument(
        "--windows",
        type=int,
        metavar="N",
        help="held-out sequences per score (default: up to 256)",
    )
    files.add_argument("--tensorboard", action="store_true", help="also write a log for TensorBoard")
    files.add_argument("--quiet", action="store_true", help="print errors only")


def _add_training(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("training objective")
    learning.add_argument(
        "--train", choices=("attention", "all"), help="weights to train (default: attention)"
    )
    learning.add_argument(
        "--lora", type=int, metavar="RANK", help="train LoRA adapters of this rank, merged at the end"
    )
    learning.add_argument(
        "--layerwise",
        type=float,
        metavar="SHARE",
        help="share of the steps in which each attention layer, or index branch, learns on its own (default: "
        "0.5)",
    )
    learning.add_argument(
        "--objective",
        choices=("teacher", "text"),
        help="match only the teacher, or learn the text while the teacher fades out (default: teacher)",
    )
    steps = parser.add_argument_group("steps")
    for name, value_type, metavar, help_text in (
        ("--steps", int, "N", "optimizer steps (default: 1000 on a GPU, 200 on a CPU)"),
        ("--batch", int, "N", "sequences per step, over all ranks (default: 8)"),
        ("--context", int, "N", "tokens per sequence (default: 512)"),
        ("--accumulate", int, "N", "split a batch into N parts to save memory (default: 1)"),
        ("--rate", float, "X", "peak learning rate (default: 3e-4; with --lora: 1e-3; sparse: 7.3e-6)"),
        ("--index-rate", float, "X", "peak rate of index branches that learn alone (default: 1e-3)"),
        ("--warm-up", float, "SHARE", "share of the steps for warm-up (default: 0.06)"),
        ("--clip", float, "X", "maximum gradient norm (default: 1)"),
        ("--decay", float, "X", "weight decay of matrices (default: 0)"),
        ("--seed", int, "N", "seed for the text order and the adapters (default: 0)"),
    ):
        steps.add_argument(name, type=value_type, metavar=metavar, help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Finetune, print a summary and return the exit code."""
    try:
        settings = _settings(arguments)
        from .ranks import ElsewhereError
        from .run import finetune
    except ImportError as error:
        return _failed(str(error), [], RequestError.exit_code)
    try:
        report = finetune(settings)
    except KeyboardInterrupt as error:
        return _failed("interrupted", getattr(error, "__notes__", ["nothing was written"]), 130)
    except (CheckpointError, RequestError, VerificationError, OutputError) as error:
        return _failed(in_options(str(error)), getattr(error, "__notes__", []), error.exit_code)
    except ElsewhereError:
        return OutputError.exit_code
    except ImportError as error:
        return _failed(str(error), [], RequestError.exit_code)
    if not settings.quiet and os.environ.get("RANK", "0") == "0":
        print(summary(report, settings.out))
    return 0


def summary(report: Mapping[str, Any], out: Path) -> str:
    """Return the few lines that the command prints at the end of a run."""
    bits, perplexity = report["held_out_bits_per_byte"], report["held_out_perplexity"]
    scores = (
        f"{name} {bits[name]:.4f} (perplexity {perplexity[name]:.4g})" for name in NAMES if name in bits
    )
    shares = report.get("mass_recall", {})
    recall = ", ".join(f"{name} {shares[name]:.3f}" for name in NAMES if name in shares)
    recall = f"\nmass recall of the chosen keys: {recall}" if recall else ""
    counts, run = report["parameters"], report["run"]
    speed = (
        "" if run["tokens_per_second"] is None else f" at {run['tokens_per_second']:,.0f} tokens per second"
    )
    on = run["device"] if run["ranks"] == 1 else f"{run['ranks']} x {run['device']}"
    return f"""\
held-out text ({report["held_out_tokens"]:,} tokens), bits per byte: {", ".join(scores)}{recall}
trained: {counts["trained"]:,} of {counts["all"]:,} parameters
time: {_duration(run["seconds"])} on {on}, {run["steps"]:,} steps{speed}
report: {out / "finetune_report.json"}"""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _settings(arguments: argparse.Namespace) -> "Settings":
    import torch

    from .settings import Settings

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    given = {name: value for name, value in given.items() if name in Settings.__slots__}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(**({"device": device} | given | {"text": tuple(arguments.text)}))


def _failed(reason: str, notes: list[str], code: int) -> int:
    line = " ".join("; ".join([reason, *notes]).split())
    print(f"python -m attnlib finetune: {line}", file=sys.stderr)
    return code
