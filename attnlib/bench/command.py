"""The command ``python -m attnlib bench``: its options, and how to run it."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import shape
from .cases import Case
from .parallel import counts
from .place import cpu, cuda
from .tables import (
    BLOCKS_CPU,
    BLOCKS_GPU,
    CPU,
    GPU,
    PARALLEL_CPU,
    PARALLEL_GPU,
    TableEntry,
    choose,
    listing,
)
from .tables import run as fill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Time attnlib and torch on this machine: the CPU tables, or with --gpu the GPU tables."
    )
    parser.epilog = f"CPU tables:\n{listing(CPU)}\n\nGPU tables, with --gpu:\n{listing(GPU)}\n\n"
    parser.epilog += f"tables of --parallel, with and without --gpu:\n{listing(PARALLEL_GPU)}\n\n"
    parser.epilog += f"tables of --blocks, with --gpu:\n{listing(BLOCKS_GPU)}\n"
    parser.add_argument("--gpu", action="store_true", help="fill the GPU tables instead of the CPU tables")
    parser.add_argument(
        "--parallel",
        action="store_true",
        help="compare several GPUs with one, or two processes with one on a CPU",
    )
    parser.add_argument(
        "--blocks",
        action="store_true",
        help="compare whole transformer blocks, training and decoding, with other libraries' attention",
    )
    parser.add_argument("--only", default="", metavar="TABLE,TABLE", help="fill only these tables")
    parser.add_argument(
        "--backend",
        help="attnlib's backend, such as torch, or triton:generic to measure generic kernels on a Hopper GPU "
        "(default: triton with --gpu, otherwise attnlib's own choice)",
    )
    parser.add_argument(
        "--shape",
        metavar=shape.SHAPE,
        help="time only one call with this batch, query heads, KV heads, tokens and channels per head "
        "(192/128 if values have 128), by attnlib and by all implementations that run it here",
    )
    parser.add_argument("--mask", help=f"mask of the --shape call: {shape.MASKS} (default: causal)")
    parser.add_argument(
        "--dtype",
        choices=shape.DTYPES,
        help="dtype of the --shape call (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--backward", action="store_true", help="time forward, backward and both, instead of inference"
    )
    default = Path("out/bench")
    parser.add_argument(
        "--out",
        type=Path,
        default=default,
        metavar="FOLDER",
        help=f"folder for .md, .json and .png files (default: {default})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmarks and return an exit code: 0, or 1 if attnlib failed in any row.

    The code is 2 if the options cannot be used on this machine. A case that hangs ends the process with 3.
    """
    try:
        wanted = _tables(arguments) if arguments.shape is None else _case(arguments)
        place = cuda() if arguments.gpu else cpu()
        if arguments.parallel:
            counts(place)
    except (ValueError, RuntimeError) as error:
        print(f"python -m attnlib bench: {error}", file=sys.stderr)
        return 2
    options = [f"--{name}" for name in ("gpu", "parallel", "blocks", "backward") if getattr(arguments, name)]
    for name in ("only", "backend", "shape", "mask", "dtype"):
        options += [f"--{name}", getattr(arguments, name)] if getattr(arguments, name) else []
    command = shlex.join(["python", "-m", "attnlib", "bench", *options])
    place = place._replace(backend=arguments.backend or place.backend)
    if isinstance(wanted, Case):
        return shape.run(place, wanted, arguments.out, command, backward=arguments.backward)
    return fill(place, wanted, arguments.out, command)


def _tables(arguments: argparse.Namespace) -> Sequence[TableEntry]:
    """Return the chosen tables.

    Raises:
        ValueError: a table is unknown, or an option needs --shape.
    """
    for name in ("mask", "dtype", "backward"):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: needs --shape {shape.SHAPE}")
    if arguments.parallel and arguments.blocks:
        raise ValueError("--blocks: runs on one device; drop --parallel")
    usual, parallel, blocks = (CPU, GPU), (PARALLEL_CPU, PARALLEL_GPU), (BLOCKS_CPU, BLOCKS_GPU)
    known = parallel if arguments.parallel else blocks if arguments.blocks else usual
    names = [name for name in arguments.only.split(",") if name]
    return choose(known[arguments.gpu], names)


def _case(arguments: argparse.Namespace) -> Case:
    """Return the case of --shape.

    Raises:
        ValueError: the case cannot be read, or an option chooses tables.
    """
    if arguments.only or arguments.parallel or arguments.blocks:
        raise ValueError(
            "--shape: times one call and fills no other table; drop --only, --parallel and --blocks"
        )
    dtype = arguments.dtype or ("bfloat16" if arguments.gpu else "float32")
    return shape.case_of(arguments.shape, arguments.mask or "causal", getattr(torch, dtype))
