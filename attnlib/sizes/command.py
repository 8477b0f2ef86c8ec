"""Command ``python -m attnlib sizes``: its options, and the code that runs it."""

import argparse
import math
import sys
from pathlib import Path

import torch

from .attention import GroupedShape
from .catalogue import CHIPS, MODELS, chip, model
from .files import draw, write_csv
from .models import Model, variants
from .report import Setting, rows
from .text import human, table

DTYPES = (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32))
STORES = (("none", None), ("fp8", torch.float8_e4m3fn), ("int8", torch.int8))
SUFFIXES = (("k", 2**10), ("m", 2**20))
EPILOG = """\
An asterisk marks the model itself; its variants keep the same widths, heads and windows.
K and M, in either case, stand for 1,024 and 1,048,576: 128k is 131,072 tokens.
docs/sizes.md explains the formulas.

  python -m attnlib sizes --model llama-2-7b
  python -m attnlib sizes --model llama-3-70b --context 8k,128k --batch 1 --chip h100 --tensor-parallel 4
  python -m attnlib sizes --hidden-size 4096 --num-heads 32 --num-kv-heads 8 --layers 32 \\
    --chip h100 --store fp8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Cache size, parameters, FLOPs and memory traffic of attention, and the limits of a memory."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "--list", action="store_true", help="list the known models and chips, with their sources"
    )
    _add_model(parser.add_argument_group("model: a known name, or any shape"))
    _add_serving(parser.add_argument_group("serving"))
    files = parser.add_argument_group("output files, in addition to the table")
    files.add_argument("--csv", type=Path, metavar="FILE", help="the rows as CSV")
    files.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="plot of cache size against context, for one sequence or the largest --batch (needs matplotlib)",
    )


def _add_model(shape: argparse._ArgumentGroup) -> None:
    """Add the options that describe the model."""
    shape.add_argument("--model", metavar="NAME", help="name of a known model")
    shape.add_argument("--hidden-size", type=int, metavar="N")
    shape.add_argument("--num-heads", type=int, metavar="N")
    shape.add_argument("--num-kv-heads", type=int, metavar="N", help="default: as many as heads")
    shape.add_argument("--head-dim", type=int, metavar="N", help="default: hidden size / heads")
    shape.add_argument("--layers", type=int, metavar="N")
    shape.add_argument(
        "--window", type=_size, metavar="N", help="tokens that every layer sees, the query's own included"
    )
    shape.add_argument(
        "--selected", type=_size, metavar="N", help="keys that each query selects, of those that it sees"
    )
    shape.add_argument(
        "--kv-lora-rank",
        type=int,
        metavar="N",
        help="latent rank of MLA variants (default: the model's, or 512)",
    )
    shape.add_argument(
        "--qk-rope-head-dim",
        type=int,
        metavar="N",
        help="rotary key of MLA variants (default: the model's, or 64)",
    )


def _add_serving(serving: argparse._ArgumentGroup) -> None:
    """Add the options that describe how the model is served."""
    serving.add_argument(
        "--context",
        type=_sizes,
        default=Setting().contexts,
        metavar="N,N",
        help="tokens per sequence, such as 8k,128k (default: 4k,32k,128k)",
    )
    serving.add_argument("--batch", type=_sizes, metavar="N,N", help="sequences per batch (default: 1,8,64)")
    serving.add_argument(
        "--dtype", choices=dict(DTYPES), default="bf16", help="dtype of weights and cache (default: bf16)"
    )
    serving.add_argument(
        "--store", choices=dict(STORES), default="none", help="store one byte per cached value, plus scales"
    )
    serving.add_argument(
        "--page-size",
        type=_size,
        default=Setting().page_size,
        metavar="N",
        help="tokens per page (default: 64)",
    )
    serving.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads"
    )
    serving.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the tokens of each cache, and of each sequence in training",
    )
    serving.add_argument(
        "--chip", default=Setting().chip.name, metavar="NAME", help="name of a known chip (default: h200)"
    )
    serving.add_argument(
        "--memory", type=_gib, metavar="GIB", help="memory of one rank (default: the chip's)"
    )
    serving.add_argument(
        "--weights",
        type=_gib,
        metavar="GIB",
        help="weights of one rank, subtracted from the memory; 0 ignores them "
        "(default: a known model's weights in --dtype)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table, then write the requested files; return the exit status, 0 or 2 after an error."""
    if arguments.list:
        print(listing())
        return 0
    try:
        setting, own = _setting(arguments), _model(arguments)
        models = variants(
            own, kv_lora_rank=arguments.kv_lora_rank, qk_rope_head_dim=arguments.qk_rope_head_dim
        )
        answers = rows(models, setting)
    except ValueError as error:
        return _fail(error)
    print(table(own, answers, setting), flush=True)
    try:
        if arguments.csv is not None:
            write_csv(own, answers, arguments.csv)
        if arguments.png is not None:
            draw(own, models, setting, arguments.png, batch=max(arguments.batch or [1]))
    except (OSError, ModuleNotFoundError) as error:
        return _fail(error)
    return 0


