"""A calibration folder: one file for each finished layer, and the hidden states to resume from.

``calibration.json`` lists the sha256 of every finished file, and a file that does not match is ignored. The
files are safetensors, and either complete or absent. Measurements made with the calibrations are JSON files
that contain a sha256 of their data.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint_files.folder import SourceFile
from ...checkpoint_files.header import TensorEntry, header_length, make_header, parse_header
from ...checkpoint_files.plain_json import dump, parse_object
from ..calibration import Calibration
from ..checkpoint.conversion import bytes_of
from ..checkpoint.errors import CheckpointError, DamageError
from ..checkpoint.progress import is_left, remove
from ..checkpoint.verify import has_sha256
from ..checkpoint.writing import new_file, sync_folder, write_file

DONE, MEASURED = "calibration.json", "measured-"
MAX_DONE = 2**24  # largest accepted size of a JSON file, in bytes


class LayerFolder:
    """A calibration folder of a model with ``count`` layers.

    ``layers`` lists the sha256 of each finished layer's file, and ``lost`` the layers whose file no longer
    has that sha256. The folder also holds the hidden states that enter layer ``reached``, unless that is the
    first layer or all layers are finished.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object], count: int):
        self.folder: Path = folder
        self.identity: dict[str, object] = dict(identity)
        self.count: int = count
        self.layers: list[str] = []
        self.lost: list[int] = []
        self.reached: int = 0
        self._states: str | None = None  # sha256 of the hidden-states file

    def resume(self) -> None:
        """Find the finished files of an earlier run.

        Raises:
            RequestError: another user owns the folder, so its contents cannot be trusted.
        """
        if not is_left(self.folder):
            return
        with suppress(CheckpointError, KeyError, TypeError):  # ignore a damaged list
            done = parse_object(SourceFile.at(self.folder / DONE, limit=MAX_DONE).read(), DONE)
            if done.get("identity") != self.identity:
                return
            layers, reached, states = done["layers"], done["reached"], done["states"]
            lost = [n for n, sha256 in enumerate(layers) if not has_sha256(self.folder / _layer(n), sha256)]
            self.layers, self.lost = [*layers], lost
            if states is None or has_sha256(self.folder / _states(reached), states):
                self.reached, self._states = reached, states

    def begin(self) -> None:
        """Create the folder, and remove unfinished files of an earlier run."""
        self.folder.mkdir(exist_ok=True)
        sync_folder(self.folder.parent)
        self.tidy()

    def add(self, calibration: Calibration) -> None:
        """Store the calibration of the next layer."""
        self.layers.append(self._write_layer(len(self.layers), calibration))
        if len(self.layers) == self.count:
            self.reached, self._states = self.count, None
        self._save()
        self.tidy()

    def reach(self, states: Sequence[Tensor]) -> None:
        """Store the hidden states ``[1, length, m]`` after the last finished layer, replacing older ones."""
        self._states = _write(self.folder, _states(len(self.layers)), {"states": states})
        self.reached = len(self.layers)
        self._save()
        self.tidy()

    def replace(self, index: int, calibration: Calibration) -> None:
        """Store the calibration of a layer whose file was damaged."""
        self.layers[index] = self._write_layer(index, calibration)
        self._save()
        self.lost.remove(index)

    def states(self) -> list[Tensor]:
        """Return the stored hidden states ``[1, length, m]``, the input of layer ``reached``."""
        assert self._states is not None
        return [*_read(self.folder / _states(self.reached), self._states)["states"][:, None]]

    def calibration(self, index: int) -> Calibration:
        """Return the calibration of a finished layer.

        Raises:
            DamageError: the file has changed since it was written.
        """
        try:
            found = _read(self.folder / _layer(index), self.layers[index])
        except CheckpointError as error:
            raise DamageError(f"{error}; run the command again to recompute it") from error
        return Calibration(int(found["tokens"]), found["moment"], found["sample"])

    def recalled(self, asked: Mapping[str, object]) -> dict[str, object] | None:
        """Return the measurements stored under the key ``asked``; None if they are absent or damaged."""
        name = _measured(asked)
        with suppress(CheckpointError, KeyError):
            found = parse_object(SourceFile.at(self.folder / name, limit=MAX_DONE).read(), name)
            if found["sha256"] == _sha256(found["measured"]):
                return found["measured"]
        return None

    def remember(self, asked: Mapping[str, object], measured: Mapping[str, object]) -> None:
        """Store the measurements ``measured`` under the key ``asked``, in a file named by the key's hash."""
        write_file(self.folder, _measured(asked), dump({"measured": measured, "sha256": _sha256(measured)}))

    def _write_layer(self, index: int, calibration: Calibration) -> str:
        found = {"tokens": [torch.tensor([calibration.tokens])], "moment": [calibration.moment]}
        return _write(self.folder, _layer(index), found | {"sample": [calibration.sample]})

    def _save(self) -> None:
        done = {
            "identity": self.identity,
            "layers": self.layers,
            "reached": self.reached,
            "states": self._states,
        }
        write_file(self.folder, DONE, dump(done))

    def tidy(self) -> None:
        """Remove files that are neither finished nor needed to resume."""
        there = set(range(len(self.layers))) - {*self.lost}
        kept = {DONE, *([] if self._states is None else [_states(self.reached)]), *map(_layer, there)}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            is_measured = path.name.startswith(MEASURED)
            if not self.layers or (path.name not in kept and not is_measured):
                remove(path)


def _measured(asked: Mapping[str, object]) -> str:
    return f"{MEASURED}{_sha256(asked)[:16]}.json"


def _sha256(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(dump(plain)).hexdigest()


def _layer(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _states(index: int) -> str:
    """Return the name of the file with the hidden states that enter layer ``index``."""
    return f"states-{index:05}.safetensors"


def _write(folder: Path, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write a safetensors file and return its sha256; each tensor is given as parts to concatenate."""
    shapes = {key: (sum(len(part) for part in parts), *parts[0].shape[1:]) for key, parts in tensors.items()}
    header, _ = make_header(
        {key: TensorEntry(tensors[key][0].dtype, shape, 0) for key, shape in shapes.items()}
    )
    with new_file(folder, name) as file:
        file.write(header)
        for parts in tensors.values():
            for part in parts:
                file.write(bytes_of(part.cpu()))
    return file.sha256


def _read(path: Path, sha256: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file after comparing its sha256.

    Raises:
        CheckpointError: the file is missing or has changed since it was written.
    """
    file = SourceFile.at(path)
    data = file.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"{path}: expected the bytes that were written, got others")
    length = header_length(data[:8], len(data), path.name)
    return {
        name: torch.frombuffer(data, dtype=x.dtype, count=x.nbytes // x.dtype.itemsize, offset=x.start).view(
            x.shape
        )
        for name, x in parse_header(bytes(data[8 : 8 + length]), len(data), path.name).items()
    }
