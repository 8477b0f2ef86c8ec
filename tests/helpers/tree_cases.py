"""Trees of sequences: their definition with a dict, options of calls, and attention over unshared copies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from attnlib import CAUSAL, Mask, ScoreFunction, attention_with_lse, mask_mod, masks, scores, sliding
from attnlib.masks.band import AnyMask
from attnlib.packing import Tree, tree

# Lists of sequences: many shared prefixes, roots that differ, duplicates and empty ones.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=8)
# A prompt, answers, one with turns of its own, a duplicate, a prefix, nothing, and another root.
EXAMPLE = [
    [1, 2, 3, 4, 5],
    [1, 2, 3, 6],
    [1, 2, 3, 6, 7, 8, 9],
    [1, 2, 3, 6, 7, 5],
    [1, 2, 3, 4, 5],
    [1, 2],
    [],
    [2, 2, 1],
    [2, 4, 4, 4, 4, 4],
]


def drawn_sequences(number: Callable[[int], int], longest: int) -> list[list[int]]:
    """Sequences that branch at random from earlier ones; ``number(n)`` draws from 0 to n."""
    found: list[list[int]] = []
    for _ in range(1 + number(5)):
        source = found[number(len(found) - 1)] if found and number(4) else []
        found.append([*source[: number(len(source))], *(number(2) for _ in range(number(longest)))])
    return found


def by_dict(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    """Tokens, depths, ends and rows of a tree, from nested dicts."""
    root: dict = {}
    for sequence in sequences:
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    tokens, depths, ends, rows = [], [], [], {}

    def visit(node: dict, path: tuple[int, ...]) -> None:
        for token, child in node.items():
            rows[(*path, token)] = len(tokens)
            tokens.append(token)
            depths.append(len(path))
            ends.append(None)
            visit(child, (*path, token))
            ends[rows[(*path, token)]] = len(tokens)

    visit(root, ())
    at = [[rows[tuple(x[: n + 1])] for n in range(len(x))] for x in sequences]
    return tokens, depths, ends, at


def ancestors(made: Tree) -> Tensor:
    """Bool ``[t, t]``: a token sees the rows of every sequence through it, up to itself."""
    t = len(made.tokens)
    seen = torch.zeros(t, t, dtype=torch.bool)
    for rows in made.rows:
        for n, row in enumerate(rows.tolist()):
            seen[row, rows[: n + 1]] = True
    return seen


def trees(*every: Sequence[Sequence[int]]) -> tuple[list[Tree], Tensor, Tensor]:
    """The tree of each list of sequences, and ends and positions ``[b, t]`` with padding."""
    made = [tree(x) for x in every]
    t = max(len(x.tokens) for x in made)
    ends, positions = torch.zeros(len(made), t, dtype=torch.int32), torch.full((len(made), t), 99)
    for n, x in enumerate(made):
        ends[n, : len(x.ends)], positions[n, : len(x.ends)] = x.ends, x.positions
    return made, ends, positions


class Options(NamedTuple):
    """What is combined with a tree and passed to its call: functions of the leaves that learn."""

    leaves: Callable[[], list[Tensor]] = list
    mask: AnyMask = CAUSAL
    score: Callable[..., ScoreFunction] | None = None
    alibi: bool = False
    sinks: bool = False
    softcap: float | None = None

    def arguments(self, leaves: list[Tensor]) -> dict:
        found = {} if self.softcap is None else {"softcap": self.softcap}
        if self.score is not None:
            found["score"] = self.score(leaves[0])
        if self.alibi:
            found["alibi_slopes"] = leaves[-1]
        if self.sinks:
            found["sinks"] = leaves[-1]
        return found


def leaf(*shape: int) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape, dtype=torch.float64, requires_grad=True)]


def faded(score, b, h, i, j, rate):
    return score - torch.exp(rate[h]) * (i - j).float().sqrt() + 0.01 * i


HEADS = 4
OPTIONS = {
    "plain": Options(),
    "a window": Options(mask=sliding(3)),
    "two windows": Options(mask=Mask(left=4, right=2) & sliding(5)),
    "keys before": Options(mask=CAUSAL.shift(-1)),
    "a prefix": Options(mask=Mask(right=-2, prefix=2)),
    "a stride": Options(mask=masks.dilated(2) & sliding(5)),
    "either": Options(mask=sliding(2) | masks.dilated(3)),
    "chunks": Options(mask=masks.chunked(3)),
    "alibi": Options(leaf(HEADS), alibi=True),
    "sinks": Options(leaf(HEADS), mask=sliding(4), sinks=True, softcap=2.0),
    "a distance bias": Options(leaf(HEADS, 3), score=scores.distance_bias),
    "a function": Options(leaf(HEADS), score=lambda x: scores.score_mod(faded, x), softcap=3.0),
    "alibi and a bias": Options(
        lambda: leaf(HEADS, 3)() + leaf(HEADS)(), sliding(6), scores.distance_bias, alibi=True
    ),
}


def copies(made: Tree, qkv: Sequence[Tensor], options: Options, leaves: list[Tensor]) -> list[Tensor]:
    """Output ``[len, h, e]`` and LSE ``[h, len]`` of each sequence by itself, for a tree's q, k and v."""
    found = []
    for rows in made.rows:
        own = (x[rows][None] for x in qkv)
        arguments = options.arguments(leaves)
        out, lse = attention_with_lse(*own, mask=options.mask & CAUSAL, **arguments, backend="reference")
        found += [out[0], lse[0]]
    return found


def merged_loss(found: Sequence[Tensor]) -> Tensor:
    """A number that depends on every visible result."""
    return sum(x[x > -torch.inf].sin().sum() * (n + 1) for n, x in enumerate(found))


def qkv(t: int, kv_heads: int = 2) -> list[Tensor]:
    shapes = ((t, HEADS, 8), (t, kv_heads, 8), (t, kv_heads, 6))
    return [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]


def learned(layer: nn.Module) -> list[nn.Parameter]:
    return [x for x in layer.parameters() if x.requires_grad]


def halved(b, h, i, j, kept):
    return kept[b, j] > 0


ROWS_ONLY = mask_mod(halved, torch.ones(9, 99))
