"""``python -m attnlib bench``: its options, and what it does with them."""

import argparse
import shlex
import sys
from pathlib import Path

from .parallel import counts
from .place import cpu, cuda
from .tables import CPU, GPU, PARALLEL_CPU, PARALLEL_GPU, choose, listing
from .tables import run as fill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Time attnlib against torch on this machine: the CPU's tables, or with --gpu the GPU's."
    )
    parser.epilog = f"the CPU's tables:\n{listing(CPU)}\n\nthose of --gpu:\n{listing(GPU)}\n\n"
    parser.epilog += f"those of --parallel, with and without --gpu:\n{listing(PARALLEL_GPU)}\n"
    parser.add_argument("--gpu", action="store_true", help="the GPU's tables instead of the CPU's")
    parser.add_argument(
        "--parallel", action="store_true", help="several GPUs against one, or two processes on a CPU"
    )
    parser.add_argument("--only", default="", metavar="TABLE,TABLE", help="these tables alone")
    default = Path("out/bench")
    parser.add_argument(
        "--out",
        type=Path,
        default=default,
        metavar="FOLDER",
        help=f"for .md, .json and .png (default: {default})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Time what was asked for; returns the exit code, 2 for what cannot be. A hang ends the process, with
    3.
    """
    try:
        known = {
            (False, False): CPU,
            (True, False): GPU,
            (False, True): PARALLEL_CPU,
            (True, True): PARALLEL_GPU,
        }
        entries = choose(
            known[arguments.gpu, arguments.parallel], [name for name in arguments.only.split(",") if name]
        )
        place = cuda() if arguments.gpu else cpu()
        if arguments.parallel:
            counts(place)
    except (ValueError, RuntimeError) as error:
        print(f"python -m attnlib bench: {error}", file=sys.stderr)
        return 2
    options = ["--gpu"] * arguments.gpu + ["--parallel"] * arguments.parallel
    options += ["--only", arguments.only] if arguments.only else []
    return fill(place, entries, arguments.out, shlex.join(["python", "-m", "attnlib", "bench", *options]))
