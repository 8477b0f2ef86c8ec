"""Dense and packed calls in which lists select keys."""

from dataclasses import dataclass, replace
from typing import Any

from .calls import Call
from .draw import Draw
from .drawn import dense, varlen
from .judge import Tensors
from .lists import Lists
from .oracle import Sequence


def selected(draw: Draw) -> "SelectedCall":
    """Draw a dense or packed call, and lists for its queries."""
    call = draw.one((dense, dense, varlen))(draw)
    h, g, _, _ = call.sizes
    lists = Lists.drawn(draw, call.lengths.shape(0), (g, h), max(call.lengths.keys, default=0))
    return SelectedCall(**vars(call), lists=lists)


@dataclass
class SelectedCall(Call):
    """A call whose mask is a band and lists."""

    lists: Lists | None = None

    def cut(self, tensors: Tensors) -> list[Sequence]:
        h, lists, rows = self.sizes[0], self.lists, self.lengths.rows
        return [
            replace(x, chosen=lists.chosen(rows(lists.indices, 0, n), h, len(x.k)))
            for n, x in enumerate(super().cut(tensors))
        ]

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        return arguments | {"mask": arguments["mask"] & self.lists.mask(self.draw)}
