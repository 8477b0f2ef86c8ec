"""Atomic file writes: each file is written under a temporary name, synced, then renamed."""

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

MARGIN = 1.05  # require 5 % more free space than bytes to write, because file systems need some themselves
FULL = (errno.ENOSPC, errno.EDQUOT)


class NewFile:
    """A file that is being written, with the ``sha256`` of the bytes so far."""

    def __init__(self, descriptor: int, hashing: Executor):
        self._descriptor, self._hashing, self._hash = descriptor, hashing, hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data`` to the file; the caller may reuse the buffer afterwards."""
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
    """Yield a new file; it appears as ``folder / name``, complete and synced, only if the block succeeds."""
    temporary = folder / f".{name}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # an earlier run was killed and left this file
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        try:
            # Hash in a second thread: it takes as long as writing, and both release the GIL.
            with ThreadPoolExecutor(1) as hashing:
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
    """Write ``data`` to ``folder / name`` atomically, see :func:`new_file`."""
    with new_file(folder, name) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Sync ``folder`` itself to disk, so that new and renamed files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(new: Path, target: Path, aside: Path) -> None:
    """Rename the synced folder ``new`` to ``target``.

    An existing target is moved to ``aside`` first, and moved back if the rename fails.
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


def require_writable(folder: Path, expected: str) -> None:
    """Raise OutputError, whose message starts with ``expected``, if files cannot be created in ``folder``."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(
            f"{expected}, got {folder}, which is read-only; choose another OUT, or make it writable"
        )


def require_room(folder: Path, planned: int, largest: int, files: int) -> None:
    """Raise NoSpaceError unless ``files`` more files fit on the file system of ``folder``.

    The files take ``planned`` bytes in total, and another file of ``largest`` bytes must fit as well.
    """
    needed, free = int(MARGIN * planned) + largest, shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpaceError(
            f"{folder}: expected {needed:,} bytes free, got {free:,}; free some space and run it again"
        )
    status = os.statvfs(folder)
    # File systems that create inodes on demand report 0 as their number; then there is no limit to check.
    if status.f_files and status.f_favail < files:
        raise NoSpaceError(
            f"{folder}: expected free inodes for {files} more files, got {status.f_favail}; delete files"
        )


AGAIN = "run the same command again to resume"


def add_kept(error: BaseException, folder: Path, kept: str) -> None:
    """Add a note to ``error``: ``kept`` in ``folder`` remains; the first such note says how to resume."""
    advice = "" if any(AGAIN in note for note in getattr(error, "__notes__", [])) else f": {AGAIN}"
    error.add_note(f"{folder}: {kept}{advice}")


@contextmanager
def clean_errors(advice: str | None = None) -> Iterator[None]:
    """Convert an OSError from writing into OutputError or NoSpaceError, and add ``advice`` to the message."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        kind = NoSpaceError if error.errno in FULL else OutputError
        reason = error.strerror if advice is None else f"{error.strerror}; {advice}"
        raise kind(error.errno, reason, error.filename) from error


@contextmanager
def sigterm_waits() -> Iterator[None]:
    """Delay SIGTERM until the block ends. Outside the main thread, SIGTERM acts immediately."""
    received = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    except ValueError:  # signal handlers can be set only in the main thread
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
    """Hold a lock for ``target`` inside the block, so that no other run writes there.

    The operating system releases the lock when the process ends.

    Raises:
        RequestError: another process holds the lock.
    """
    path = f"{target}.lock"
    try:
        descriptor = _locked(path)
    except BlockingIOError:
        raise RequestError(
            f"{target}: expected no other run, and another run writes there; wait until it ends"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _locked(path: str) -> int:
    """Create and lock the file at ``path``, and return its descriptor.

    A run that ends deletes its file. If it does so between our open and our lock, we have locked a file that
    nobody else will find, so we begin again.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
