"""``python -m attnlib`` with sizes, convert, finetune, bench or doctor: the library's command line."""

import argparse
import os
import sys

from . import __version__, doctor
from .bench import command as bench
from .convert import command as convert
from .finetune import command as finetune
from .sizes import command as sizes

READER_GONE = 141  # what a shell says of a program that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one command; returns the exit code, 141 if nobody reads the output any
    more.
    """
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # what is still buffered would fail at exit, where nobody can catch it
    except BrokenPipeError:
        # Python flushes its streams once more at exit: what they still hold must go somewhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return READER_GONE


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnlib", description=__doc__)
    parser.add_argument("--version", action="version", version=f"attnlib {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser(
        "sizes", help="cache bytes, parameters, FLOPs and traffic of a model's variants"
    )
    sizes.add_arguments(counting)
    counting.set_defaults(run=sizes.run)
    converting = commands.add_parser("convert", help="a checkpoint folder into one with a smaller KV cache")
    convert.add_arguments(converting)
    converting.set_defaults(run=convert.run)
    healing = commands.add_parser(
        "finetune", help="a converted checkpoint folder back to the quality of the original"
    )
    finetune.add_arguments(healing)
    healing.set_defaults(run=finetune.run)
    timing = commands.add_parser("bench", help="time attnlib against torch on this machine")
    bench.add_arguments(timing)
    timing.set_defaults(run=bench.run)
    looking = commands.add_parser(
        "doctor", help="versions, devices, which backend runs here and why, safety of caches"
    )
    doctor.add_arguments(looking)
    looking.set_defaults(run=doctor.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
