"""Masks and scores by random functions: the library's backends against the functions, called in Python pair
by pair.
"""

import pickle
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnlib import CAUSAL, FULL, TraceError, attention_with_lse, mask_mod, score_mod, sliding

from .draw import Draw
from .expressions import UNTRACEABLE, Expression, Grammar, Table
from .judge import Mismatch

BACKENDS = {
    "cpu": ("torch", "reference"),
    "interpreter": ("triton", "torch", "reference"),
    "cuda": ("triton", "torch"),
}
BANDS = {"FULL": FULL, "CAUSAL": CAUSAL, "sliding(3)": sliding(3)}
INDICES = ("b", "h", "i", "j")
ALL = Expression("True", {})  # with a band it is the band, no function


def function(draw: Draw) -> "Functions | Untraceable":
    """Draw a call with a mask, a score or both by function, or a function that cannot be traced."""
    heads = draw.one(((1, 1), (2, 1), (2, 2)))
    grammar = Grammar(draw, heads[0])
    if draw.maybe(0.15):
        text = draw.one(UNTRACEABLE).format(grammar.int(1))
        return Untraceable(grammar.expression(text))
    mask = grammar.expression(grammar.bool(draw.upto(3, 1)))
    score = None
    if draw.maybe(0.5):
        grammar = Grammar(draw, heads[0])
        score = grammar.expression(grammar.unread() if draw.maybe(0.3) else grammar.float(draw.upto(3, 1)))
        mask = ALL if draw.maybe(0.3) else mask
    sizes = [draw.one((1, 2)), *(0 if draw.maybe(0.1) else draw.one((1, 2, 3, 5, 7)) for _ in "st")]
    return Functions(draw, mask, score, draw.one(tuple(BANDS)), (*sizes, *heads))


@dataclass
class Untraceable:
    """A function that raises TraceError, with the line."""

    expression: Expression

    def check(self) -> None:
        try:
            mask_mod(self.expression.function(INDICES), *self.expression.tables.values())
        except TraceError as error:
            if not re.match(r"mask_mod: (<fuzz>:\d+: .+|\w+ is a tensor)", str(error)):
                raise Mismatch(f"an error without its line: {error}") from None
            return
        raise Mismatch("it was traced")


