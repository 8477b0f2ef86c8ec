"""Time attention over selected keys, on dedicated and generic kernels, beside the dense call."""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import CAUSAL, KVLayout, attention, cached_attention, masks
from .compare import Cells, agreeing, attempt, compare_calls
from .place import Target
from .report import Line, Table
from .speed import Rows, Run, milliseconds, timed_passes
from .stored import Decoding, stored
from .watchdog import watched

CHECKED = 16  # last queries, whose output and gradients torch's backend computes too
CHUNK = 1024  # queries whose lists are drawn at a time
LATENT, VALUES = 576, 512  # channels of a latent with its rotary key, and those that are values


class SelectedCase(NamedTuple):
    """A causal call whose queries, the last of all tokens, choose ``entries`` blocks of keys at random.

    There is a list for each KV head. ``alike`` adjacent queries choose the same blocks. With ``latent``,
    there is one KV head, whose values are the first channels of its keys.
    """

    name: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    block_size: int
    entries: int
    alike: int = 1
    latent: bool = False
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def lists(self, device: str) -> Tensor:
        """Return the lists ``[1, s, g, n]``; those of early queries have fewer entries than ``n``."""
        drawn = []
        for first in range(0, self.queries, CHUNK):
            rows = torch.arange(first, min(first + CHUNK, self.queries), self.alike, device=device)
            newest = (self.keys - self.queries + rows) // self.block_size
            blocks = torch.arange(-(-self.keys // self.block_size), device=device)
            score = torch.rand(len(rows), self.kv_heads, len(blocks), device=device)
            score.masked_fill_(blocks > newest[:, None, None], -1)
            best = score.topk(self.entries, -1)
            entries = torch.where(best.values < 0, -1, best.indices).int().sort(-1, descending=True).values
            drawn.append(entries.repeat_interleave(self.alike, 0))
        return torch.cat(drawn)[None]

    def tensors(self, device: str) -> list[Tensor]:
        """Return random q, k, v and the gradient of the output; the latent is k, and v is None."""
        width, value = (LATENT, VALUES) if self.latent else (self.dim, self.dim)
        of_keys = (1, self.keys, self.kv_heads)
        shapes = ((1, self.queries, self.heads, width), (*of_keys, width), (*of_keys, value))
        shapes = (*shapes, (*shapes[0][:-1], value))
        q, k, v, dout = (torch.randn(x, device=device, dtype=self.dtype) for x in shapes)
        return [q, k, *([] if self.latent else [v]), dout]


LATENTS, BLOCKS = (
    SelectedCase("", 4096, 32768, 128, 1, 1, 2048, latent=True),
    SelectedCase("", 32768, 32768, 64, 4, 64, 16),
)
SELECTED = (
    LATENTS._replace(name="2,048 of 32k latents, 4k queries, 128 heads"),
    LATENTS._replace(name="2,048 of 32k latents, 2k queries, 128 heads", queries=2048),
    *(
        LATENTS._replace(name=f"1/8 of {n >> 10}k latents", queries=n, keys=n, entries=n // 8)
        for n in (2048, 16384)
    ),
    BLOCKS._replace(name="16 of 512 blocks, GQA 64/4, neighbours choose alike", alike=4),
    BLOCKS._replace(name="16 of 512 blocks, GQA 64/4, at random"),
    *(
        BLOCKS._replace(
            name=f"1/8 of {n >> 10}k keys, GQA 64/4, alike", queries=n, keys=n, entries=n // 512, alike=4
        )
        for n in (2048, 4096, 8192, 16384)
    ),
)


class SelectedStep(NamedTuple):
    """A decoding step over pages, whose queries choose ``entries`` blocks of keys at random."""

    step: Decoding
    block_size: int
    entries: int

    def lists(self, device: str) -> Tensor:
        """Return the lists ``[b, 1, g, n]``."""
        blocks = self.step.tokens // self.block_size
        score = torch.rand(self.step.batch, 1, self.step.layout.heads, blocks, device=device)
        return score.topk(self.entries, -1).indices.int()


MLA, GQA = KVLayout.latent(512, 64, dtype=torch.bfloat16), KVLayout.grouped(4, 128, dtype=torch.bfloat16)
STEPS = (
    *(
        SelectedStep(Decoding(f"2,048 of 32k latents, 128 heads, batch {n}", n, 128, 32768, MLA), 1, 2048)
        for n in (1, 8, 64)
    ),
    SelectedStep(Decoding("16 of 512 blocks, GQA 64/4, batch 64", 64, 64, 32768, GQA), 64, 16),
)


def rows(place: Target, tables: Iterable[Table], work: Iterable[SelectedCase] = SELECTED) -> Rows:
    """Yield the milliseconds of each call's forward and backward."""
    return milliseconds(place, tables, work, timed)


def timed(place: Target, case: SelectedCase) -> dict[str, Cells]:
    """Return the seconds of each implementation in each pass, if its results agree with the torch backend's.

    The dense call sees all keys, so its results are not compared.
    """
    torch.manual_seed(0)
    lists, given = case.lists(place.device), case.tensors(place.device)
    backends = {"ours": place.backend, "generic": "triton:generic"}
    runs = {name: run_of(backend, given, lists, case.block_size) for name, backend in backends.items()}
    q, *others, dout = given
    of_last = [q[:, -CHECKED:], *others, dout[:, -CHECKED:]]
    runs["torch"] = run_of("torch", of_last, lists[:, -CHECKED:], case.block_size)
    runs = agreeing(runs, of_last_queries, tuple(backends))
    del runs["torch"]
    runs["dense"] = run_of(place.backend, given)
    return timed_passes(place, runs)


def run_of(backend: str | None, given: list[Tensor], lists: Tensor | None = None, block_size: int = 1) -> Run:
    """Return causal attention over the keys that lists select, or over all keys without lists."""
    mask = CAUSAL if lists is None else CAUSAL & masks.selected(lists, block_size)

    def call(q: Tensor, k: Tensor, v: Tensor | None = None) -> Tensor:
        return attention(q, k, k[..., :VALUES] if v is None else v, mask=mask, backend=backend)

    *leaves, dout = given
    return Run(call, tuple(x.detach().clone().requires_grad_() for x in leaves), dout, False)


def of_last_queries(run: Run) -> list[Tensor]:
    """Return the output of the last queries, and the gradients that it gives q, k and v."""
    out = run.call(*run.leaves)[:, -CHECKED:]
    dq, *others = torch.autograd.grad(out, run.leaves, run.dout[:, -CHECKED:])
    return [out.detach(), dq[:, -CHECKED:], *others]


def steps(place: Target, tables: Iterable[Table], work: Iterable[SelectedStep] = STEPS) -> Rows:
    """Yield the microseconds of each decoding step, over selected and over all keys."""
    [table] = tables
    for case in work:
        torch.manual_seed(0)
        q, *keys = case.step.tensors(place.device)
        view, chosen = stored(case.step, keys), masks.selected(case.lists(place.device), case.block_size)
        pairs = {"ours": (CAUSAL & chosen, "torch"), "dense": (CAUSAL, "triton:generic")}
        cells = {}
        with watched(f"{table.name}, {case.step.name}"):
            for name, (mask, check) in pairs.items():
                makers = {
                    backend: partial(partial, cached_attention, q, view, mask=mask, backend=backend)
                    for backend in (place.backend, check)
                }
                taken = compare_calls(place, makers, captured=case.step.calls, checks=(check,))
                cells[name] = attempt(lambda x: x * 1e6, taken[place.backend])
        yield table, Line(case.step.name, cells)
