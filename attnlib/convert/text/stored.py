"""A folder with the calibrations of a model's first layers, and the hidden states behind one of them.

``calibration.json`` says what is finished: of each file the sha256 with which it was written, without which
nothing is believed. Files are of safetensors, and whole or absent. What was measured with the calibrations is
in files of JSON, each with the sha256 of what it says.
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
from ..checkpoint.verify import file_sha256
from ..checkpoint.writing import new_file, sync_folder, write_file

DONE, MEASURED = "calibration.json", "measured-"
MAX_DONE = 2**24  # bytes


class LayerFolder:
    """The folder, of a model of ``count`` layers.

    ``layers`` gives the sha256 of each finished layer's file, and ``lost`` which files are not that. The
    hidden states that layer ``reached`` reads are there too; before the first layer and behind the last
    nobody needs any.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object], count: int):
        self.folder: Path = folder
        self.identity: dict[str, object] = dict(identity)
        self.count: int = count
        self.layers: list[str] = []
        self.lost: list[int] = []
        self.reached: int = 0
        self._states: str | None = None  # their sha256

    def resume(self) -> None:
        """Find out what an earlier run finished.

        Raises:
            RequestError: the folder is not this user's own; its contents may be anything.
        """
        if not is_left(self.folder):
            return
        with suppress(CheckpointError, KeyError, TypeError):  # whatever a damaged file says
            done = parse_object(SourceFile.at(self.folder / DONE, limit=MAX_DONE).read(), DONE)
            if done.get("identity") != self.identity:
                return
            layers, reached, states = done["layers"], done["reached"], done["states"]
            lost = [n for n, sha256 in enumerate(layers) if not self._is_there(_layer(n), sha256)]
            self.layers, self.lost = [*layers], lost
            if states is None or self._is_there(_states(reached), states):
                self.reached, self._states = reached, states

    def begin(self) -> None:
        """Make the folder. Of an earlier run only what is finished stays."""
        self.folder.mkdir(exist_ok=True)
        sync_folder(self.folder.parent)
        self._tidy()

    def add(self, calibration: Calibration) -> None:
        """Write down the next layer."""
        self.layers.append(self._write_layer(len(self.layers), calibration))
        if len(self.layers) == self.count:
            self.reached, self._states = self.count, None
        self._save()
        self._tidy()

    def reach(self, states: Sequence[Tensor]) -> None:
        """Write down the hidden states ``[1, length, m]`` behind the last finished layer, in the place of
        others.
        """
        self._states = _write(self.folder, _states(len(self.layers)), {"states": states})
        self.reached = len(self.layers)
        self._save()
        self._tidy()

    def replace(self, index: int, calibration: Calibration) -> None:
        """Write down a layer that was lost."""
        self.layers[index] = self._write_layer(index, calibration)
        self._save()
        self.lost.remove(index)

    def states(self) -> list[Tensor]:
        """The hidden states ``[1, length, m]`` that layer ``reached`` reads."""
        assert self._states is not None
        return [*_read(self.folder / _states(self.reached), self._states)["states"][:, None]]

    def calibration(self, index: int) -> Calibration:
        """That of a finished layer.

        Raises:
            DamageError: its file is not what was written.
        """
        try:
            held = _read(self.folder / _layer(index), self.layers[index])
        except CheckpointError as error:
            raise DamageError(f"{error}; run it again, and it is made again") from error
        return Calibration(int(held["tokens"]), held["moment"], held["sample"])

    def recalled(self, asked: Mapping[str, object]) -> dict[str, object] | None:
        """What was measured of what is ``asked``; None where it was not, or cannot be believed."""
        name = _measured(asked)
        with suppress(CheckpointError, KeyError):
            held = parse_object(SourceFile.at(self.folder / name, limit=MAX_DONE).read(), name)
            if held["sha256"] == _sha256(held["measured"]):
                return held["measured"]
        return None

    def remember(self, asked: Mapping[str, object], measured: Mapping[str, object]) -> None:
        """Write down what was measured."""
        write_file(self.folder, _measured(asked), dump({"measured": measured, "sha256": _sha256(measured)}))

    def _is_there(self, name: str, sha256: str) -> bool:
        with suppress(CheckpointError):
            return file_sha256(self.folder / name) == sha256
        return False

    def _write_layer(self, index: int, calibration: Calibration) -> str:
        held = {"tokens": [torch.tensor([calibration.tokens])], "moment": [calibration.moment]}
        return _write(self.folder, _layer(index), held | {"sample": [calibration.sample]})

    def _save(self) -> None:
        done = {
            "identity": self.identity,
            "layers": self.layers,
            "reached": self.reached,
            "states": self._states,
        }
        write_file(self.folder, DONE, dump(done))

    def _tidy(self) -> None:
        """Remove what is neither finished nor needed to go on."""
        there = set(range(len(self.layers))) - {*self.lost}
        kept = {DONE, *([] if self._states is None else [_states(self.reached)]), *map(_layer, there)}
        for path in self.folder.iterdir():
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
    """What layer ``index`` reads."""
    return f"states-{index:05}.safetensors"


def _write(folder: Path, name: str, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write tensors, each given as its parts one behind the other; returns the file's sha256."""
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
    """The tensors of a file.

    Raises:
        CheckpointError: it is not there, or not what was written.
    """
    file = SourceFile.at(path)
    data = file.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CheckpointError(f"{path}: expected what was written, got something else")
    length = header_length(data[:8], len(data), path.name)
    return {
        name: torch.frombuffer(data, dtype=x.dtype, count=x.nbytes // x.dtype.itemsize, offset=x.start).view(
            x.shape
        )
        for name, x in parse_header(bytes(data[8 : 8 + length]), len(data), path.name).items()
    }
