"""The command ``python -m attnlib convert``: parse its options, convert, and print a summary."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ..checkpoint_files.folder import read_folder
from ..internal.units import parse_bytes
from . import targets
from .bars import steps
from .check.budget import windows_for
from .check.by_text import lines_by_text
from .check.lost import lost, own_errors
from .check.stock_check import StockCheck
from .checkpoint import convert
from .checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError
from .checkpoint.model import CheckpointModel, read_model
from .checkpoint.report import REPORT
from .latent.losses import BASELINE
from .picture import draw
from .stock import stock
from .targets import device, require_own_options, target_of
from .text import choice
from .text.held_out import held_out
from .text.kept import CalibrationStore
from .wording import in_options

# Other programs misread these rope scalings in latent models; see docs/conversion_commands.md.
MISREAD = ("Linear", "Llama3")
EPILOG = """\
exit codes: 0 done; 1 the result cannot be written; 2 wrong request; 3 the checkpoint cannot be converted;
4 the result failed verification; 5 no space left; 130 interrupted. docs/conversion_commands.md has the
reference of all options, of the report, and of what a stopped run leaves behind.

  python -m attnlib convert llama-2-7b llama-2-7b-gqa --to gqa --kv-heads 8 --text my.txt
  python -m attnlib convert llama-2-7b llama-2-7b-mla --to mla --rank 448 --text my.txt
  python -m attnlib convert llama-2-7b llama-2-7b-own --to attnlib --cache 25% --text my.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``convert`` to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Convert a checkpoint folder into one with a smaller KV cache. Stock loaders read\n"
        "the results of --to gqa and --to mla; attnlib.load_pretrained reads those of --to attnlib."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="checkpoint folder with config.json and safetensors files"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create for the result")
    targets.add_arguments(parser)
    choice.add_arguments(parser)
    files = parser.add_argument_group("files and checks")
    files.add_argument(
        "--max-shard-size",
        type=_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="largest size of a weights file (default: 5GB)",
    )
    files.add_argument(
        "--follow-links", action="store_true", help="follow the links in a snapshot of a download cache"
    )
    files.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    files.add_argument(
        "--no-keep",
        action="store_true",
        help="delete finished work if the run stops, instead of keeping it to resume",
    )
    files.add_argument("--allow-nonfinite", action="store_true", help="copy weights that are NaN or infinite")
    files.add_argument(
        "--check-logits",
        action=argparse.BooleanOptionalAction,
        help="compare the logits of source and result on a text (default: up to 2 billion weights, "
        "140 billion on a GPU)",
    )
    files.add_argument("--quiet", action="store_true", help="print errors only")


def run(arguments: argparse.Namespace) -> int:
    """Run ``convert`` with parsed arguments: convert, print a summary, and return the exit code."""
    try:
        report = _convert(arguments)
    except KeyboardInterrupt as error:
        return _failed("interrupted", getattr(error, "__notes__", ["nothing was written"]), 130)
    except (CheckpointError, RequestError, VerificationError, OutputError) as error:
        return _failed(in_options(str(error)), getattr(error, "__notes__", []), error.exit_code)
    except ImportError as error:
        return _failed(str(error), [], RequestError.exit_code)
    if not arguments.quiet:
        print(summary(report, arguments.out))
    return 0


def summary(report: Mapping[str, Any], out: Path) -> str:
    """Summarise a conversion report in a few lines of text for the terminal."""
    cache = report["cache_bytes_per_token"]
    lines = [f"cache bytes per token: {cache['before']:,} before, {cache['after']:,} after"]
    lines += [choice.calibration_line(report["settings"]), _largest_error(report)]
    measures = report["measures"]
    if "kl_nats" in measures:
        difference, largest = measures["largest_logit_difference"], measures["largest_logit"]
        lines.append(
            f"logits: largest difference {difference:.3g}, largest logit {largest:.3g}; "
            f"KL divergence {measures['kl_nats']:.3g} nats"
        )
    if sentence := lost(measures, out=out):
        lines.append(sentence)
    lines += lines_by_text(measures)
    if report["settings"].get("norm") == "exact":
        lines.append(
            "loaders: transformers reads the result; those that drop biases, such as vLLM's, need "
            "--norm calibrated"
        )
    if (scaling := report["settings"].get("rope_scaling")) in MISREAD:
        lines.append(
            f"loaders: transformers reads the result; vLLM and llama.cpp misread {scaling} rope scaling "
            "of latent models"
        )
    return "\n".join([*lines, f"report: {out / REPORT}"])


