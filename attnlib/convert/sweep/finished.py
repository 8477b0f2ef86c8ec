"""The finished points of a sweep on disk: one file per point, so that a resumed sweep does not repeat it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.plain_json import dump, parse_object
from ..checkpoint.errors import CheckpointError
from ..checkpoint.writing import write_file

MAX_POINT = 2**24  # largest accepted size of a point's file, in bytes


class FinishedPoints:
    """A folder of finished points. ``identity`` is everything that affects all points, as JSON."""

    def __init__(self, folder: Path, identity: Mapping[str, object]):
        self.folder: Path = folder
        self.identity: Mapping[str, object] = identity

    def get(self, point: Mapping[str, object]) -> dict[str, Any] | None:
        """Return the scores of a point, or None if no complete file has them."""
        try:
            found = parse_object(SourceFile.at(self._path(point), limit=MAX_POINT).read(), "point")
        except CheckpointError:
            return None
        return found["scores"] if found.get("identity") == self._whole(point) else None

    def put(self, point: Mapping[str, object], scores: Mapping[str, Any]) -> None:
        """Write the scores of a point; the file appears only when complete."""
        data = dump({"identity": self._whole(point), "scores": scores})
        write_file(self.folder, self._path(point).name, data)

    def _whole(self, point: Mapping[str, object]) -> dict[str, object]:
        return parse_object(dump({**self.identity, "point": point}), "identity")

    def _path(self, point: Mapping[str, object]) -> Path:
        digest = hashlib.sha256(dump(self._whole(point))).hexdigest()[:16]
        return self.folder / f"{digest}.json"
