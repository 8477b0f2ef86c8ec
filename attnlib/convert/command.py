"""``python -m attnlib convert``: its options, and what it does with them."""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from .check.budget import windows_for
from .check.lost import lost, own_errors
from .check.stock_check import StockCheck
from .checkpoint import convert
from .checkpoint.errors import CheckpointError, OutputError, RequestError, VerificationError
from .checkpoint.folder import read_folder
from .checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from .checkpoint.model import Model, has_key_norms, read_model
from .checkpoint.report import REPORT
from .heads.align import Align
from .heads.converter import StoredMerge, grouped, rotates_alike
from .heads.recipe import Grouping, recipe
from .latent.deepseek import converter as latent_converter
from .latent.losses import BASELINE
from .latent.norm import Norm, check_biases, check_text
from .stock import stock
from .text import choice
from .text.held_out import held_out
from .text.kept import Kept
from .text.tokens import read_text
from .wording import in_options

REACH = 2048
BEST_MERGE = "default: calibrated principal, else mean"
BEST_GROUPING = "default: with a principal merge similar, else neighbours"
UNITS = (("", 1), ("KB", 10**3), ("MB", 10**6), ("GB", 10**9), ("KIB", 2**10), ("MIB", 2**20), ("GIB", 2**30))
GQA_OPTIONS = ("kv_heads", "merge", "align", "grouping")
MLA_OPTIONS = ("rank", "rope_dim", "norm")
EPILOG = """\
exit codes: 0 done; 2 a wrong request; 3 the checkpoint cannot be converted; 4 the result is not what it should be;
5 no space; 1 it cannot be written for another reason; 130 interrupted. docs/conversion.md says what is kept.

  python -m attnlib convert llama-2-7b llama-2-7b-gqa --to gqa --kv-heads 8 --text my.txt
  python -m attnlib convert llama-2-7b llama-2-7b-mla --to mla --rank 448 --text my.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "A checkpoint folder into one with a smaller KV cache, which stock loaders load."
    parser.epilog = EPILOG
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a folder with config.json and safetensors")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the result will be")
    parser.add_argument("--to", choices=("gqa", "mla"), required=True, help="fewer KV heads, or latent attention")
    heads = parser.add_argument_group("with --to gqa")
    heads.add_argument("--kv-heads", type=int, metavar="N", help="KV heads of each layer, required")
    heads.add_argument("--merge", choices=get_args(StoredMerge), help=f"how heads become one ({BEST_MERGE})")
    heads.add_argument("--align", choices=get_args(Align), help="what is turned before (default: none)")
    heads.add_argument("--grouping", choices=get_args(Grouping), help=f"which become one ({BEST_GROUPING})")
    latent = parser.add_argument_group("with --to mla")
    latent.add_argument("--rank", type=int, metavar="N", help="of the latent, required")
    latent.add_argument("--rope-dim", type=int, metavar="N", help="rotary channels (default: 64)")
    latent.add_argument(
        "--norm", choices=get_args(Norm), help="how that of latents is passed: exact needs biases (default: exact)"
    )
    parser.add_argument(
        "--reach", type=int, metavar="N", help=f"distance over which keys should hold (default: {REACH})"
    )
    choice.add_arguments(parser)
    files = parser.add_argument_group("files and checks")
    files.add_argument("--max-shard-size", type=_bytes, default=5 * 10**9, metavar="SIZE", help="default: 5GB")
    files.add_argument("--follow-links", action="store_true", help="take the snapshot of a download cache")
    files.add_argument("--overwrite", action="store_true", help="replace an earlier result")
    files.add_argument("--no-keep", action="store_true", help="remove what a failed run finished, instead of resuming")
    files.add_argument("--allow-nonfinite", action="store_true", help="copy weights that are NaN or infinite")
    files.add_argument(
        "--check-logits",
        action=argparse.BooleanOptionalAction,
        help="compare what source and result say of a text (default: up to 2 billion weights, on a GPU 140)",
    )
    files.add_argument("--quiet", action="store_true", help="print errors only")


def run(arguments: argparse.Namespace) -> int:
    """Convert and print a summary; returns the exit code."""
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
    """The report in a few lines."""
    cache = report["cache_bytes_per_token"]
    lines = [f"cache bytes a token: {cache['before']:,} before, {cache['after']:,} after"]
    lines += [choice.said_of(report["settings"]), _largest_error(report)]
    measures = report["measures"]
    if "kl_nats" in measures:
        difference, largest = measures["largest_logit_difference"], measures["largest_logit"]
        lines.append(f"logits: differ by at most {difference:.3g} of {largest:.3g}; KL {measures['kl_nats']:.3g} nats")
    if said := lost(measures, out=out):
        lines.append(said)
    if report["settings"].get("norm") == "exact":
        lines.append("for transformers: loaders that drop biases, as vLLM's does, need --norm calibrated")
    return "\n".join([*lines, f"report: {out / REPORT}"])


def _largest_error(report: Mapping) -> str:
    """The largest error of the result, and beside it what plain SVD has there; None, not finite, is larger than any."""
    errors = [(layer, name) for layer in report["layers"] for name in own_errors(layer) if name != "layer"]
    layer, name = max(errors, key=lambda error: _number(error[0][error[1]]))
    line = f"largest error of a layer: {name} {_number(layer[name]):.3g} in layer {layer['layer']}"
    if (baseline := f"{BASELINE}{name}") in layer:
        line += f" (of plain SVD: {_number(layer[baseline]):.3g})"
    return line + (", for random inputs" if report["settings"]["calibration"] == choice.WEIGHTS_ALONE else "")


def _number(error: float | None) -> float:
    return math.inf if error is None else error


def _convert(arguments: argparse.Namespace) -> dict[str, object]:
    _require_own_options(arguments)
    chosen = choice.Choice.of(arguments)
    stock()  # whose absence should show before the work
    source = arguments.source.resolve()
    model = read_model(read_folder(source, follow_links=arguments.follow_links))
    if arguments.to == "gqa" and arguments.kv_heads == model.shape.kv_heads:
        chosen, settings = None, {"calibration": choice.NOTHING}
    else:
        settings = {"calibration": choice.WEIGHTS_ALONE}
    target = partial(_to_gqa if arguments.to == "gqa" else _to_mla, arguments, model, calibrated=chosen is not None)
    converter, options = target(None)  # which refuses wrong options, before a file is read whole
    tokens, kept = None, nullcontext()
    if chosen is not None:
        tokens, settings = chosen.tokens(source)
        place = chosen.place(arguments.out, is_left=not arguments.no_keep)
        title = None if arguments.quiet else "calibrating" + ("" if chosen.file else " on the bundled sample")
        kept = Kept(model, tokens, place, device=_device(), title=title)
        converter, options = target(kept)
    check = _check(arguments, model, 0 if tokens is None else tokens.numel())
    with kept:
        return convert(
            model.checkpoint,
            arguments.out,
            converter,
            settings={"to": arguments.to, "device": _device()} | options | settings,
            max_shard_size=arguments.max_shard_size,
            allow_nonfinite=arguments.allow_nonfinite,
            overwrite=arguments.overwrite,
            keep=not arguments.no_keep,
            check=check,
            progress=not arguments.quiet,
        )


def _check(arguments: argparse.Namespace, model: Model, used: int) -> StockCheck:
    """Holds the result against the source on text that calibrates nothing: behind ``used`` tokens, or the sample's."""
    windows, held = windows_for(model.checkpoint, _device()), None
    if arguments.check_logits is not None:
        windows = max(1, windows) if arguments.check_logits else 0
    if windows:
        text = None if arguments.text is None else read_text(arguments.text)[0]
        held = held_out(model.checkpoint.folder, text, used=used, windows=windows)
    return StockCheck(
        model.checkpoint.folder,
        logits=windows > 0,
        tokens=None if held is None else held.tokens,
        text=None if held is None else held.text,
        device=_device(),
        follow_links=arguments.follow_links,
    )


