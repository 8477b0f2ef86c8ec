"""The command ``python -m attnlib bench``: its options, and how to run it."""

import argparse
import shlex
import sys
from pathlib import Path

from .parallel import counts
from .place import cpu, cuda
from .tables import CPU, GPU, PARALLEL_CPU, PARALLEL_GPU, choose, listing
from .tables import run as fill


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Time attnlib and torch on this machine: the CPU tables, or with --gpu the GPU tables."
    )
    parser.epilog = f"CPU tables:\n{listing(CPU)}\n\nGPU tables, with --gpu:\n{listing(GPU)}\n\n"
    parser.epilog += f"tables of --parallel, with and without --gpu:\n{listing(PARALLEL_GPU)}\n"
    parser.add_argument("--gpu", action="store_true", help="fill the GPU tables instead of the CPU tables")
    parser.add_argument(
        "--parallel",
        action="store_true",
        help="compare several GPUs with one, or two processes with one on a CPU",
    )
    parser.add_argument("--only", default="", metavar="TABLE,TABLE", help="fill only these tables")
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
