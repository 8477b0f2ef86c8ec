"""Random calls and caches against an fp64 oracle that shares no code with the library.

    python tests/fuzz --seconds 600                    # from a random seed on
    python tests/fuzz --count 5000 --kind cached
    python tests/fuzz --seconds 600 --device cuda      # the kernels, on a GPU
    python tests/fuzz --device interpreter             # the kernels, interpreted
    python tests/fuzz --seed 123 --kind dense          # one case again

Fuzzing ------- A case is made from a seed: a dense call, a packed one, a mask and a score by random
functions, or the life of a cache (admissions, steps of both kinds, steps that fail and are tried again,
forks, truncations, releases and reads, with attention at each), a call over trees of sequences, which is
compared with their unshared copies, or a call in which lists select keys. Attention by functions is compared
with the functions, called in Python for each pair (``functions.py``). Other cases draw dtypes, heads, lengths
from 0 on, masks, options, memory layouts, backends, and which gradients are asked for and given, and put NaN
where nothing may look. ``oracle.py`` says what is right, from docs/conventions.md alone, in fp64;
``judge.py`` compares: errors are at most twice those of eager attention in the dtype under test (gradients':
three times), and one rounding of every term that is added up; infinities and NaN are the same. Whatever fails
is printed with the command that replays it, and ends the run with exit code 1. ``--verbose`` prints every
command before it runs, for what takes the process with it. ``test_fuzzer.py`` runs a share of all this, and
shows that it finds bugs that were planted.
"""

import argparse
import os
import random
import sys
import time
from itertools import count as count_from
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    if asked.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads once
    if asked.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch
    from fuzz.cases import KINDS, run

    torch.set_num_threads(1)
    kinds = [asked.kind] if asked.kind else list(KINDS)
    first = random.randrange(10**9) if asked.seed is None else asked.seed
    seconds, most = limits(asked, len(kinds))
    failed, done, start, told = 0, 0, time.monotonic(), time.monotonic()
    for n in count_from():
        now = time.monotonic()
        if n >= most or now - start >= seconds:
            break
        seed, kind = first + n // len(kinds), kinds[n % len(kinds)]
        if asked.verbose:
            print(f"python tests/fuzz --seed {seed} --kind {kind} --device {asked.device}", flush=True)
        failure = run(seed, kind, asked.device)
        done = n + 1
        if failure is not None:
            failed += 1
            print(f"\n{failure}\n", flush=True)
        if time.monotonic() - told >= 10:
            told = time.monotonic()
            print(
                f"{done} cases, {done / (told - start):.1f} a second, {failed} failed; at seed {seed}",
                flush=True,
            )
    taken = time.monotonic() - start
    print(f"{done} cases on {asked.device} from seed {first} on in {taken:.0f} s, {failed} failed")
    return 1 if failed else 0


def limits(asked: argparse.Namespace, kinds: int) -> tuple[float, float]:
    """Seconds and cases at most: a minute if nothing is said, and a seed alone means its cases."""
    if asked.seconds is None and asked.count is None:
        return (60.0, float("inf")) if asked.seed is None else (float("inf"), kinds)
    return asked.seconds or float("inf"), asked.count or float("inf")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python tests/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="how long (default: 60, or the one seed)")
    parser.add_argument("--count", type=int, help="how many cases")
    parser.add_argument("--seed", type=int, help="where to start (default: anywhere)")
    parser.add_argument(
        "--kind",
        choices=("dense", "varlen", "cached", "function", "tree", "selected"),
        help="of the cases (default: all in turn)",
    )
    parser.add_argument("--device", choices=("cpu", "interpreter", "cuda"), default="cpu")
    parser.add_argument("--verbose", action="store_true", help="print every command before it runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
