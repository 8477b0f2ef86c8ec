"""The command ``python -m attnlib convert``: parse its options, convert, and print a summary."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint_files.folder import read_folder
from ..internal.bars import steps
from ..internal.units import parse_bytes
from . import targets
from .check.budget import windows_for
from .check.by_text import lines_by_text
from .check.config import require_config
from .check.lost import lost, own_errors
from .check.stock_check import StockCheck
from .checkpoint.conversion import ConversionOptions, convert_with, require_target
from .checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError
from .checkpoint.model import CheckpointModel, read_model
from .checkpoint.report import REPORT
from .ending import failed
from .latent.losses import BASELINE
from .own.branches import Branches
from .picture import Start, draw
from .stock import stock
from .targets import copies, device, require_own_options, target_of
from .text import choice
from .text.held_out import held_out
from .text.kept import WITHOUT, CalibrationStore
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
  python -m attnlib convert llama-2-7b llama-2-7b-sparse --to attnlib --select top=2048 --text my.txt
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
        reason = in_options(str(error))
        if arguments.norm == "calibrated":
            reason = reason.replace(WITHOUT, WITHOUT.replace("converts", "with --norm exact converts"))
        return _failed(reason, getattr(error, "__notes__", []), error.exit_code)
    except ImportError as error:
        return _failed(str(error), [], RequestError.exit_code)
    if not arguments.quiet:
        print(summary(report, arguments.out, source=arguments.source, texts=arguments.text or ()))
    return 0


def summary(
    report: Mapping[str, Any], out: Path, *, source: Path = Path("SOURCE"), texts: Sequence[Path] = ()
) -> str:
    """Summarise a conversion report in a few lines of text for the terminal.

    The lines may suggest a command that fine-tunes ``out`` on ``texts``, with ``source`` as the teacher.
    """
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
    has_links = source.is_dir() and any(path.is_symlink() for path in source.iterdir())
    paths = {"source": source, "out": out, "texts": texts or ("FILE",), "has_links": has_links}
    select = report["settings"].get("select")
    if sentence := lost(measures, **paths, keys=select and Branches(**select).keys):
        lines.append(sentence)
    lines += lines_by_text(measures)
    others = []
    if report["settings"].get("norm") == "exact":
        others.append("those that drop biases, such as vLLM's, need --norm calibrated")
    if (scaling := report["settings"].get("rope_scaling")) in MISREAD:
        others.append(f"vLLM and llama.cpp misread {scaling} rope scaling of latent models")
    if others:
        lines.append("; ".join(["loaders: transformers reads the result", *others]))
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
    require_target(source, Path(os.path.abspath(arguments.out)), overwrite=arguments.overwrite)
    require_config(model.checkpoint)
    if copies(arguments, model):
        chosen, settings = None, {"calibration": choice.NOTHING}
    else:
        settings = {"calibration": choice.WEIGHTS_ALONE}
    target = target_of(arguments, model, calibrated=chosen is not None)
    converter, options = target(None)  # raises for wrong options before any weights are read
    check = _check(arguments, model)  # raises if weights are missing, before a text is read
    used, kept = None, None
    if chosen is not None:
        windows, settings = chosen.windows(source)
        used = windows.used
        place = chosen.place(arguments.out, is_left=not arguments.no_keep)
        title = (
            None if arguments.quiet else "calibrating" + ("" if chosen.files else " on the bundled sample")
        )
        kept = CalibrationStore(model, windows.tokens, place, device=device(), title=title)
    _hold_out(check, arguments, model, used=used)
    with kept or nullcontext():
        if kept is not None:
            converter, options = target(kept)
        return convert_with(
            model.checkpoint,
            arguments.out,
            converter,
            ConversionOptions(
                settings={"to": arguments.to, "device": device()} | options | settings,
                max_shard_size=arguments.max_shard_size,
                allow_nonfinite=arguments.allow_nonfinite,
                overwrite=arguments.overwrite,
                keep=not arguments.no_keep,
                check=check,
                add_files=partial(_picture, Start.of(model)),
                progress=not arguments.quiet,
            ),
        )


def _picture(start: Start, report: Mapping[str, Any], folder: Path) -> None:
    with suppress(ImportError):  # matplotlib is optional
        draw(report, folder, start)


def _check(arguments: argparse.Namespace, model: CheckpointModel) -> StockCheck:
    """Return a check that compares the source and the converted model; :func:`_hold_out` chooses the text."""
    return StockCheck(
        model.checkpoint.folder,
        logits=_windows(arguments, model) > 0,
        device=device(),
        follow_links=arguments.follow_links,
        exact=None if arguments.select is None else Branches.of(arguments.select).keys,
        advance=steps(None if arguments.quiet else "comparing", 2 * model.depth, " layers"),
    )


def _hold_out(
    check: StockCheck, arguments: argparse.Namespace, model: CheckpointModel, *, used: Sequence[int] | None
) -> None:
    """Choose the held-out text of ``check``.

    The text is the rest of the user's texts after the first ``used`` tokens of each, which were used for
    calibration, or the held-out sources of the bundled sample.
    """
    if windows := _windows(arguments, model):
        texts = () if arguments.text is None else choice.read_texts(arguments.text)
        held = held_out(model.checkpoint.folder, texts, used=used if texts else None, windows=windows)
        if held is not None:
            check.tokens, check.text, check.names = held


def _windows(arguments: argparse.Namespace, model: CheckpointModel) -> int:
    """Return the number of windows of text to compare the models on."""
    windows = windows_for(model.checkpoint, device())
    if arguments.check_logits is None:
        return windows
    return max(1, windows) if arguments.check_logits else 0


def _bytes(text: str) -> int:
    """Parse a size such as ``5GB`` or ``500MiB`` into a number of bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _failed(reason: str, notes: list[str], code: int) -> int:
    return failed("convert", reason, notes, code)
