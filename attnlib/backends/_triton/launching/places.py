"""The places of lists of selected keys in a buffer."""

from typing import NamedTuple

from .config import power_of_two

LONG = 128  # entries of a list from which on a bit per block finds repeats, in place of a sort
MOST_BITS = 1 << 25  # int32 values with such bits
MOST_WORDS = 1 << 15  # int32 values of one list, which a program clears at once


class Places(NamedTuple):
    """The size of the buffer ``lists`` in int32 values, and the arguments that describe its end, by name."""

    numbers: int
    arguments: dict[str, int]


def places_of(lists: int, slots: int, blocks: int) -> Places:
    """Return the places of ``lists`` lists of ``slots`` entries, which select some of ``blocks`` blocks.

    If lists are long, and the bits take little memory, a bit for each list and block follows the lists.
    """
    bits, words = lists * (slots + 1), (blocks + 63) // 32  # blocks may begin within a sequence
    if slots < LONG or words > MOST_WORDS or lists * words > MOST_BITS:
        words = 0
    of_bits = {"bits": bits, "words": words, "WORDS": power_of_two(words) if words else 0}
    return Places(bits + lists * words, of_bits)
