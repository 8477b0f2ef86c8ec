"""A watchdog for benchmarks: print the name of a case that hangs, and end the process."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

# Time limit of a case in seconds. On an H200, the slowest case takes about 90: training on 64k tokens with
# all implementations.
PATIENCE = 300.0
HANGS = 3  # the exit status of a run that hangs


@contextmanager
def watched(name: str, seconds: float = PATIENCE) -> Iterator[None]:
    """Run the body; if it takes longer than ``seconds``, print ``name`` and a traceback and end the process.

    Nothing stops a hanging GPU kernel except the end of its process. The thread that waits for the kernel is
    inside the driver, where neither a signal handler nor an exception reaches it. A timer thread still runs,
    because torch and Triton release the GIL while they wait. Polling is no alternative, because ``do_bench``,
    allocators and other libraries wait in code of their own.
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
