"""The command ``python -m attnlib finetune``: its options, its summary and its exit codes."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert.checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError

if TYPE_CHECKING:
    from .settings import Settings

EPILOG = """\
exit codes: 0 done; 2 a wrong request; 3 a folder cannot be used; 4 the result is not what it should be; 5 no space;
1 it cannot be written for another reason; 130 interrupted. The same command again goes on where it was stopped.

  python -m attnlib finetune llama-gqa llama-gqa-healed --teacher llama --text my.txt
  torchrun --nproc-per-node 8 -m attnlib finetune llama-gqa llama-gqa-healed --teacher llama --text my.txt --batch 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command; options that are not given take their defaults from Settings."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "A converted checkpoint folder back to the quality of the one that it was converted from."
    )
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the converted folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the result will be")
    needed = parser.add_argument_group("required")
    needed.add_argument(
        "--teacher", type=Path, required=True, metavar="ORIGINAL", help="what it was converted from"
    )
    needed.add_argument(
        "--text",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="UTF-8; the last tenth is held out",
    )
    _add_training(parser)
    files = parser.add_argument_group("machine and files")
    files.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    files.add_argument(
        "--precision", choices=("bf16", "fp32"), help="of products (default: bf16 on a GPU, else fp32)"
    )
    files.add_argument("--checkpointing", action="store_true", help="compute layers again in the backward")
    files.add_argument(
        "--save-every", type=int, metavar="N", help="steps between states (default: an eighth of them)"
    )
    files.add_argument("--windows", type=int, metavar="N", help="of held-out text for a score (default: 256)")
    files.add_argument("--tensorboard", action="store_true", help="log for TensorBoard, too")
    files.add_argument("--quiet", action="store_true", help="print errors only")


def _add_training(parser: argparse.ArgumentParser) -> None:
    learning = parser.add_argument_group("what is learnt")
    learning.add_argument("--train", choices=("attention", "all"), help="which weights (default: attention)")
    learning.add_argument(
        "--lora", type=int, metavar="RANK", help="by adapters of this rank, merged in the end"
    )
    learning.add_argument(
        "--layerwise", type=float, metavar="SHARE", help="of steps, layer by layer (default: 0.5)"
    )
    learning.add_argument(
        "--objective",
        choices=("teacher", "text"),
        help="the teacher alone, or the text and a teacher that fades",
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument("--steps", type=int, metavar="N", help="default: 1000")
    steps.add_argument(
        "--batch", type=int, metavar="N", help="sequences of a step, on all ranks (default: 8)"
    )
    steps.add_argument("--context", type=int, metavar="N", help="tokens of a sequence (default: 512)")
    steps.add_argument(
        "--accumulate", type=int, metavar="N", help="parts of a batch, one at a time (default: 1)"
    )
    steps.add_argument(
        "--rate", type=float, metavar="X", help="peak of the learning rate (default: 3e-4; LoRA: 1e-3)"
    )
    steps.add_argument("--warm-up", type=float, metavar="SHARE", help="of steps (default: 0.06)")
    steps.add_argument("--clip", type=float, metavar="X", help="largest norm of the gradient (default: 1)")
    steps.add_argument("--decay", type=float, metavar="X", help="weight decay of matrices (default: 0)")
    steps.add_argument(
        "--seed", type=int, metavar="N", help="of the order of the text and of adapters (default: 0)"
    )


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
        return _failed(str(error), getattr(error, "__notes__", []), error.exit_code)
    except ElsewhereError:
        return OutputError.exit_code
    except ImportError as error:
        return _failed(str(error), [], RequestError.exit_code)
    if not settings.quiet and os.environ.get("RANK", "0") == "0":
        print(summary(report, settings.out))
    return 0


def summary(report: Mapping[str, Any], out: Path) -> str:
    """Return a short text summary of the report."""
    bits, perplexity = report["held_out_bits_per_byte"], report["held_out_perplexity"]
    told = (
        f"{name} {bits[name]:.4f} (perplexity {perplexity[name]:.4g})"
        for name in ("original", "before", "after")
    )
    counts = report["parameters"]
    return f"""\
held-out text, bits per byte: {", ".join(told)}
trained: {counts["trained"]:,} of {counts["all"]:,} parameters
report: {out / "finetune_report.json"}"""


def _settings(arguments: argparse.Namespace) -> "Settings":
    import torch

    from .settings import Settings

    given = {name: value for name in Settings.__slots__ if (value := getattr(arguments, name)) is not None}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(**({"device": device} | given | {"text": tuple(arguments.text)}))


def _failed(reason: str, notes: list[str], code: int) -> int:
    line = " ".join("; ".join([reason, *notes]).split())
    print(f"python -m attnlib finetune: {line}", file=sys.stderr)
    return code
