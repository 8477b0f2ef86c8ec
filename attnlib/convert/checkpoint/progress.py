"""The work folder of an unfinished conversion: what is done, so that another run can go on from there.

``<target>.partial-<identity>/`` holds ``progress.json`` and ``checkpoint/``, which in the end is renamed to
the target. The identity stands for everything that decides a byte of the result. A target without
``conversion_report.json`` was not made here, and a work folder is never complete.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.plain_json import dump, parse_object
from .errors import CheckpointError, RequestError
from .verify import file_sha256
from .writing import put_in_place, sync_folder, write_file

PROGRESS, REPLACED = "progress.json", "replaced"
MAX_PROGRESS = 2**26  # bytes


class WorkFolder:
    """A work folder: the sha256 of finished ``shards``, and the errors and forms of their ``layers``."""

    def __init__(self, target: Path, identity: dict[str, object]):
        self.identity = identity
        digest = hashlib.sha256(dump(identity)).hexdigest()[:16]
        self.target = target
        self.folder: Path = target.with_name(f"{target.name}.partial-{digest}")
        self.checkpoint: Path = self.folder / "checkpoint"
        self.shards: dict[str, str] = {}
        self.layers: dict[str, dict[str, float | None]] = {}
        self.forms: dict[str, dict[str, object]] = {}

    def resume(self, names: Iterable[str]) -> None:
        """Find out which shards of these ``names`` an earlier run finished; what cannot be believed is not
        done.

        Raises:
            RequestError: the folder is not this user's own; its contents may be anything.
        """
        if not is_left(self.folder):
            return
        try:
            done = parse_object(SourceFile.at(self.folder / PROGRESS, limit=MAX_PROGRESS).read(), PROGRESS)
        except CheckpointError:
            return
        if done.get("identity") != self.identity:
            return
        self.layers, self.forms = done["layers"], done["forms"]
        for name in done["shards"].keys() & set(names):
            with suppress(CheckpointError):
                if file_sha256(self.checkpoint / name) == done["shards"][name]:
                    self.shards[name] = done["shards"][name]

    def begin(self) -> None:
        """Make the folder. Of an earlier run only finished shards stay."""
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        for path in self.checkpoint.iterdir():
            if path.name not in self.shards:
                remove(path)
        sync_folder(self.folder.parent)
        self.save()

    def save(self) -> None:
        """Write down what is done."""
        done = {"identity": self.identity, "shards": self.shards, "layers": self.layers, "forms": self.forms}
        write_file(self.folder, PROGRESS, dump(done))

    def forget(self, names: Iterable[str]) -> None:
        """Drop shards that are not what was written."""
        for name in names:
            del self.shards[name]
        self.save()

    def finish(self) -> None:
        """Put the result in place, and whatever it replaces out of the way."""
        put_in_place(self.checkpoint, self.target, self.folder / REPLACED)
        remove(self.folder)

    def abandon(self) -> None:
        """Remove the folder after a failure, unless what the result was to replace is in it still."""
        if self.folder.exists() and not (self.folder / REPLACED).exists():
            remove(self.folder)


def is_left(folder: Path) -> bool:
    """Whether an earlier run left this folder.

    Raises:
        RequestError: it is not this user's own; its contents may be anything.
    """
    if not os.path.lexists(folder):
        return False
    if folder.is_symlink() or not folder.is_dir() or os.lstat(folder).st_uid != os.geteuid():
        raise RequestError(f"{folder}: expected a folder of this user, got something else; remove it")
    return True


def remove_leftovers(target: Path) -> list[Path]:
    """Remove work folders whose result is in place already; returns those that are unfinished."""
    unfinished = []
    for folder in sorted(target.parent.iterdir()):
        if (
            not folder.name.startswith(f"{target.name}.partial-")
            or folder.is_symlink()
            or not folder.is_dir()
        ):
            continue
        if (folder / "checkpoint").exists() or ((folder / REPLACED).exists() and not target.exists()):
            unfinished.append(folder)
        else:
            remove(folder)
    return unfinished


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
