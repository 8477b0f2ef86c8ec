"""Classify the tiles of a mask function as hidden, partial or full, for keys in a cache."""

from ....tracing.program import Program
from ..launching.launch import Launch
from ..launching.tiles import classify
from . import tables
from .shapes import DecodeShapes

FILL = 16  # programs on each multiprocessor that classify tiles (other numbers are not timed)


class OverCache:
    """The launch that classifies the tiles of a mask function over a cache, and the sizes of two buffers.

    ``launch`` classifies each tile in one byte; ``states`` is the number of bytes. The decode kernel that
    follows takes ``arguments`` in addition, and needs a second buffer of ``runs`` int32 values.
    """

    def __init__(self, x: DecodeShapes):
        # A block of rows in a dedicated kernel reads one row of states.
        own = x.hopper is not None
        queries = min(tables.GRAIN, 1 << (x.mean - 1).bit_length())
        queries = max(1, x.tiles.block_m // x.group) if own else queries
        planes = x.h if "h" in Program(x.a.mask_program).read else 1
        columns, room = (-(-x.max_tokens // n) for n in (tables.GRAIN, x.tiles.block_n))
        self.arguments = {
            "planes": planes, "columns": columns, "room": room, "GRAIN_M": queries, "GRAIN": tables.GRAIN,
        }  # fmt: skip
        rows = planes * _blocks(x, x.s, queries)
        arguments = x.arguments() | self.arguments
        kernel, programs, config, more = classify((rows, columns), queries, tables.GRAIN, FILL * x.processors)
        self.launch = Launch(kernel, programs, arguments | {"t": arguments["limit"]} | more, config)
        self.states = rows * columns
        self.runs = 0 if own else x.g * _blocks(x, x.s * x.group, x.tiles.block_m) * room


def _blocks(x: DecodeShapes, rows: int, block: int) -> int:
    """Return the number of row blocks in all sequences; packed ones may each end with a partial block."""
    return rows // block + x.b + 1 if x.packed else x.b * -(-rows // block)
