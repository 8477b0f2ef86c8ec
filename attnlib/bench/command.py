"""``python -m attnlib bench``: its options, and what it does with them."""

import argparse
import platform
import sys
from pathlib import Path

import torch

from . import cpu, gpu
from .place import cuda
from .timing import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "Time attnlib against torch on this machine: the CPU's cases, or with --gpu the GPU's tables."
    parser.epilog = f"the tables of --gpu, in the order in which they run:\n{gpu.listing()}\n"
    parser.add_argument("--gpu", action="store_true", help="the GPU's tables instead of the CPU's cases")
    parser.add_argument("--only", type=_names, default=(), metavar="TABLE,TABLE", help="these tables alone")
    default = Path("out/bench")
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FOLDER", help=f"for .md, .json and .png (default: {default})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Time what was asked for; returns the exit code, 2 for what cannot be."""
    if arguments.gpu:
        try:
            gpu.choose(arguments.only)
            place = cuda()
        except (ValueError, RuntimeError) as error:
            return _refuse(error)
        return gpu.run(place, arguments.only, arguments.out)
    if arguments.only:
        return _refuse("--only chooses from the GPU's tables; add --gpu")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(table(list(cpu.rows())))
    return 0


def _refuse(why: object) -> int:
    print(f"python -m attnlib bench: {why}", file=sys.stderr)
    return 2


def _names(text: str) -> tuple[str, ...]:
    """``forward,window`` as names."""
    return tuple(name for name in text.split(",") if name)
