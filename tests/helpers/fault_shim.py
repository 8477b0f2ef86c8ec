"""The os module with a fault in it: the n-th call that changes what is on disk fails, or kills the
process.
"""

import os
import signal
from collections.abc import Callable

CHANGING = ("open", "write", "fsync", "rename", "unlink")


class FaultyOs:
    """Stands for ``os`` in a module. ``fault(name)`` is called in place of call number ``at``, counted from
    0.

    Syncing is only counted: nothing but the clock can tell, short of cutting the power.
    """

    def __init__(self, at: int | None = None, fault: Callable = print, calls: tuple[str, ...] = CHANGING):
        self._at, self._fault, self._calls, self.count = at, fault, calls, 0

    def __getattr__(self, name: str):
        function = getattr(os, name)
        if name not in self._calls:
            return function

        def call(*args, **kwargs):
            self.count += 1
            if self.count - 1 == self._at:
                self._fault(name)
            return None if name == "fsync" else function(*args, **kwargs)

        return call


class ShortWrites(FaultyOs):
    """Writes at most 7 bytes at a time, as a system may."""

    def __init__(self):
        super().__init__(calls=())

    def write(self, descriptor: int, data) -> int:
        return os.write(descriptor, data[:7])


def failing(code: int) -> Callable[[str], object]:
    """A fault that raises what the system raises for ``code``."""

    def fault(name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    return fault


def killed(name: str) -> None:
    """A fault that no cleanup survives."""
    os.kill(os.getpid(), signal.SIGKILL)
