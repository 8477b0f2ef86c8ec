"""The bundled sample text: its first part is for calibration, and the rest is held out for checks."""

from importlib.resources import files

SHARE = 0.8  # calibrate on at most this share of the bytes
PARAGRAPH = b"\n\n"


def calibrated() -> bytes:
    """Return the calibration part: alternating passages of four English books from 1788 to 1865."""
    return _parts()[0]


def held_out() -> bytes:
    """Return the held-out part: the passages that follow the calibration part."""
    return _parts()[1]


def _parts() -> tuple[bytes, bytes]:
    whole = files(__package__).joinpath("sample.txt").read_bytes()
    cut = whole.rindex(PARAGRAPH, 0, int(SHARE * len(whole)))
    return whole[: cut + 1], whole[cut + len(PARAGRAPH) :]
