"""Attention over a layer of a cache: random queries, and what the tokens that it should hold say to them."""

import torch
from torch import Tensor

from attnlib import KVView, Mask, cached_attention, cached_attention_with_lse, explain

from .calls import Lengths
from .draw import Draw
from .judge import Mismatch, Question, Tensors, judge
from .layers import Layer
from .lists import Lists
from .oracle import Rule, Sequence

BACKENDS = {
    "cpu": ("torch", "torch", None, "reference"),
    "interpreter": ("triton", "triton", "triton", None),
    "cuda": ("triton",),
}


class Asked:
    """A random call over sequences that hold ``rows`` of tokens; ``whole`` sees all that can be seen."""

    def __init__(self, draw: Draw, layer: Layer, lengths: Lengths, rows: dict, padding: dict, *, whole: bool):
        self.draw, self.layer, self.lengths, self.rows, self.padding = draw, layer, lengths, rows, padding
        layout, self.heads = layer.layout, layer.heads
        lengths.slack = (draw.one((0, 0, 0, 2)) if lengths.packed else 0, 0)
        self.width = layout.dim + layout.rope_dim
        reach = max(*lengths.queries, *lengths.keys) + 2
        self.band = draw.band(reach, window=layout.window)
        self.options = draw.options(len(rows), self.heads, self.width, reach=reach)
        if draw.maybe(0.4):  # as a model asks at every step
            self.band, self.options = layer.usual(draw), {}
        if whole:
            self.band = {"left": layout.window and layout.window - 1, "right": None, "prefix": 0}
        self.backend, self.lists = draw.one(BACKENDS[draw.device]), None

    def __str__(self):
        lists = "" if self.lists is None else f" {self.lists}"
        return f" {self.band} {sorted(self.options)} {self.backend}{lists}"

    def check(self, view: KVView) -> None:
        """Run it over the view, and raise Mismatch unless all is as the oracle says."""
        draw, lengths, dtype = self.draw, self.lengths, self.layer.layout.dtype
        q = (draw.normal(*lengths.shape(0), self.heads, self.width) * draw.one((0.3, 1.0, 3.0))).to(dtype)
        if lengths.slack[0]:
            q[-lengths.slack[0] :] = torch.nan
        q = draw.arranged(q, draw.how())
        terms = {name: draw.strided(x) for name, x in self.options.items() if isinstance(x, Tensor)}
        arguments = {**self.options, **terms, "mask": Mask(**self.band), "backend": self.backend}
        if not view.split_size and draw.maybe(0.15):
            heads = self.layer.layout.heads, self.heads
            self.lists = Lists.drawn(draw, lengths.shape(0), heads, max(lengths.keys))
            arguments["mask"] &= self.lists.mask(draw)
        told = explain(cached_attention, q, view, **arguments)
        if told.chosen is None:
            try:
                cached_attention(q, view, **arguments)
            except NotImplementedError:
                return
            raise Mismatch(f"explain says that nothing can run this, and it ran:\n{told}")
        if draw.maybe(0.6):
            found = dict(zip(("out", "lse"), cached_attention_with_lse(q, view, **arguments), strict=True))
        else:
            found = {"out": cached_attention(q, view, **arguments)}
        question = self.question({"q": q.cpu()} | {name: x.cpu() for name, x in terms.items()})
        judge(question, {name: x.cpu() for name, x in found.items()})

    def question(self, tensors: Tensors) -> Question:
        layout, lengths = self.layer.layout, self.lengths
        rule = Rule(
            **self.band,
            scale=self.options.get("scale", self.width**-0.5),
            softcap=self.options.get("softcap"),
        )
        eps = torch.finfo(torch.float32).eps if layout.storage_dtype is not None else 0.0  # of the scales
        return Question(
            tensors,
            rule,
            layout.dtype,
            self.cut,
            lambda x: lengths.join_rows(x, self.heads, layout.value_dim),
            lambda x: lengths.join_lse(x, self.heads),
            eps,
        )

    def cut(self, tensors: Tensors) -> list[Sequence]:
        """The sequences of the call; in less precision, what is stored is read in the layout's dtype."""
        layout, wide, slopes = self.layer.layout, tensors["q"].dtype, tensors.get("alibi_slopes")
        read = torch.float64 if wide == torch.float64 else layout.dtype
        sequences = []
        for n, (name, tokens) in enumerate(self.rows.items()):
            k = torch.stack([x.k for x in tokens]) if tokens else torch.zeros(0, layout.heads, self.width)
            v = (
                torch.stack([x.v for x in tokens])
                if tokens
                else torch.zeros(0, layout.heads, layout.value_dim)
            )
            q, k, v = self.lengths.rows(tensors["q"], 0, n), k.to(read).to(wide), v.to(read).to(wide)
            mine = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
            chosen = None
            if self.lists is not None:
                chosen = self.lists.chosen(self.lengths.rows(self.lists.indices, 0, n), self.heads, len(k))
            rest = tensors.get("sinks"), self.padding[name]
            sequences.append(Sequence(q, k, v, mine, *rest, chosen=chosen))
        return sequences
