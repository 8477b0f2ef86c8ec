"""``python tests/compiled``: compile the kernels without a GPU, and compare them with docs/compiled.md.

With ``--write`` it also compiles more calls, and writes that page for the Triton that it runs with.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from .builds import entries, product
from .cached_builds import AnyBuild, cached_calls, cached_entries, cached_product
from .chipless import Binary, binary, distinct
from .page import PAGE, committed, regressions, section, shortfall, written

Built = dict[AnyBuild, Binary | BaseException]


def main(argv: list[str] | None = None) -> int:
    """Compile, print, and compare or write; returns 1 if anything is amiss, 2 for what cannot be checked."""
    parser = argparse.ArgumentParser(prog="python tests/compiled", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"compile more calls too, and write {PAGE}")
    parser.add_argument(
        "--tables", action="store_true", help="no more calls: the entries of the launch tables alone"
    )
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET"):
        return _refuse("TRITON_INTERPRET is set, under which nothing is compiled; unset it")
    import triton

    page = Path(PAGE)
    text = page.read_text() if page.exists() else ""
    expected = committed(text, triton.__version__)
    if not (expected or arguments.write):
        return _refuse(f"{PAGE} has no table of triton {triton.__version__}; `make compile-check` writes it")

    start = time.perf_counter()
    tables = distinct((*entries(), *cached_entries()))
    more = (
        (*product(), *cached_calls(), *cached_product()) if arguments.write and not arguments.tables else ()
    )
    built = _build(distinct((*tables, *more)), start)
    amiss = [
        f"{build} on sm_{build.arch} {why}"
        for build, result in built.items()
        if (why := shortfall(build, result))
    ]
    if arguments.write:
        rest = {build: built[build] for build in built if build not in tables}
        page.write_text(
            written(text, triton.__version__, section({build: built[build] for build in tables}, rest))
        )
    else:
        amiss += regressions(built, expected)
    for line in amiss:
        print(f"AMISS: {line}")
    print(
        f"triton {triton.__version__}: {len(built)} kernels, {time.perf_counter() - start:.0f} s, "
        f"{len(amiss)} amiss"
    )
    if amiss and not arguments.write:
        print(f"if this is what a change is meant to do, `make compile-check` writes {PAGE} anew")
    return int(bool(amiss))


def apart(function: Callable, jobs: Iterable, workers: int) -> Iterator[tuple]:
    """Each job with what ``function`` returns for it, or raises, in other processes; as they end.

    A process that dies, as a compiler may, takes no other job along.
    """
    waiting, idle, running = iter(jobs), [_process() for _ in range(workers)], {}
    try:
        while True:
            while idle and (job := next(waiting, None)) is not None:
                process = idle.pop()
                running[process.submit(function, job)] = process, job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                process, job = running.pop(future)
                error = future.exception()
                idle.append(_process() if isinstance(error, BrokenProcessPool) else process)
                yield job, error or future.result()
    finally:
        for process in idle:
            process.shutdown()


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _build(builds: list[AnyBuild], start: float) -> Built:
    """All of them, in their order, on as many processes as there are cores; a line for each."""
    built = {}
    for build, result in apart(binary, builds, len(os.sched_getaffinity(0))):
        built[build] = result
        taken = time.perf_counter() - start
        what = shortfall(build, result) if isinstance(result, BaseException) else result.line(build.arch)
        print(f"[{taken:4.0f} s] {len(built):3}/{len(builds)} sm_{build.arch} {build}: {what}", flush=True)
    return {build: built[build] for build in builds}


def _refuse(why: str) -> int:
    print(f"python tests/compiled: {why}", file=sys.stderr)
    return 2
