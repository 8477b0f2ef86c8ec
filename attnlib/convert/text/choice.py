"""Choose the calibration text by the command's options: a file, the bundled sample, or none."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..checkpoint.errors import RequestError
from ..stock import read_config, stock
from ..wording import option
from .kept import CalibrationPath, advised
from .sample import calibrated
from .tokens import decoded, read_text, tokens_of

SAMPLES, LENGTH = 128, 512
SAMPLE = (
    "the bundled sample, passages of 'Alice's Adventures in Wonderland', 'On the Origin of Species', 'The "
    "Federalist' and 'Moby-Dick' (public domain)"
)
WEIGHTS_ALONE = "no text, only the weights"
NOTHING = "nothing, as no heads are merged"
OPTIONS = ("text", "samples", "length", "keep_calibration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the calibration options to ``parser``."""
    text = parser.add_argument_group("calibration on text")
    text.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text like what the model will read (default: a bundled sample)",
    )
    text.add_argument(
        "--samples", type=int, metavar="N", help=f"number of windows of the text (default: {SAMPLES})"
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
    """The calibration options: which text to use, and how much of it.

    ``file`` is the text, None for the bundled sample. It is cut into ``samples`` windows of ``length``
    tokens. ``kept`` is a folder that keeps calibrations for later runs, or None.
    """

    file: Path | None
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

    def tokens(self, source: Path) -> tuple[Tensor, dict[str, object]]:
        """Tokenize the text with the tokenizer of ``source``; also return entries about it for the report.

        Raises:
            RequestError, CheckpointError: as :func:`read_text` and :func:`tokens_of`.
        """
        text, sha256 = decoded(calibrated()) if self.file is None else read_text(self.file)
        samples, length = SAMPLES if self.samples is None else self.samples, self.length
        with advised():
            if length is None:
                length = min(
                    LENGTH, getattr(read_config(source).get_text_config(), "max_position_embeddings", LENGTH)
                )
            tokens = tokens_of(source, text, samples=samples, length=length)
        samples, length = tokens.shape  # a short text may have fewer samples
        reported = {"text_sha256": sha256, "samples": samples, "length": length}
        reported |= {"text": SAMPLE} if self.file is None else {}
        return tokens, {"calibration": reported, "transformers": stock().__version__}

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


def calibration_line(settings: Mapping[str, object]) -> str:
    """Return the summary line that names the calibration text, from the report's ``settings``."""
    calibration = settings["calibration"]
    if isinstance(calibration, str):
        return f"calibrated on: {calibration}"
    line = f"calibrated on: {calibration['samples']} x {calibration['length']} tokens of "
    if "text" not in calibration:
        return f"{line}--text (sha256 {calibration['text_sha256'][:12]})"
    advice = "text like the model's training data gives better results: --text FILE"
    return f"{line}{calibration['text']}, sha256 {calibration['text_sha256'][:12]}; {advice}"