def _fail(error: Exception) -> int:
    print(f"python -m attnlib sizes: {error}", file=sys.stderr)
    return 2


def listing() -> str:
    """Return the known models and chips with their sources, one per line."""
    lines = [
        f"{known.name:18} {len(known.layers):4} layers  {known.kind:11}  "
        f"{known.total_parameters / 1e9:7,.2f} billion parameters  {known.source}"
        for known in MODELS
    ]
    for known in CHIPS:
        speed = f"{known.bandwidth / 1e12:5.3g} TB/s  {known.flops / 1e12:6g} TFLOP/s"
        lines.append(f"{known.name:18} {human(known.memory):>10}  {speed}  {known.source}")
    return "\n".join(lines)


def _model(arguments: argparse.Namespace) -> Model:
    sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "layers")
    given = [name for name in sizes if getattr(arguments, name) is not None]
    if arguments.model is not None and given:
        raise ValueError(
            f"--model: expected a name or sizes, got both {arguments.model!r} and {', '.join(given)}"
        )
    if arguments.model is not None:
        found = model(arguments.model)
    elif {"hidden_size", "num_heads", "layers"} <= set(given):
        found = Model("given", (_shape(arguments),) * arguments.layers)
    else:
        raise ValueError(
            "--model: expected a name (--list), or --hidden-size, --num-heads and --layers, got neither"
        )
    found = found if arguments.window is None else found.with_window(arguments.window)
    return found if arguments.selected is None else found.with_selected(arguments.selected)


def _shape(arguments: argparse.Namespace) -> GroupedShape:
    heads = arguments.num_heads
    if arguments.head_dim is None and (heads < 1 or arguments.hidden_size % heads):
        raise ValueError(f"--num-heads: expected a divisor of --hidden-size or a --head-dim, got {heads}")
    return GroupedShape(
        hidden_size=arguments.hidden_size,
        num_heads=heads,
        num_kv_heads=heads if arguments.num_kv_heads is None else arguments.num_kv_heads,
        head_dim=arguments.hidden_size // heads if arguments.head_dim is None else arguments.head_dim,
    )


def _setting(arguments: argparse.Namespace) -> Setting:
    return Setting(
        contexts=arguments.context,
        batches=arguments.batch or Setting().batches,
        dtype=dict(DTYPES)[arguments.dtype],
        storage_dtype=dict(STORES)[arguments.store],
        page_size=arguments.page_size,
        ranks=arguments.tensor_parallel,
        context_ranks=arguments.context_parallel,
        chip=chip(arguments.chip),
        memory=arguments.memory,
        weights=arguments.weights,
    )


def _sizes(text: str) -> tuple[int, ...]:
    """Parse a list of numbers such as ``4096,32k``; keep the order and drop duplicates."""
    return tuple(dict.fromkeys(map(_size, text.split(","))))


def _size(text: str) -> int:
    """Parse a whole number such as ``4096``, ``128k`` or ``1M``; upper and lower case mean the same."""
    unit = dict(SUFFIXES).get(text[-1:].lower())
    try:
        return int(text) if unit is None else int(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers such as 4096, 128k or 1m, got {text!r}"
        ) from None


def _gib(text: str) -> int:
    """Convert a number of GiB, such as ``1.5``, to bytes."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"expected GiB, at least 0, got {text!r}")
    return int(size * 2**30)
