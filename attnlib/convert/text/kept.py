"""Compute the calibrations of all layers before converting them, and store them to resume later."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from ...checkpoint_files.folder import CONFIG, Checkpoint
from ...checkpoint_files.plain_json import dump
from ...internal.bars import bar
from ..calibration import SAMPLE, Calibration
from ..checkpoint.at_once import read_at_once
from ..checkpoint.conversion import REFUSALS, bytes_of
from ..checkpoint.errors import CheckpointError, DamageError, RequestError
from ..checkpoint.model import CheckpointModel
from ..checkpoint.progress import remove
from ..checkpoint.writing import add_kept, clean_errors, only_one, require_room
from ..stock import stock
from .layerwise import NonFiniteError, TextCalibration
from .stored import LayerFolder

VERSION = 2  # increment this if the same text gives different calibrations than before
STAYS, GONE = "finished calibrations are kept", "finished calibrations are removed"
# Write at most this many bytes of hidden states per second, so that a disk with 500 MB/s is busy 10 % of the
# time.
PACE = 5e7
WITHOUT = "--no-calibration converts without a text"


@dataclass(frozen=True, slots=True)
class CalibrationPath:
    """The path of a calibration folder: ``start``, followed by a hash of everything that affects its content.

    With ``is_kept``, the folder is kept for other conversions. With ``is_left``, it is kept after an
    interruption, so that the run can be resumed.
    """

    start: Path
    is_kept: bool = False
    is_left: bool = True


class CalibrationStore:
    """A folder of calibrations on a text; a call with a layer's index returns that layer's calibration.

    The text is given as ``tokens`` ``[samples, length]``. The first call computes all calibrations that are
    missing in the folder. Use the store as a context manager: at the end of the block it removes the folder,
    unless ``place`` keeps it for other conversions or for resuming an interrupted run.

    Raises:
        CheckpointError: as :class:`TextCalibration`; the message says how to convert without calibration.
        RequestError: another user owns the folder, or another run writes there.
        DamageError: a file has changed since it was written.
    """

    def __init__(
        self,
        model: CheckpointModel,
        tokens: Tensor,
        place: CalibrationPath,
        *,
        device: torch.device | str = "cpu",
        title: str | None = None,
    ):
        self.model: CheckpointModel = model
        self.tokens: Tensor = tokens
        self.place: CalibrationPath = place
        self.device: torch.device = torch.device(device)
        self.title: str | None = title  # title of the progress bar; None hides it
        self._advance: Callable[[], object] = lambda: None
        self._stored: LayerFolder | None = None
        self._numbers = [*model.layers]  # the folder counts only layers with attention
        with advised():
            self._running: TextCalibration | None = TextCalibration(
                model, tokens, device, advance=lambda: self._advance()
            )

    def __enter__(self) -> "CalibrationStore":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._stored is None or not self._stored.folder.exists():
            return
        refused = isinstance(error, REFUSALS) and not isinstance(error, DamageError)
        if error is not None and not refused and (self.place.is_left or self.place.is_kept):
            add_kept(error, self._stored.folder, STAYS)
        elif not self.place.is_kept:
            remove(self._stored.folder)

    def __call__(self, index: int) -> Calibration:
        self._prepare()
        return self._stored.calibration(self._numbers.index(index))

    def recalled(self, asked: Mapping[str, object]) -> dict[str, object] | None:
        """Return the measurements that :meth:`remember` stored under the key ``asked``, or None."""
        self._prepare()
        return self._stored.recalled(asked)

    def remember(self, asked: Mapping[str, object], measured: Mapping[str, object]) -> None:
        """Store measurements (JSON data) under the key ``asked``, next to the calibrations used for them.

        If another run holds the folder's lock, nothing is stored, and the next run measures again.
        """
        with clean_errors(self._advice), suppress(RequestError), only_one(self._stored.folder):
            self._stored.remember(asked, measured)

    @property
    def _advice(self) -> str | None:
        return None if self.place.is_left or self.place.is_kept else GONE

    def _prepare(self) -> None:
        if self._running is None:
            return
        identity = self._identity()
        digest = hashlib.sha256(dump(identity)).hexdigest()[:16]
        folder = self.place.start.with_name(f"{self.place.start.name}{digest}")
        with clean_errors(self._advice), only_one(folder):
            stored = LayerFolder(folder, identity, len(self.model.layers))
            stored.resume()
            stored.tidy()  # before free space is counted
            self._require_room(stored.count - len(stored.layers) + len(stored.lost))
            self._stored = stored
            stored.begin()
            with advised():
                self._calibrate(stored)
        self._running = None  # frees the hidden states

    def _calibrate(self, stored: LayerFolder) -> None:
        """Compute damaged calibrations again, starting at the first layer, and then compute missing ones."""
        again, samples = max(stored.lost, default=-1) + 1, len(self.tokens)
        skipped = max(stored.reached - again, 0)
        with bar(self.title, samples * stored.count, " samples x layers", done=samples * skipped) as shown:
            self._advance = shown.update
            for index in [*stored.lost]:
                stored.replace(index, self._running(self._numbers[index]))
            if again < stored.reached < stored.count:
                self._running.go_on(self._numbers[stored.reached - 1] + 1, stored.states())
            since = monotonic()
            for index in range(len(stored.layers), stored.count):
                stored.add(self._running(self._numbers[index]))
                states = self._running.states
                if index + 1 < stored.count and monotonic() - since > sum(x.nbytes for x in states) / PACE:
                    stored.reach(states)
                    since = monotonic()

    def _require_room(self, layers: int) -> None:
        width, tokens = self.model.shape.width, self.tokens.numel()
        layer, states = 8 * (width + 1) ** 2 + 4 * width * min(tokens, SAMPLE), 4 * width * tokens
        if layers:
            require_room(self.place.start.parent, layers * layer + states, max(layer, states), layers + 3)

    def _identity(self) -> dict[str, object]:
        """Return everything that affects the calibrations: weights, tokens, device type and versions."""
        return {
            "version": VERSION,
            "torch": str(torch.__version__),
            "transformers": stock().__version__,
            "device": self.device.type,
            "inputs": input_hashes(self.model.checkpoint, title="hashing" if self.title else None),
            "tokens": hashlib.sha256(bytes_of(self.tokens)).hexdigest(),
            "shape": list(self.tokens.shape),
        }


def input_hashes(checkpoint: Checkpoint, *, title: str | None) -> dict[str, str]:
    """Return the sha256 of config.json and of each file of weights; without a ``title``, no bar is shown."""
    files = [*(file for file in checkpoint.described_by if file.name == CONFIG), *checkpoint.shards]
    size = sum(file.size for file in files if file.name not in checkpoint.hashes)
    with bar(title if size else None, size, "B") as shown:
        hashes = read_at_once(checkpoint.sha256, files, shown.update)
    return dict(zip((file.name for file in files), hashes, strict=True))


@contextmanager
def advised() -> Iterator[None]:
    """If the block raises a CheckpointError, add to its message that ``--no-calibration`` avoids it.

    Weights that are not finite are refused without a calibration too.
    """
    try:
        yield
    except NonFiniteError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {WITHOUT}") from error
