"""The command line of attnlib, ``python -m attnlib``.

Its commands are sizes, convert, sweep, score, finetune, bench and doctor.
"""

import argparse
import os
import sys

from . import __version__, doctor
from .bench import command as bench
from .convert import command as convert
from .convert.score import command as score
from .convert.sweep import command as sweep
from .finetune import command as finetune
from .sizes import command as sizes

READER_GONE = 141  # the exit status that a shell reports for a program killed by SIGPIPE
COMMANDS = (
    ("sizes", sizes, "print cache bytes, parameters, FLOPs and memory traffic of a model's variants"),
    ("convert", convert, "convert a checkpoint folder into one with a smaller KV cache"),
    ("sweep", sweep, "convert a checkpoint to several cache sizes, and draw what each costs in quality"),
    ("score", score, "compare a result with its source: KL divergence and perplexity by text"),
    ("finetune", finetune, "train a converted checkpoint back to the quality of the original"),
    ("bench", bench, "time attnlib and torch on this machine"),
    ("doctor", doctor, "print versions, devices, which backend runs here and why, and cache safety"),
)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one command; return its exit code, or 141 if the output pipe closed."""
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # flush here: at exit, a BrokenPipeError could not be caught
    except BrokenPipeError:
        # Python flushes its output streams again at exit; send the remaining output to /dev/null.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return READER_GONE


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnlib", description=__doc__)
    parser.add_argument("--version", action="version", version=f"attnlib {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command, summary in COMMANDS:
        subparser = commands.add_parser(name, help=summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
