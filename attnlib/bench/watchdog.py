"""The watchdog: a case that hangs is named and ends the run, which nobody waits for."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE = (
    300.0  # seconds; the slowest case of an H200 takes about 90: training on 64k tokens, all implementations
)
HANGS = 3  # the exit status


@contextmanager
def watched(name: str, seconds: float = PATIENCE) -> Iterator[None]:
    """End the process, with what is called ``name`` and a traceback, if the body takes longer than
    ``seconds``.

    Only the end of its process stops a kernel that hangs. Who waits for it waits in the driver, where neither
    an alarm's handler nor an exception arrives; a thread runs on, for torch and Triton wait without Python's
    lock. Events could be polled instead, but not where ``do_bench``, allocators and peers wait.
    """
    timer = Timer(seconds, _end, (name, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(name: str, seconds: float) -> None:
    print(
        f"{name}: not done after {seconds:.0f} s; a kernel hangs, called from:", file=sys.stderr, flush=True
    )
    faulthandler.dump_traceback()
    os._exit(HANGS)
