"""The calibrations of all layers, made once: a phase of its own, which goes on where it was stopped."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from ...checkpoint_files.folder import CONFIG
from ...checkpoint_files.plain_json import dump
from ..bars import bar
from ..calibration import SAMPLE, Calibration
from ..checkpoint.at_once import read_at_once
from ..checkpoint.conversion import REFUSALS, bytes_of
from ..checkpoint.errors import CheckpointError, DamageError, RequestError
from ..checkpoint.model import CheckpointModel
from ..checkpoint.progress import remove
from ..checkpoint.writing import clean_errors, only_one, require_room
from ..stock import stock
from .layerwise import TextCalibration
from .stored import LayerFolder

VERSION = 2  # counts up when the same text gives other calibrations
STAYS = "what is calibrated stays: run the same command again to go on"
PACE = 5e7  # bytes of hidden states written for each second of work: a disk that takes 500 MB/s is busy a tenth of it
WITHOUT = "--no-calibration goes by the weights alone"


@dataclass(frozen=True, slots=True)
class CalibrationPath:
    """The folder of calibrations is ``<start><identity>``, where ``start`` is a path.

    ``is_kept`` keeps it for other conversions, and ``is_left`` leaves it when a run was stopped.
    """

    start: Path
    is_kept: bool = False
    is_left: bool = True


class CalibrationStore:
    """Gives the calibration of layer ``index`` over ``tokens`` ``[samples, length]``, from a folder.

    The first call makes those of all layers that the folder has not. This is a context: behind its block the
    folder is no longer needed, and goes as ``place`` says, or because the request or the source was refused.

    Raises:
        CheckpointError: as :class:`TextCalibration`; says how to do without.
        RequestError: the folder is another user's, or another run writes there.
        DamageError: a file is no longer what was written.
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
        self.title: str | None = title  # of a bar; None: none
        self._advance: Callable[[], object] = lambda: None
        self._stored: LayerFolder | None = None
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
            error.add_note(f"{self._stored.folder}: {STAYS}")
        elif not self.place.is_kept:
            remove(self._stored.folder)

    def __call__(self, index: int) -> Calibration:
        if self._running is not None:
            self._prepare()
        return self._stored.calibration(index)

    def recalled(self, asked: Mapping[str, object]) -> dict[str, object] | None:
        """What a run that :meth:`remember`-ed it measured with these calibrations of what is ``asked``; None:
        none.
        """
        if self._running is not None:
            self._prepare()
        return self._stored.recalled(asked)

    def remember(self, asked: Mapping[str, object], measured: Mapping[str, object]) -> None:
        """Keep what was measured with these calibrations beside them, as plain data, for as long as they are
        kept.

        Another run that has the folder just now keeps it for itself, and this is measured again when it is
        asked for.
        """
        with clean_errors(self._advice), suppress(RequestError), only_one(self._stored.folder):
            self._stored.remember(asked, measured)

    @property
    def _advice(self) -> str:
        return STAYS if self.place.is_left else "what was calibrated is removed"

    def _prepare(self) -> None:
        identity = self._identity()
        digest = hashlib.sha256(dump(identity)).hexdigest()[:16]
        folder = self.place.start.with_name(f"{self.place.start.name}{digest}")
        with clean_errors(self._advice), only_one(folder):
            stored = LayerFolder(folder, identity, len(self.model.layers))
            stored.resume()
            self._require_room(stored.count - len(stored.layers) + len(stored.lost))
            self._stored = stored
            stored.begin()
            with advised():
                self._calibrate(stored)
        self._running = None  # and the hidden states with it

    def _calibrate(self, stored: LayerFolder) -> None:
        """Make what is not there any more, from the first layer on, and then what is not there yet."""
        again, samples = max(stored.lost, default=-1) + 1, len(self.tokens)
        skipped = max(stored.reached - again, 0)
        with bar(self.title, samples * stored.count, " samples x layers", done=samples * skipped) as shown:
            self._advance = shown.update
            for index in [*stored.lost]:
                stored.replace(index, self._running(index))
            if again < stored.reached < stored.count:
                self._running.go_on(stored.reached, stored.states())
            since = monotonic()
            for index in range(len(stored.layers), stored.count):
                stored.add(self._running(index))
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
        """What decides every byte: the weights, the tokens, and what computes."""
        checkpoint = self.model.checkpoint
        files = [*(file for file in checkpoint.described_by if file.name == CONFIG), *checkpoint.shards]
        hashes = read_at_once(checkpoint.sha256, files, lambda count: None)
        return {
            "version": VERSION,
            "torch": str(torch.__version__),
            "transformers": stock().__version__,
            "device": self.device.type,
            "inputs": dict(zip((file.name for file in files), hashes, strict=True)),
            "tokens": hashlib.sha256(bytes_of(self.tokens)).hexdigest(),
            "shape": list(self.tokens.shape),
        }


@contextmanager
def advised() -> Iterator[None]:
    """Say of what cannot be calibrated how to convert it all the same."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {WITHOUT}") from error
