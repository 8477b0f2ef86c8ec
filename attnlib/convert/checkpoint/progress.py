"""The work folder of an unfinished conversion, from which a later run resumes.

The work folder ``<target>.partial-<identity>/`` holds ``progress.json`` and ``checkpoint/``, which is renamed
to the target at the end. The identity is a hash of everything that affects the bytes of the result. A target
folder without ``conversion_report.json`` was not written by attnlib. A work folder is never a complete
result.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.plain_json import dump, parse_object
from .errors import CheckpointError, RequestError
from .verify import has_sha256
from .writing import put_in_place, sync_folder, write_file

PROGRESS, REPLACED = "progress.json", "replaced"
MAX_PROGRESS = 2**26  # largest accepted size of progress.json, in bytes


class WorkFolder:
    """A work folder, with the sha256 of finished shards and the errors and forms of converted layers."""

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
        """Find the shards among ``names`` that an earlier run finished, and verify their sha256.

        Raises:
            RequestError: another user owns the folder, so its contents cannot be trusted.
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
            if has_sha256(self.checkpoint / name, done["shards"][name]):
                self.shards[name] = done["shards"][name]

    def tidy(self) -> None:
        """Remove all files of an earlier run except finished shards, for example a part of a shard.

        They would be replaced, so the free space is counted without them.
        """
        for path in self.checkpoint.iterdir() if is_left(self.checkpoint) else ():
            if path.name not in self.shards:
                remove(path)

    def begin(self) -> None:
        """Create the folder, and remove all files of an earlier run except finished shards."""
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        self.tidy()
        sync_folder(self.folder.parent)
        self.save()

    def save(self) -> None:
        """Write the current progress to ``progress.json``."""
        done = {"identity": self.identity, "shards": self.shards, "layers": self.layers, "forms": self.forms}
        write_file(self.folder, PROGRESS, dump(done))

    def forget(self, names: Iterable[str]) -> None:
        """Forget the shards ``names``, which failed verification."""
        for name in names:
            del self.shards[name]
        self.save()

    def finish(self) -> None:
        """Move the result into place, replacing an earlier one, and remove the work folder."""
        put_in_place(self.checkpoint, self.target, self.folder / REPLACED)
        remove(self.folder)

    def abandon(self) -> None:
        """Remove the folder after a failure, unless it still holds an earlier result that was replaced."""
        if self.folder.exists() and not (self.folder / REPLACED).exists():
            remove(self.folder)


def is_left(folder: Path) -> bool:
    """True if an earlier run left ``folder`` behind.

    Raises:
        RequestError: another user owns the folder, so its contents cannot be trusted.
    """
    if not os.path.lexists(folder):
        return False
    if folder.is_symlink() or not folder.is_dir() or os.lstat(folder).st_uid != os.geteuid():
        raise RequestError(f"{folder}: expected a folder of this user, got something else; remove it")
    return True


def remove_leftovers(target: Path) -> list[Path]:
    """Remove work folders whose result is already in place, and return the unfinished ones."""
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
    """Remove a file, or a folder and its contents, without following links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
