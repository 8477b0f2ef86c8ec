"""Choose the calibration text by the command's options: files, the bundled sample, or none."""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.errors import RequestError
from ..stock import read_config, stock
from ..wording import option
from .kept import CalibrationPath, advised
from .mixture import Text, Windows, calibration_windows, joined
from .sample import NAME as SAMPLE
from .sample import sample_texts
from .tokens import read_text

SAMPLES, LENGTH = 128, 512
SAMPLES_OF_SAMPLE = (
    80  # as many windows, and as much time, as the bundled sample of English books gave before
)
PASSAGE = 2_000  # characters; windows longer than a text of the sample hold passages of all of them
WEIGHTS_ALONE = "no text, only the weights"
NOTHING = "nothing, as no heads are merged"
OPTIONS = ("text", "samples", "length", "keep_calibration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the calibration options to ``parser``."""
    text = parser.add_argument_group("calibration on text")
    text.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="UTF-8 texts like what the model will read (default: a bundled sample)",
    )
    text.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"number of windows (default: {SAMPLES}, or {SAMPLES_OF_SAMPLE} of the bundled sample)",
    )
    text.add_argument("--length", type=int, metavar="N", help=f"tokens per window (default: {LENGTH})")
    text.add_argument(
        "--keep-calibration",
        type=Path,
        metavar="FOLDER",
        help="keep the calibration in this folder, and reuse it in later runs",
    )
    text.add_argument(
        "--no-calibration", action="store_true", help="convert without a text, from the weights only"
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The calibration options: which texts to use, and how much of them.

    ``files`` are the texts, None for the bundled sample. They are cut into ``samples`` windows of ``length``
    tokens. ``kept`` is a folder that keeps calibrations for later runs, or None.
    """

    files: Sequence[Path] | None
    samples: int | None
    length: int | None
    kept: Path | None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Choice | None":
        """Return the calibration options in ``arguments``; None if no calibration is wanted.

        Raises:
            RequestError: ``--no-calibration`` is combined with an option that needs a calibration.
        """
        if not arguments.no_calibration:
            return cls(arguments.text, arguments.samples, arguments.length, arguments.keep_calibration)
        if given := [name for name in OPTIONS if getattr(arguments, name) is not None]:
            raise RequestError(
                f"{', '.join(map(option, given))}: does not apply with --no-calibration; leave it out"
            )
        return None

    def windows(self, source: Path) -> tuple[Windows, dict[str, object]]:
        """Tokenize the texts with the tokenizer of ``source``; also return entries about them for the report.

        Raises:
            RequestError, CheckpointError: as :func:`read_text` and :func:`calibration_windows`.
        """
        texts = sample_texts() if self.files is None else read_texts(self.files)
        samples, length = self.samples, self.length
        if samples is None:
            samples = SAMPLES_OF_SAMPLE if self.files is None else SAMPLES
        with advised():
            if length is None:
                length = min(
                    LENGTH, getattr(read_config(source).get_text_config(), "max_position_embeddings", LENGTH)
                )
            try:
                windows = calibration_windows(source, texts, samples=samples, length=length)
            except RequestError:
                if self.files is not None or length < 1 or samples < 1:
                    raise
                texts = [joined(texts, PASSAGE)]
                windows = calibration_windows(source, texts, samples=samples, length=length)
        samples, length = windows.tokens.shape  # a short text may have fewer samples
        reported = {"text_sha256": _sha256(texts), "samples": samples, "length": length}
        reported |= {"text": SAMPLE} if self.files is None else {}
        if len(texts) > 1:
            shares = zip(texts, windows.counts, strict=True)
            reported["texts"] = [
                {"name": text.name, "sha256": _sha256([text]), "samples": count} for text, count in shares
            ]
        return windows, {"calibration": reported, "transformers": stock().__version__}

    def place(self, out: Path, *, is_left: bool) -> CalibrationPath:
        """Return the path where the calibration of a conversion to ``out`` is stored.

        Raises:
            RequestError: the folder of ``--keep-calibration`` cannot be created.
        """
        if self.kept is None:
            return CalibrationPath(out.absolute().with_name(f"{out.name}.calibration-"), is_left=is_left)
        try:
            self.kept.mkdir(exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"--keep-calibration: expected a folder that exists or can be created, got {self.kept}: "
                f"{error.strerror}"
            ) from error
        return CalibrationPath(self.kept.absolute() / "calibration-", is_kept=True, is_left=is_left)


def read_texts(files: Sequence[Path]) -> list[Text]:
    """Read the files of ``--text``; each text has the file's name, with a number if another has it too.

    Raises:
        RequestError: as :func:`read_text`.
    """
    names = [path.name for path in files]
    return [
        Text(f"{path.name} ({n})" if names.count(path.name) > 1 else path.name, read_text(path)[0])
        for n, path in enumerate(files, 1)
    ]


def _sha256(texts: Sequence[Text]) -> str:
    """Return the sha256 of the calibration texts, one after another."""
    return hashlib.sha256("".join(text.calibration for text in texts).encode()).hexdigest()


def calibration_line(settings: Mapping[str, object]) -> str:
    """Return the summary line that names the calibration text, from the report's ``settings``."""
    calibration = settings["calibration"]
    if isinstance(calibration, str):
        return f"calibrated on: {calibration}"
    line = f"calibrated on: {calibration['samples']} x {calibration['length']} tokens of "
    sha256 = f"sha256 {calibration['text_sha256'][:12]}"
    names = ", ".join(text["name"] for text in calibration.get("texts", ()))
    if "text" not in calibration:
        return f"{line}--text ({names}{'; ' if names else ''}{sha256})"
    advice = "text like the model's training data gives better results: --text FILE"
    return f"{line}{calibration['text']} ({names}), {sha256}; {advice}"
