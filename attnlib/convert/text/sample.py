"""The bundled sample text in two parts: the first for calibration, the rest held out for checks."""

from importlib.resources import files

SHARE = 0.8  # largest share of the bytes to calibrate on
PARAGRAPH = b"\n\n"


def calibrated() -> bytes:
    """Return the calibration part: alternating passages of four English books from 1788 to 1865."""
    return _parts()[0]


def held_out() -> bytes:
    """Return the held-out part: the passages that follow."""
    return _parts()[1]


def _parts() -> tuple[bytes, bytes]:
    whole = files(__package__).joinpath("sample.txt").read_bytes()
    cut = whole.rindex(PARAGRAPH, 0, int(SHARE * len(whole)))
    return whole[: cut + 1], whole[cut + len(PARAGRAPH) :]