def _largest_error(report: Mapping) -> str:
    """Return the summary's line about the largest layer error, compared with a plain SVD if measured.

    In a report, None is an error that is not finite, so it counts as larger than any number.
    """
    errors = [(layer, name) for layer in report["layers"] for name in own_errors(layer) if name != "layer"]
    layer, name = max(errors, key=lambda error: _number(error[0][error[1]]))
    line = f"largest layer error: {name} {_number(layer[name]):.3g} in layer {layer['layer']}"
    if (baseline := f"{BASELINE}{name}") in layer:
        line += f" (plain SVD: {_number(layer[baseline]):.3g})"
    return line + (", for random inputs" if report["settings"]["calibration"] == choice.WEIGHTS_ALONE else "")


def _number(error: float | None) -> float:
    return math.inf if error is None else error


def _convert(arguments: argparse.Namespace) -> dict[str, object]:
    require_own_options(arguments)
    chosen = choice.Choice.of(arguments)
    stock()  # if transformers is missing, fail before the work starts
    source = arguments.source.resolve()
    model = read_model(read_folder(source, follow_links=arguments.follow_links))
    if arguments.kv_heads == model.shape.kv_heads:
        chosen, settings = None, {"calibration": choice.NOTHING}
    else:
        settings = {"calibration": choice.WEIGHTS_ALONE}
    target = target_of(arguments, model, calibrated=chosen is not None)
    converter, options = target(None)  # raises for wrong options before any weights are read
    used, kept = None, None
    if chosen is not None:
        windows, settings = chosen.windows(source)
        used = windows.used
        place = chosen.place(arguments.out, is_left=not arguments.no_keep)
        title = (
            None if arguments.quiet else "calibrating" + ("" if chosen.files else " on the bundled sample")
        )
        kept = CalibrationStore(model, windows.tokens, place, device=device(), title=title)
    check = _check(arguments, model, used)
    with kept or nullcontext():
        if kept is not None:
            converter, options = target(kept)
        report = convert(
            model.checkpoint,
            arguments.out,
            converter,
            settings={"to": arguments.to, "device": device()} | options | settings,
            max_shard_size=arguments.max_shard_size,
            allow_nonfinite=arguments.allow_nonfinite,
            overwrite=arguments.overwrite,
            keep=not arguments.no_keep,
            check=check,
            progress=not arguments.quiet,
        )
    with suppress(ImportError):  # matplotlib is optional
        draw(report, arguments.out)
    return report


def _check(arguments: argparse.Namespace, model: CheckpointModel, used: Sequence[int] | None) -> StockCheck:
    """Return a check that compares the source and the converted model on held-out text.

    The text is the rest of the user's texts after the first ``used`` tokens of each, which were used for
    calibration, or the held-out sources of the bundled sample.
    """
    windows, held = windows_for(model.checkpoint, device()), None
    if arguments.check_logits is not None:
        windows = max(1, windows) if arguments.check_logits else 0
    if windows:
        texts = () if arguments.text is None else choice.read_texts(arguments.text)
        used = used if texts else None
        held = held_out(model.checkpoint.folder, texts, used=used, windows=windows)
    return StockCheck(
        model.checkpoint.folder,
        logits=windows > 0,
        tokens=None if held is None else held.tokens,
        text=None if held is None else held.text,
        names=() if held is None else held.names,
        device=device(),
        follow_links=arguments.follow_links,
        advance=steps(None if arguments.quiet else "comparing", 2 * model.depth, " layers"),
    )


def _bytes(text: str) -> int:
    """Parse a size such as ``5GB`` or ``500MiB`` into a number of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _failed(reason: str, notes: list[str], code: int) -> int:
    line = " ".join("; ".join([reason, *notes]).split())
    print(f"python -m attnlib convert: {line}", file=sys.stderr)
    return code
