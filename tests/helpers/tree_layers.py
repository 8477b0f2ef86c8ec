"""Layers that are trained on trees and on unshared copies, and what both compute."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from tree_cases import EXAMPLE

from attnlib import (
    CAUSAL,
    Axes,
    Gate,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    QueryTemperature,
    Rope,
    masks,
    scores,
    sliding,
)
from attnlib.packing import Tree, tree

HIDDEN, HEADS = 32, 4
LATENT = {"q_lora_rank": None, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 8}
# 48 tokens, which 2 and 4 ranks can share.
SEQUENCES = [*EXAMPLE, [1, 2, 3, 6, *range(10, 27)], [3] * 13]
MADE = tree(SEQUENCES)


def grouped(**options) -> nn.Module:
    options = {"mask": CAUSAL, "rope": Rope(8), "num_kv_heads": 2} | options
    return GroupedQueryAttention(HIDDEN, HEADS, **options)


def latent(rope_dim: int = 4, **options) -> nn.Module:
    rope = Rope(rope_dim, interleaved=True) if rope_dim else None
    options = {"mask": CAUSAL, "rope": rope, "qk_rope_head_dim": rope_dim} | LATENT | options
    return MultiHeadLatentAttention(HIDDEN, HEADS, **options)


def bias() -> nn.Parameter:
    return nn.Parameter(torch.randn(HEADS, 5))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "grouped": lambda: grouped(qk_norm=True),
    "grouped, window": lambda: grouped(mask=sliding(4), gate=Gate("head")),
    "grouped, alibi": lambda: grouped(alibi=True, rope=None, softcap=3.0),
    "grouped, alibi and heads": lambda: grouped(alibi=True, score=scores.distance_bias(bias())),
    "grouped, sinks": lambda: grouped(sinks=True, mask=sliding(6)),
    "grouped, distance score": lambda: grouped(score=scores.distance_bias(bias()), rope=None),
    "grouped, temperature": lambda: grouped(temperature=QueryTemperature(0.5, 2), rope=None),
    "grouped, axes": lambda: grouped(rope=Rope(8, axes=Axes((2, 1, 1), "interleaved"))),
    "grouped, chunks": lambda: grouped(mask=masks.chunked(4)),
    "latent": latent,
    "latent, absorbed": lambda: latent(form="absorbed", mask=sliding(5)),
    "latent, window": lambda: latent(mask=sliding(3), form="expanded"),
    "latent, score": lambda: latent(0, score=scores.distance_bias(bias()), mask=masks.dilated(2)),
}


def make(name: str) -> nn.Module:
    """The same weights in every process, in fp64, none of them special."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    for own, parameter in layer.named_parameters():
        if "norm" in own or own == "sinks":
            nn.init.normal_(parameter)
    layer = layer.double()
    if (
        getattr(layer, "alibi_slopes", None) is not None
    ):  # layers compute the slopes of published models in fp32
        layer.alibi_slopes = nn.Parameter(layer.alibi_slopes.double())
    return layer


def tokens(made: Tree = MADE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(made.tokens), HIDDEN, dtype=torch.float64, generator=generator)


def weight(n: int, rows: Tensor) -> Tensor:
    """The factors of a sequence's output in a loss: other numbers for each copy of a token."""
    generator = torch.Generator().manual_seed(2 + n)
    return torch.randn(len(rows), HIDDEN, dtype=torch.float64, generator=generator)


def douts(made: Tree = MADE) -> Tensor:
    """The gradient of a tree's output in a loss over its sequences."""
    found = torch.zeros(len(made.tokens), HIDDEN, dtype=torch.float64)
    for n, rows in enumerate(made.rows):
        found.index_add_(0, rows, weight(n, rows))
    return found


def of_copies(layer: nn.Module, made: Tree = MADE) -> list[Tensor]:
    """The output of each row, and the gradients of x and of the weights, from unshared copies."""
    layer.zero_grad()
    x, out = tokens(made).requires_grad_(), torch.zeros(len(made.tokens), HIDDEN, dtype=torch.float64)
    for n, rows in enumerate(made.rows):
        if len(rows):
            own = layer(x[rows][None], mask=CAUSAL)[0]
            (own * weight(n, rows)).sum().backward()
            out[rows] = own.detach()
    return [out, x.grad, *(w.grad for w in layer.parameters() if w.requires_grad)]


def trained(layer: nn.Module, x: Tensor, dout: Tensor, options: dict) -> list[Tensor]:
    """The output, and the gradients of x and of the weights."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    out.backward(dout)
    return [out.detach(), x.grad, *(w.grad for w in layer.parameters() if w.requires_grad)]
