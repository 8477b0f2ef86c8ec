"""The bundled sample in two parts: one to calibrate on, and behind it one that is left alone for checks."""

from importlib.resources import files

SHARE = 0.8  # of its bytes, at most, that calibrations see
PARAGRAPH = b"\n\n"


def calibrated() -> bytes:
    """What calibrations read: passages that take turns, of four books in English from 1788 to 1865."""
    return _parts()[0]


def held_out() -> bytes:
    """What they do not: the passages behind."""
    return _parts()[1]


def _parts() -> tuple[bytes, bytes]:
    whole = files(__package__).joinpath("sample.txt").read_bytes()
    cut = whole.rindex(PARAGRAPH, 0, int(SHARE * len(whole)))
    return whole[: cut + 1], whole[cut + len(PARAGRAPH) :]