def _to_gqa(
    arguments: argparse.Namespace, model: Model, calibrations: Kept | None, *, calibrated: bool
) -> tuple[LayerConverter, dict]:
    with _refusals("--to gqa"):
        chosen = recipe(
            arguments.merge,
            arguments.align,
            arguments.grouping,
            reach=REACH if arguments.reach is None else arguments.reach,
            calibrated=calibrated,
            maps_keys=rotates_alike(model.config) and not has_key_norms(model),
        )
    options = asdict(chosen)
    converter = grouped(model.config, arguments.kv_heads, calibrations=calibrations, device=_device(), **options)
    if arguments.kv_heads != model.shape.kv_heads and model.family.kv_heads is None:
        raise RequestError(
            f"--kv-heads: expected {model.shape.kv_heads}, got {arguments.kv_heads}; stock loaders of "
            f"{model.config['model_type']} know no fewer KV heads than heads (mha_to_gqa converts its layers)"
        )
    return converter, {"kv_heads": arguments.kv_heads} | options


def _to_mla(
    arguments: argparse.Namespace, model: Model, calibrations: Kept | None, *, calibrated: bool
) -> tuple[LayerConverter, dict]:
    options = {
        "rope_dim": 64 if arguments.rope_dim is None else arguments.rope_dim,
        "reach": REACH if arguments.reach is None else arguments.reach,
        "norm": arguments.norm or "exact",
    }
    with _refusals("--to mla"):
        check_text(options["norm"], calibrated=calibrated)
        made = latent_converter(
            model.checkpoint.config, arguments.rank, calibrations=calibrations, device=_device(), **options
        )
    for index, layer in model.layers.items():
        biases = (name for name in layer.stored if name.endswith("bias"))
        with _refusals(f"layer {index}"):
            check_biases(
                options["norm"], {name: model.checkpoint.tensors[layer.prefix + name].load() for name in biases}
            )

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        with _refusals(f"layer {shape.index}"):
            return made(weights, shape)

    return convert_layer, {"rank": arguments.rank} | options


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """What mathematics refuses is a wrong request."""
    try:
        yield
    except (CheckpointError, RequestError, VerificationError):
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise RequestError(f"{what}: {error}") from error


def _device() -> str:
    """What calibrates and factors: a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_own_options(arguments: argparse.Namespace) -> None:
    """Raises RequestError for an option that means nothing here, or without the number that this target needs."""
    needed, other = ("kv_heads", MLA_OPTIONS) if arguments.to == "gqa" else ("rank", GQA_OPTIONS)
    if given := [_option(name) for name in other if getattr(arguments, name) is not None]:
        raise RequestError(f"{', '.join(given)}: means nothing with --to {arguments.to}; leave it out")
    if getattr(arguments, needed) is None:
        raise RequestError(f"{_option(needed)}: expected with --to {arguments.to}, and it is missing")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bytes(text: str) -> int:
    """``5GB`` or ``500MiB`` as bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in dict(UNITS):
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MiB, got {text!r}")
    return int(float(match[1]) * dict(UNITS)[match[2]])


def _failed(reason: str, notes: list[str], code: int) -> int:
    line = " ".join("; ".join([reason, *notes]).split())
    print(f"python -m attnlib convert: {line}", file=sys.stderr)
    return code
