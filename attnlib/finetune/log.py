"""The training log: losses and learning rate of every step, as CSV and optionally for TensorBoard."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..convert.checkpoint.errors import RequestError
from ..convert.checkpoint.writing import write_file

NAME = "log.csv"
COLUMNS = ("step", "loss", "kl", "attention", "text", "gradient", "rate", "held_out")
SPARSE = ("index", "recall")  # further columns for students with index branches
BOARD = "tensorboard"  # folder for TensorBoard's files


class Log:
    """The file ``log.csv`` in ``folder``, with one line per step; a resumed run drops steps it repeats."""

    def __init__(self, folder: Path, *, board: bool = False, columns: Sequence[str] = COLUMNS):
        self.folder, self.columns = folder, columns
        self._board = board_writer() if board else None
        self._writer = self._file = None
        self._row: dict[str, object] = {}

    def begin(self, done: int) -> None:
        """Open the log and drop all lines after step ``done``, because a resumed run repeats those steps."""
        path, lines = self.folder / NAME, [",".join(self.columns)]
        if done and path.exists():
            lines = path.read_text().splitlines()[: done + 1]
        write_file(self.folder, NAME, ("\n".join(lines) + "\n").encode())
        self._file = path.open("a", newline="")
        if self._board is not None:
            self._writer = self._board(str(self.folder / BOARD), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step's values; they are written with the next step, because :meth:`score` may add one."""
        self._flush()
        self._row = {"step": step} | values
        for name, value in values.items() if self._writer is not None else ():
            self._writer.add_scalar(name, value, step)

    def score(self, step: int, bits: float, *recall: float) -> None:
        """Add the held-out bits per token to the last step's line, and flush all lines to disk.

        With index branches, also add the mass ``recall``.
        """
        scores = dict(zip(("held_out", "recall"), (bits, *recall), strict=False))
        self._row |= scores
        self._flush()
        os.fsync(self._file.fileno())
        if self._writer is not None:
            for name, value in scores.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Write the last line and close the files."""
        if self._file is not None:
            self._flush()
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None

    def _flush(self) -> None:
        if self._row:
            cells = (self._row.get(name, math.nan) for name in self.columns)
            csv.writer(self._file, lineterminator="\n").writerow("" if x != x else x for x in cells)
            self._file.flush()
        self._row = {}


def board_writer():
    """Return torch's TensorBoard writer class.

    Raises:
        RequestError: TensorBoard is not installed; the message says what to install.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RequestError(
            "--tensorboard: expected TensorBoard, got none; pip install tensorboard"
        ) from error
    return SummaryWriter
