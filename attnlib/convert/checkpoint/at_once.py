"""Read several files in parallel, because one thread computes sha256 more slowly than most disks read."""

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import TypeVar

FILES = 4  # number of files to read in parallel; each needs a buffer
File, Found = TypeVar("File"), TypeVar("Found")
Advance = Callable[[int], object]


def read_at_once(
    read: Callable[[File, Advance], Found], files: Iterable[File], advance: Advance
) -> list[Found]:
    """Return ``read(file, advance)`` for each file, calling ``read`` in a pool of FILES threads.

    The ``advance`` passed to ``read`` is thread-safe. If one call raises or the caller is interrupted, every
    other call of ``read`` ends with a CancelledError the next time it calls ``advance``.
    """
    lock, stopped = Lock(), Event()

    def locked_advance(count: int) -> None:
        with lock:
            if stopped.is_set():
                raise CancelledError
            advance(count)

    with ThreadPoolExecutor(FILES) as pool:
        reading = [pool.submit(read, file, locked_advance) for file in files]
        try:
            for ended in as_completed(reading):
                ended.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [ended.result() for ended in reading]
