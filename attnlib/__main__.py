"""``python -m attnlib sizes`` and ``python -m attnlib bench``: the library's command line."""

import argparse
import platform

import torch

from .sizes import command as sizes


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m attnlib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser("sizes", help="cache bytes, parameters, FLOPs and traffic of a model's variants")
    sizes.add_arguments(counting)
    counting.set_defaults(run=sizes.run)
    bench = commands.add_parser("bench", help="time attnlib against torch on this machine")
    bench.add_argument("--gpu", action="store_true", help="the GPU cases instead of the CPU's")
    bench.set_defaults(run=_bench)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.gpu:
        from .bench import gpu

        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
        print(gpu.table(list(gpu.rows())))
        return 0
    from .bench import cpu
    from .bench.timing import table

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    print(table(list(cpu.rows())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