@dataclass
class Functions:
    """A small call, its mask and its score."""

    draw: Draw = field(repr=False)
    mask: Expression
    score: Expression | None
    band: str
    sizes: tuple[int, int, int, int, int]  # b, s, t, h, g

    def check(self) -> None:
        """Raise Mismatch unless every backend gives what Python does."""
        draw, (b, s, t, h, g) = self.draw, self.sizes
        q, k, v = draw.normal(b, s, h, 16), draw.normal(b, t, g, 16), draw.normal(b, t, g, 16)
        directions = draw.normal(b, s, h, 16), draw.normal(b, h, s)
        learnt = (
            [] if self.score is None else [x for x in self.score.tables.values() if x.is_floating_point()]
        )
        leaves, options = [q, k, v, *learnt], (draw.maybe(0.3), draw.maybe(0.2), draw.maybe(0.6))
        try:
            exact, naive = (
                self.by_python(leaves, directions, wide) for wide in (torch.float64, torch.float32)
            )
        except (RuntimeError, TypeError) as error:  # torch has no such operation, and so attnlib has none
            return self.is_refused(error)
        for backend in BACKENDS[draw.device]:
            self.compare(backend, self.by_library(backend, leaves, directions, *options), exact, naive)
        return None

    def is_refused(self, error: Exception) -> None:
        for make, x, first in ((mask_mod, self.mask, INDICES), (score_mod, self.score, ("score", *INDICES))):
            try:
                if x is not None:
                    make(x.function(first), *x.tables.values())
            except TraceError:
                return
        raise Mismatch(f"torch refuses it, and attnlib takes it: {error}")

    def pairs(self, x: Expression, tables: dict[str, object], numbers: Tensor | None) -> Tensor:
        """Call a function for each pair with 0-dimensional tensors; ``[b, h, s, t]``.

        Without pairs it is called once, as torch may refuse what it does.
        """
        b, s, t, h, _ = self.sizes
        scored = ("score",) * (numbers is not None)
        like, function = numbers.dtype if scored else torch.bool, x.function((*scored, *INDICES))
        if not s * t:
            function(*(torch.zeros(()) for _ in scored), *map(torch.tensor, (0, 0, 0, 0)), *tables.values())
            return torch.zeros(b, h, s, t, dtype=like)
        found = [
            function(
                *(numbers[m, n, i, j] for _ in scored), *map(torch.tensor, (m, n, t - s + i, j)),
                *tables.values()
            )
            for m in range(b) for n in range(h) for i in range(s) for j in range(t)
        ]  # fmt: skip
        return torch.stack([torch.as_tensor(x).to(like) for x in found]).view(b, h, s, t)

    def by_python(
        self, given: list[Tensor], directions: tuple[Tensor, Tensor], wide: torch.dtype
    ) -> list[Tensor]:
        """Output, LSE and gradients in a precision; a mask's floats are of fp32 in any."""
        (_, s, t, h, g), before = self.sizes, torch.get_default_dtype()
        leaves = [x.to(wide).requires_grad_() for x in given]
        q, k, v = leaves[0], *(x.repeat_interleave(h // g, 2) for x in leaves[1:3])
        tables = {name: Table(x, torch.float32) for name, x in self.mask.tables.items()}
        seen = self.pairs(self.mask, tables, None) & BANDS[self.band].visible(
            torch.arange(t - s, t)[:, None], torch.arange(t)
        )
        scores = torch.einsum("bshd,bthd->bhst", q, k) / 4
        if self.score is not None:
            learnt = iter(leaves[3:])
            tables = {
                name: Table(next(learnt) if x.is_floating_point() else x, wide)
                for name, x in self.score.tables.items()
            }
            torch.set_default_dtype(wide)
            try:
                scores = self.pairs(self.score, tables, scores)
            finally:
                torch.set_default_dtype(before)
        seen = seen & (scores != -torch.inf)
        scores = scores.masked_fill(~seen, -torch.inf)
        nothing = ~seen.any(-1)
        scores = scores.masked_fill(nothing[..., None], 0)
        lse = torch.logsumexp(scores, -1) if t else scores.sum(-1)
        p = torch.exp(scores - lse[..., None]).masked_fill(nothing[..., None], 0)
        out, lse = torch.einsum("bhst,bthd->bshd", p, v), lse.masked_fill(nothing, -torch.inf)
        return self.with_gradients(out, lse, leaves, directions)

    def by_library(
        self,
        backend: str,
        given: list[Tensor],
        directions: tuple[Tensor, Tensor],
        pickles: bool,
        tiles: bool,
        grad: bool,
    ) -> list[Tensor]:
        b, s, t, h, _ = self.sizes
        place = self.draw.place
        leaves = [x.detach().clone().to(place).requires_grad_() for x in given]
        mask = mask_mod(self.mask.function(INDICES), *(x.to(place) for x in self.mask.tables.values()))
        mask, score, learnt = mask & BANDS[self.band], None, iter(leaves[3:])
        if self.score is not None:
            tables = [
                next(learnt) if x.is_floating_point() else x.to(place) for x in self.score.tables.values()
            ]
            score = score_mod(self.score.function(("score", *INDICES)), *tables)
        if pickles:
            mask = pickle.loads(pickle.dumps(mask))
            score = score and pickle.loads(pickle.dumps(score)).reading(score.tensors)
        if tiles and hasattr(mask, "block_mask"):
            mask = mask.block_mask(b, h, s, t, device=place)
        with torch.set_grad_enabled(grad):
            out, lse = attention_with_lse(*leaves[:3], mask=mask, score=score, backend=backend)
        found = self.with_gradients(out, lse, leaves, directions) if grad else [out, lse]
        return [x.detach().cpu() for x in found]

    def with_gradients(
        self, out: Tensor, lse: Tensor, leaves: list[Tensor], directions: tuple[Tensor, Tensor]
    ):
        """out, lse, and the gradients of leaves."""
        dout, dlse = (y.to(x.device, x.dtype) for x, y in zip((out, lse), directions, strict=True))
        total = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0) * dlse).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return [out, lse, *grads]

    def compare(self, backend: str, ours: list[Tensor], exact: list[Tensor], naive: list[Tensor]) -> None:
        names = ("out", "lse", "dq", "dk", "dv", *(f"gradient {n}" for n in range(len(exact) - 5)))
        for name, x, y, z in zip(names, ours, exact, naive, strict=False):
            if not torch.equal(x == -torch.inf, y == -torch.inf) or x.isnan().any() != y.isnan().any():
                raise Mismatch(f"{backend}: {name}: other pairs are seen: {x.tolist()}, not {y.tolist()}")
            x, y, z = (n.double().nan_to_num(0, 0, 0) for n in (x, y, z))
            rounding = torch.finfo(torch.bfloat16 if name[0] == "g" else torch.float32).eps
            allowed = (
                8 * (y - z).abs().max() + 64 * rounding * (1 + y.abs().max())
                if y.numel()
                else torch.zeros(())
            )
            if y.numel() and (x - y).abs().max() > allowed:
                raise Mismatch(
                    f"{backend}: {name}: off by {(x - y).abs().max():.3g} of {y.abs().max():.3g} > "
                    f"{allowed:.3g}"
                )
