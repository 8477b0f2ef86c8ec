"""Calls over sequences that ranks share, the same in every process."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, attention, masks, scores, sliding, varlen_attention
from attnlib.masks.band import AnyMask

TOKENS, HEADS, CHANNELS = 48, 4, 8
PACK = (0, 11, 11, 30, 43)  # where sequences of a pack begin and end; the last tokens belong to none


class Case(NamedTuple):
    """What a call takes besides q, k and v, and in which of the options a gradient flows."""

    name: str
    mask: AnyMask
    options: Mapping[str, Any] = MappingProxyType({})
    learns: tuple[str, ...] = ()
    kv_heads: int = HEADS


def cases() -> list[Case]:
    """Every kind of mask and option, over sequences side by side."""
    torch.manual_seed(1)
    document = torch.randint(0, 4, (2, TOKENS)).sort().values
    slopes, sinks, table = torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS, 9)
    bounds = {"key_starts": torch.tensor([3, 0]).int(), "key_ends": torch.tensor([40, 48]).int()}
    return [
        Case("full", FULL),
        Case("causal", CAUSAL, {"softcap": 3.0, "sinks": sinks}, ("sinks",)),
        Case("grouped", CAUSAL, kv_heads=1),
        Case("window", sliding(7), {"alibi_slopes": slopes}, ("alibi_slopes",)),
        Case("slopes", CAUSAL, {"alibi_slopes": slopes.expand(2, HEADS) + 0.1}, ("alibi_slopes",)),
        Case("both ways", Mask(5, 3)),
        Case("far", Mask(30, -9)),
        Case("prefix", Mask(None, 0, prefix=20), {"scale": 0.3}),
        Case("shifted", CAUSAL.shift(-3)),
        Case("ahead", CAUSAL.shift(5)),
        Case("documents", CAUSAL & masks.documents(document)),
        Case("packed documents", CAUSAL & masks.documents_of(torch.tensor(PACK).int(), TOKENS), kv_heads=2),
        Case("tiles", (CAUSAL & masks.dilated(2)).block_mask(2, HEADS, TOKENS, TOKENS, device="cpu")),
        Case("scores", CAUSAL & masks.dilated(2), {"score": table}, ("score",)),
        Case("bounds", CAUSAL, bounds),
        Case("bounded window", sliding(9), bounds),
        Case("dropout", CAUSAL, {"dropout_p": 0.3, "dropout_seed": torch.tensor([5])}),
    ]


def packs() -> list[Case]:
    """The same over packed sequences, some of them empty or cut by what ranks have."""
    torch.manual_seed(2)
    slopes, sinks, table = torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS, 9)
    return [
        Case("packed full", FULL),
        Case("packed causal", CAUSAL, {"sinks": sinks}, ("sinks",)),
        Case("packed window", sliding(5), {"alibi_slopes": slopes}, ("alibi_slopes",), 2),
        Case("packed both ways", Mask(4, 2)),
        Case("packed prefix", Mask(None, 0, prefix=6)),
        Case("packed scores", CAUSAL & masks.dilated(2), {"score": table}, ("score",)),
        Case("packed dropout", CAUSAL, {"dropout_p": 0.3, "dropout_seed": torch.tensor([5])}),
    ]


def tensors(case: Case, *, packed: bool) -> tuple[list[Tensor], Tensor]:
    """q, k and v of the whole sequence, with gradients, and the gradient of the output."""
    torch.manual_seed(3)
    batch = () if packed else (2,)
    shapes = [(*batch, TOKENS, heads, CHANNELS) for heads in (HEADS, case.kv_heads, case.kv_heads)]
    if case.name == "packed documents":
        shapes = [(1, *shape[1:]) for shape in shapes]
    return [torch.randn(shape, requires_grad=True) for shape in shapes], torch.randn(shapes[0])


def learning(case: Case) -> tuple[dict[str, Any], list[Tensor]]:
    """The options of a call, new leaves where a gradient flows, and these leaves."""
    options, leaves = dict(case.options), []
    for name in case.learns:
        leaf = options[name].clone().requires_grad_()
        leaves.append(leaf)
        options[name] = scores.distance_bias(leaf) if name == "score" else leaf
    return options, leaves


def whole(case: Case, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *, packed: bool) -> Tensor:
    """What one process computes."""
    if not packed:
        return attention(q, k, v, mask=case.mask, **options)
    cu = torch.tensor(PACK, dtype=torch.int32)
    return varlen_attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=case.mask, **options)
