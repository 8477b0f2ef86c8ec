"""Dense and packed calls: one random call from a seed, run by the library and judged against the oracle."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnlib import Mask, attention, attention_with_lse, explain, merge_states, varlen_attention
from attnlib import varlen_attention_with_lse as varlen_with_lse

from .draw import Draw
from .judge import Mismatch, Question, Tensors, gradients, judge
from .oracle import Rule, Sequence
from .recomputed import check_recomputed

TENSORS = ("alibi_slopes", "sinks")


@dataclass
class Lengths:
    """Queries and keys of each sequence; rows that belong to none follow packed ones. Dense sequences are
    alike.
    """

    packed: bool
    queries: list[int]
    keys: list[int]
    slack: tuple[int, int] = (0, 0)

    def shape(self, which: int) -> tuple[int, ...]:
        """Of q (0) or k (1), up to the heads."""
        lengths = (self.queries, self.keys)[which]
        return (sum(lengths) + self.slack[which],) if self.packed else (len(lengths), max(lengths, default=5))

    def rows(self, x: Tensor, which: int, n: int) -> Tensor:
        """What of ``x`` belongs to sequence ``n``."""
        lengths = (self.queries, self.keys)[which]
        return x[sum(lengths[:n]) : sum(lengths[: n + 1])] if self.packed else x[n]

    def join_rows(self, parts: list[Tensor], h: int, width: int) -> Tensor:
        """Rows ``[s, h, width]`` of all sequences as the library gives them, with 0 for those of nobody."""
        if not self.packed:
            return torch.stack(parts) if parts else torch.zeros(*self.shape(0), h, width)
        return torch.cat((*parts, (parts[0] if parts else torch.empty(0)).new_zeros(self.slack[0], h, width)))

    def join_lse(self, parts: list[Tensor], h: int) -> Tensor:
        """The LSE ``[h, s]`` of all sequences, with -inf for rows of nobody."""
        if not self.packed:
            return torch.stack(parts) if parts else torch.zeros(0, h, self.shape(0)[1])
        like = parts[0] if parts else torch.empty(0)
        return torch.cat((*parts, like.new_full((h, self.slack[0]), -torch.inf)), 1)


@dataclass
class Call:
    """One call: its tensors on the device, and how it is run."""

    draw: Draw = field(repr=False)
    lengths: Lengths
    dtype: torch.dtype
    sizes: tuple[int, int, int, int]  # h, g, d, e
    band: dict[str, Any]
    options: dict[str, Any]
    bounds: dict[str, list[int]]
    dropout: dict[str, Any]
    hows: list[str]
    backend: str | None
    lse: bool
    leaves: list[str]
    given: list[str]  # out, lse or both, whose gradients are given
    split: int | None = None  # keys before and from here on, merged
    poison: list[str] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict, repr=False)

    def __str__(self):
        terms = [f"{name} {x.dtype} {list(x.shape)}" for name, x in self.tensors.items() if name in TENSORS]
        return f"{self!r} with {', '.join(terms) or 'no other tensors'}"

    def check(self) -> None:
        """Run it, and raise Mismatch unless all is as the oracle says."""
        before = {name: x.detach().cpu() for name, x in self.tensors.items()}
        question = self.question(before)
        dout, dlse = self.directions()
        directions = {
            name: x for name, x in (("out", dout), ("lse", dlse)) if name in self.given and self.leaves
        }
        arguments = self.arguments()
        if not self.is_possible(arguments):
            return
        ours = self.results(arguments, directions)
        for name, x in self.tensors.items():
            if not torch.equal(x.detach().cpu().nan_to_num(), before[name].nan_to_num()):
                raise Mismatch(f"{name}: the call changed its input")
        judge(question, ours, {n: x.cpu() for n, x in directions.items()}, self.leaves)
        if self.split is None and self.draw.maybe(0.3):
            with_lse = varlen_with_lse if self.lengths.packed else attention_with_lse
            lse = with_lse(*self.qkv(self.tensors), **arguments)[1].detach()
            check_recomputed(self, arguments, lse)

    def question(self, tensors: Tensors) -> Question:
        h, _, d, e = self.sizes
        rule = Rule(
            **self.band,
            scale=self.options.get("scale", d**-0.5),
            softcap=self.options.get("softcap"),
            dropout_p=self.dropout.get("dropout_p", 0.0),
            seed=self.dropout.get("dropout_seed", 0),
        )
        eps = (
            3 * torch.finfo(self.dtype).eps if self.split is not None else 0.0
        )  # parts are rounded, and so is the whole
        join = self.lengths.join_rows, self.lengths.join_lse
        return Question(
            tensors, rule, self.dtype, self.cut, lambda x: join[0](x, h, e), lambda x: join[1](x, h), eps
        )

    def cut(self, tensors: Tensors) -> list[Sequence]:
        """The sequences of the call."""
        sequences, slopes = [], tensors.get("alibi_slopes")
        for n in range(len(self.lengths.queries)):
            q, k, v = (
                self.lengths.rows(tensors[name], name != "q", n)
                for name in ("q", "k", "v" if "v" in tensors else "k")
            )
            mine = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
            start, end = (
                self.bounds[name][n] if name in self.bounds else None for name in ("key_starts", "key_ends")
            )
            sequences.append(Sequence(q, k, v, mine, tensors.get("sinks"), start or 0, end, n))
        return sequences

    def directions(self) -> tuple[Tensor, Tensor]:
        """Gradients of the output and the LSE, on the device, NaN in rows of nobody."""
        (h, _, _, e), rows = self.sizes, self.lengths.shape(0)
        dout = self.draw.normal(*rows, h, e).to(self.dtype)
        dlse = self.draw.normal(*rows[:-1], h, rows[-1]).to(
            torch.float64 if self.dtype == torch.float64 else torch.float32
        )
        if self.lengths.slack[0]:
            dout[-self.lengths.slack[0] :], dlse[..., -self.lengths.slack[0] :] = torch.nan, torch.nan
        if self.draw.maybe(0.2):  # of a sum
            dout = dout[:0].sum().add(1).to(self.draw.place).expand(dout.shape)
            return dout, self.draw.strided(dlse)
        return self.draw.arranged(dout, self.draw.how()), self.draw.strided(dlse)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the library's functions."""
        draw, place, lengths = self.draw, self.draw.place, self.lengths
        arguments = {"mask": Mask(**self.band), "backend": self.backend, **self.options}
        arguments |= {name: self.tensors[name] for name in TENSORS if name in self.tensors}
        for name, bounds in self.bounds.items():
            arguments[name] = draw.strided(torch.tensor(bounds, dtype=torch.int32))
        if self.dropout:
            seed = torch.tensor([self.dropout["dropout_seed"]], device=place)
            arguments |= {"dropout_p": self.dropout["dropout_p"], "dropout_seed": seed}
        if lengths.packed:
            for name, counts in (("q", lengths.queries), ("k", lengths.keys)):
                offsets = draw.strided(torch.tensor([0, *accumulate(counts)], dtype=torch.int32))
                arguments[f"cu_seqlens_{name}"] = offsets
                if draw.maybe(0.5):
                    arguments[f"max_seqlen_{name}"] = max(counts, default=0) + draw.one((0, 0, 1, 1000))
            if lengths.queries == lengths.keys and draw.maybe(0.7):
                arguments["cu_seqlens_k"] = arguments["cu_seqlens_q"]
        return arguments

    def function(self) -> Callable:
        if self.lse:
            return varlen_with_lse if self.lengths.packed else attention_with_lse
        return varlen_attention if self.lengths.packed else attention

    def qkv(self, tensors: Tensors) -> list[Tensor]:
        return [tensors[name] for name in ("q", "k", "v" if "v" in tensors else "k")]

    def is_possible(self, arguments: dict[str, Any]) -> bool:
        """Whether the backend can run it; if not, it must say so."""
        self.watch()
        told = explain(self.function(), *self.qkv(self.tensors), **arguments)
        if told.chosen is not None:
            return True
        try:
            self.function()(*self.qkv(self.tensors), **arguments)
        except NotImplementedError:
            return False
        raise Mismatch(f"explain says that nothing can run this, and it ran:\n{told}")

    def watch(self) -> None:
        for name, x in self.tensors.items():
            x.requires_grad_(name in self.leaves)

    def results(self, arguments: dict[str, Any], directions: Tensors) -> Tensors:
        """What the library gives: out, lse if asked for, and the gradients."""
        with torch.inference_mode() if not self.leaves and self.draw.maybe(0.2) else nullcontext():
            if self.draw.maybe(0.2):  # what is remembered of calls is not their numbers
                self.run(arguments, {name: _negated(x) for name, x in self.tensors.items()})
            found = self.run(arguments, self.tensors)
            if self.draw.maybe(0.2):
                for name, again in self.run(arguments, self.tensors).items():
                    if not torch.equal(again.nan_to_num(), found[name].nan_to_num()):
                        raise Mismatch(f"{name}: the same call gave other bits")
        for name in directions:
            if self.leaves != ["v"] and not found[name].requires_grad:  # the LSE does not depend on values
                raise Mismatch(f"{name}: it has no gradient")
        found |= gradients(found, directions, {name: self.tensors[name] for name in self.leaves})
        return {name: x.detach().cpu() for name, x in found.items()}

    def run(self, arguments: dict[str, Any], tensors: Tensors) -> Tensors:
        """out, and lse if asked for."""
        if self.split is None:
            found = self.function()(*self.qkv(tensors), **arguments)
            return dict(zip(("out", "lse"), found if self.lse else (found,), strict=False))
        starts, ends = (self.bounds.get(name) for name in ("key_starts", "key_ends"))
        b, t = len(self.lengths.keys), self.lengths.shape(1)[1]
        starts, ends = starts or [0] * b, ends or [t] * b
        states = []
        for lows, highs in (
            (starts, [min(self.split, end) for end in ends]),
            ([max(self.split, x) for x in starts], ends),
        ):
            bounds = [torch.tensor(x, dtype=torch.int32, device=self.draw.place) for x in (lows, highs)]
            given = {**arguments, "key_starts": bounds[0], "key_ends": bounds[1]}
            states += attention_with_lse(
                *self.qkv(tensors), **(given if not states else given | {"sinks": None})
            )
        return dict(zip(("out", "lse"), merge_states(*states), strict=True))


def _negated(x: Tensor) -> Tensor:
    """-x, in memory of its own that is laid out as x's."""
    storage = x.detach().untyped_storage().clone()
    torch.empty(0, dtype=x.dtype, device=x.device).set_(storage).neg_()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        storage, x.storage_offset(), x.shape, x.stride()
    )
