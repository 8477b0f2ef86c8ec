"""Some files read side by side: what one thread makes a sha256 of is less than what most disks give."""

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import TypeVar

FILES = 4  # each takes a buffer
File, Found = TypeVar("File"), TypeVar("Found")
Advance = Callable[[int], object]


def read_at_once(
    read: Callable[[File, Advance], Found], files: Iterable[File], advance: Advance
) -> list[Found]:
    """``read(file, advance)`` of each of the files; their ``advance`` may be told of bytes by all of them at
    once.

    Where one raises, or the caller is interrupted, the others end at what they tell next.
    """
    telling, stopped = Lock(), Event()

    def tell(count: int) -> None:
        with telling:
            if stopped.is_set():
                raise CancelledError
            advance(count)

    with ThreadPoolExecutor(FILES) as pool:
        reading = [pool.submit(read, file, tell) for file in files]
        try:
            for ended in as_completed(reading):
                ended.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [ended.result() for ended in reading]
