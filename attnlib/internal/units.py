"""Sizes in bytes as people write them, such as ``40GiB``."""

import re
from types import MappingProxyType

UNITS = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", 1)}
    | {f"{letter}IB": 1024**n for n, letter in enumerate("KMGT", 1)}
)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` says.

    >>> parse_bytes("5GB"), parse_bytes("1.5 GiB"), parse_bytes("512")
    (5000000000, 1610612736, 512)

    Raises:
        ValueError: ``text`` is not a number, with or without a unit from B to TB or TiB.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"expected a size such as 5GB or 500MiB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])
