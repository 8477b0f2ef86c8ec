"""The command ``python -m attnlib sweep``: its options, its files, and its summary."""

import argparse
from pathlib import Path

from ...checkpoint_files.plain_json import dump
from ..checkpoint.writing import clean_errors, write_file
from ..ending import finished
from ..score.stores import NAMES
from ..text import choice
from .picture import PICTURE, picture
from .request import sweep
from .sizes import MOST
from .table import markdown, with_front

TABLE, PAGE = "sweep.json", "sweep.md"
EPILOG = """\
exit codes: 0 done; 1 the files cannot be written; 2 wrong request; 3 the checkpoint cannot be converted;
4 a result's logits are not finite; 5 no space left; 130 interrupted. The same command goes on with a sweep
that stopped. docs/conversion_commands.md has the reference of all options.

  python -m attnlib sweep llama-3-8b llama-3-8b-sizes --text prose.txt code.txt
  python -m attnlib sweep llama-3-8b llama-3-8b-sizes --kv-heads 4,2 --ranks 448 --stores bf16,int8,fp8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sweep`` to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        f"Convert a checkpoint to several cache sizes, at most {MOST} points, and draw what each costs:\n"
        "KL divergence from the source against cache bytes per token. Results are deleted after scoring."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="checkpoint folder with config.json and safetensors files"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the table and the picture")
    points = parser.add_argument_group(
        f"points; without --kv-heads, --ranks and --caches, sizes are chosen; at most {MOST} points"
    )
    points.add_argument("--kv-heads", type=_counts, metavar="N,N", help="KV heads of each layer")
    points.add_argument("--ranks", type=_counts, metavar="N,N", help="ranks of latents")
    points.add_argument(
        "--caches", type=_words, metavar="SIZE,SIZE", help="budgets that layers share, as convert --cache"
    )
    points.add_argument(
        "--stores",
        type=_stores,
        metavar="NAME,NAME",
        help=f"dtypes of the cache, of {', '.join(NAMES)} (default: bf16,int8, or fp16,int8 of fp16 models)",
    )
    points.add_argument(
        "--latents",
        choices=("mla", "attnlib"),
        help="target of latents (default: mla if the source permits it, else attnlib)",
    )
    points.add_argument(
        "--rope-dim",
        type=int,
        metavar="N",
        help="rotary channels of latents (default: 64, or fewer if a head has fewer)",
    )
    choice.add_arguments(parser)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--follow-links", action="store_true", help="follow the links in a snapshot of a download cache"
    )
    files.add_argument("--quiet", action="store_true", help="print errors only")


def run(arguments: argparse.Namespace) -> int:
    """Run ``sweep`` with parsed arguments: write its files, print its table, and return the exit code."""

    def write() -> None:
        found, start = sweep(arguments)
        table, out = with_front(found), arguments.out
        text = markdown(table)
        with clean_errors():
            write_file(out, TABLE, dump(table))
            write_file(out, PAGE, f"# {start.title}\n\n{text}".encode())
            try:
                write_file(out, PICTURE, picture(table, start))
                drawn = f"picture: {out / PICTURE}"
            except ImportError as error:  # matplotlib is optional
                drawn = str(error)
        if not arguments.quiet:
            print(f"{text}\ntable: {out / TABLE}\n{drawn}")

    return finished("sweep", write)


def _words(text: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    """Parse positive counts such as ``4,2``."""
    words = _words(text)
    if not all(x.isdecimal() and int(x) for x in words):
        raise argparse.ArgumentTypeError(f"expected positive counts such as 4,2, got {text!r}")
    return tuple(map(int, words))


def _stores(text: str) -> tuple[str, ...]:
    """Parse names of stores such as ``bf16,int8``."""
    words = _words(text)
    if wrong := [x for x in words if x not in NAMES]:
        raise argparse.ArgumentTypeError(f"expected names among {', '.join(NAMES)}, got {', '.join(wrong)}")
    return words
