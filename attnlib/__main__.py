"""``python -m attnlib`` with sizes, convert or bench: the library's command line."""

import argparse

from .bench import command as bench
from .convert import command as convert
from .sizes import command as sizes


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attnlib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser("sizes", help="cache bytes, parameters, FLOPs and traffic of a model's variants")
    sizes.add_arguments(counting)
    counting.set_defaults(run=sizes.run)
    converting = commands.add_parser("convert", help="a checkpoint folder into one with a smaller KV cache")
    convert.add_arguments(converting)
    converting.set_defaults(run=convert.run)
    timing = commands.add_parser("bench", help="time attnlib against torch on this machine")
    bench.add_arguments(timing)
    timing.set_defaults(run=bench.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
