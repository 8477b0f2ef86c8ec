"""One head's problem in fp64, its solution by the definition, and the papers' algorithms under one
signature.
"""

from dataclasses import dataclass, replace

import torch
from helpers import masks
from hypothesis import strategies as st
from torch import Tensor

from attnlib import FULL, Mask
from attnlib.internal.philox import dropout_keep
from attnlib.reference import attend, flash1, flash2, incremental, standard
from attnlib.reference.formulas import ProblemSizes, TileVisits
from attnlib.reference.pairs import Pairs
from attnlib.reference.traffic import SlowMemory, tiles

EXACT = {"rtol": 1e-10, "atol": 1e-10}
SEED, DROPOUT = 1234567890123, 0.3


@dataclass
class Head:
    """q ``[s, d]``, k ``[t, d]``, v ``[t, e]``, the output's gradient ``[s, e]``, and tile sizes."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    mask: Mask
    rows: int
    columns: int
    dropout: bool = False

    def __repr__(self):
        return (
            f"Head({self.sizes}, {self.mask}, rows={self.rows}, columns={self.columns}, "
            f"dropout={self.dropout})"
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def tile(self) -> dict[str, int]:
        return {"rows": self.rows, "columns": self.columns}

    @property
    def sizes(self) -> ProblemSizes:
        return ProblemSizes(*self.q.shape[:1], *self.k.shape, self.v.shape[1])

    @property
    def scale(self) -> float:
        return self.q.shape[1] ** -0.5

    @property
    def pairs(self) -> Pairs:
        dropout = (DROPOUT, keep) if self.dropout else ()
        return Pairs(self.mask, len(self.q), len(self.k), self.scale, *dropout)

    def visible(self) -> Tensor:
        s, t = len(self.q), len(self.k)
        return self.mask.visible(torch.arange(t - s, t)[:, None], torch.arange(t))

    def visits(self) -> TileVisits:
        """By brute force over the definition of visibility."""
        visible = self.visible()
        queries = tiles(len(self.q), self.rows)
        met = [(i, j) for i in queries for j in tiles(len(self.k), self.columns) if visible[i, j].any()]
        return TileVisits(sum(i.stop - i.start for i, _ in met), sum(j.stop - j.start for _, j in met))

    def change(self, **changes) -> "Head":
        return replace(self, **changes)

    def defined(self) -> dict[str, Tensor]:
        """Output, LSE and gradients by the definition and autograd."""
        q, k, v = (x.detach().requires_grad_() for x in self.tensors)
        weight = keep(*self.pairs.whole)[None].double() / (1 - DROPOUT) if self.dropout else None
        out, lse = attend(q[:, None], k[:, None], v[:, None], self.visible(), scale=self.scale, weight=weight)
        names, result = ("dq", "dk", "dv"), {"out": out[:, 0].detach(), "lse": lse[0].detach()}
        grads = torch.autograd.grad(
            (out[:, 0] * self.do).sum(), (q, k, v), materialize_grads=True, allow_unused=True
        )
        return result | dict(zip(names, grads, strict=True))


def keep(i: slice, j: slice, sequence: int = 0, head: int = 0) -> Tensor:
    """The library's dropout bits of one tile, made where they are used."""
    where = {"sequences": torch.tensor([sequence]), "heads": torch.tensor([head])}
    rows = torch.arange(i.start, i.stop)
    return dropout_keep(SEED, DROPOUT, **where, rows=rows, first=j.start, last=j.stop)[0, 0]


def run_incremental(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    out, c, pi = incremental.forward(*head.tensors, head.pairs, columns=head.columns, memory=memory)
    return out, c + pi.log()


def run_flash1(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    out, c, pi = flash1.forward(*head.tensors, head.pairs, **head.tile, memory=memory)
    return out, c + pi.log()


def run_flash2(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    return flash2.forward(*head.tensors, head.pairs, **head.tile, memory=memory)


def back_standard(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor, Tensor]:
    _, p = standard.forward(*head.tensors, head.pairs, memory=SlowMemory())
    return standard.backward(*head.tensors, p, head.do, head.pairs, memory=memory)


def back_flash1(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor, Tensor]:
    saved = flash1.forward(*head.tensors, head.pairs, **head.tile, memory=SlowMemory())
    return flash1.backward(
        flash1.Flash1Saved(*head.tensors, *saved), head.do, head.pairs, **head.tile, memory=memory
    )


def back_one_pass(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor, Tensor]:
    saved = run_flash2(head, SlowMemory())
    return flash2.backward_one_pass(
        flash2.Flash2Saved(*head.tensors, *saved), head.do, head.pairs, **head.tile, memory=memory
    )


def back_two_pass(head: Head, memory: SlowMemory) -> tuple[Tensor, Tensor, Tensor]:
    saved = run_flash2(head, SlowMemory())
    return flash2.backward_two_pass(
        flash2.Flash2Saved(*head.tensors, *saved), head.do, head.pairs, **head.tile, memory=memory
    )


FORWARD = {"incremental": run_incremental, "flash1": run_flash1, "flash2": run_flash2}
BACKWARD = {
    "standard": back_standard,
    "flash1": back_flash1,
    "flash2, one pass": back_one_pass,
    "flash2, two passes": back_two_pass,
}


def make(s, t, d, e, *, mask=FULL, rows=4, columns=4, dropout=False) -> Head:
    q, k, v, do = (torch.randn(shape, dtype=torch.float64) for shape in ((s, d), (t, d), (t, e), (s, e)))
    return Head(q, k, v, do, mask, rows, columns, dropout)


@st.composite
def heads(draw, *, dropout: tuple[bool, ...] = (False, True)) -> Head:
    """Any lengths, widths, mask and tile sizes, tiles of 1 and larger than the problem among them."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    length, width = st.sampled_from((0, 1, 2, 5, 8, 13, 17)), st.sampled_from((1, 3, 4))
    s, t, d, e = draw(length), draw(length), draw(width), draw(width)
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    chosen = {"mask": draw(masks(12)), "dropout": draw(st.sampled_from(dropout))}
    return make(s, t, d, e, rows=rows, columns=columns, **chosen)
