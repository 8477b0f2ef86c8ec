"""Files that are whole or absent, whatever stops the process or the machine: written aside, synced, then
renamed.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import NoSpaceError, OutputError, RequestError

MARGIN = (
    1.05  # times what will be written, and the largest file once more: file systems need some for themselves
)
FULL = (errno.ENOSPC, errno.EDQUOT)


class NewFile:
    """A file being written; ``sha256`` of what it holds so far."""

    def __init__(self, descriptor: int, hashing: Executor):
        self._descriptor, self._hashing, self._hash = descriptor, hashing, hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``, which may change when this has returned."""
        view = memoryview(data)
        hashed = self._hashing.submit(self._hash.update, view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        hashed.result()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def new_file(folder: Path, name: str) -> Iterator[NewFile]:
    """Write ``folder / name``: it appears, complete and synced, when the block ends well, and otherwise
    never.
    """
    temporary = folder / f".{name}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # of a run that was killed
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        try:
            with ThreadPoolExecutor(
                1
            ) as hashing:  # hashing takes as long as writing, and both let others run
                yield NewFile(descriptor, hashing)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Write ``data`` as ``folder / name``, as :func:`new_file` does."""
    with new_file(folder, name) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Rename the folder ``new``, which is synced, to ``target``.

    What is there goes ``aside`` first, and comes back if the renaming fails.
    """
    moved = target.exists() and any(target.iterdir())
    if moved:
        os.rename(target, aside)
    try:
        os.rename(new, target)
    except BaseException:
        if moved:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)


def require_room(folder: Path, planned: int, largest: int, files: int) -> None:
    """Raises NoSpaceError unless the file system of ``folder`` can take ``files`` files of ``planned`` bytes
    in all.
    """
    needed, free = int(MARGIN * planned) + largest, shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpaceError(
            f"{folder}: expected {needed:,} bytes free, got {free:,}; make room and run it again"
        )
    status = os.statvfs(folder)
    if (
        status.f_files and status.f_favail < files
    ):  # some file systems have no fixed number of files, and say 0
        raise NoSpaceError(
            f"{folder}: expected room for {files} more files, got {status.f_favail}; make room"
        )


@contextmanager
def clean_errors(advice: str) -> Iterator[None]:
    """Turn what the system says of a failed write into this package's errors, each with ``advice``."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        kind = NoSpaceError if error.errno in FULL else OutputError
        raise kind(error.errno, f"{error.strerror}; {advice}", error.filename) from error


@contextmanager
def sigterm_waits() -> Iterator[None]:
    """A SIGTERM that comes inside the block takes effect at its end; where signals cannot be caught, at
    once.
    """
    received = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if received:
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Hold the lock of a target: two runs that write the same one would undo each other. It ends with the
    process.

    Raises:
        RequestError: somebody else holds it.
    """
    path = f"{target}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor))
        except BlockingIOError:
            mine = False
        if not mine:  # held, or removed by its holder between our opening and locking it
            raise RequestError(
                f"{target}: expected to be alone, and another run writes there; wait for its end"
            )
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)
    finally:
        os.close(descriptor)
