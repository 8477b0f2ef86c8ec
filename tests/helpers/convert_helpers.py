"""Layers to convert, hypothesis strategies for them, and ways to permute and rebuild them."""

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from attnlib import CAUSAL, GroupedQueryAttention, KVCache, Rope, sliding
from attnlib.convert.heads.merging import regroup
from attnlib.convert.weights import Heads, join, split
from attnlib.rope.scaling import Llama3Scaling, YaRNScaling

HIDDEN, D = 20, 8
ROPES = {
    "none": None,
    "half": Rope(D),
    "interleaved": Rope(D, interleaved=True),
    "partial": Rope(4),
    "partial-interleaved": Rope(4, interleaved=True),
    "yarn": Rope(D, scaling=YaRNScaling(8.0, 64)),
    "partial-yarn": Rope(4, scaling=YaRNScaling(8.0, 64, mscale=1.0, mscale_all_dim=0.5)),
    "llama3": Rope(D, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
}
SIZES = [(2, 1), (2, 2), (4, 1), (4, 2), (6, 1), (3, 2), (1, 3)]  # KV heads, query heads of each
kinds = st.fixed_dictionaries(
    {
        "size": st.sampled_from(SIZES),
        "rope": st.sampled_from(sorted(ROPES)),
        "bias": st.booleans(),
        "output_bias": st.booleans(),
        "mask": st.sampled_from((CAUSAL, sliding(4))),
    }
)
seeds = st.integers(0, 2**16)


def grouped(size=(4, 1), *, rope="half", seed=0, **options) -> GroupedQueryAttention:
    """A layer with random weights, biases and sinks, fp64 and causal if not said otherwise."""
    g, f = size
    options = {"mask": CAUSAL, "dtype": torch.float64, "head_dim": D} | options
    layer = GroupedQueryAttention(HIDDEN, g * f, num_kv_heads=g, rope=ROPES[rope], **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return layer


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Hidden states ``[*shape, m]`` whose channels are correlated, of very different size, and not of mean
    0.
    """
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64) * torch.logspace(
        0, -3, HIDDEN
    )
    return torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64) @ mix + mix[0]


@torch.no_grad()
def decoded(layer: nn.Module, x: Tensor) -> Tensor:
    """Outputs of a causal layer for nine tokens of two sequences: six at once, then one by one."""
    cache = KVCache.contiguous([layer.kv_layout], max_sequences=2, max_length=16)
    cache.admit(2)
    outs = []
    for part in x.split((6, 1, 1, 1), 1):
        with cache.step(part.shape[1]) as (kv,):
            outs.append(layer(part, kv=kv))
    return torch.cat(outs, 1)


def heads_of(layer: GroupedQueryAttention) -> Heads:
    return split(layer.state_dict(), head_dim=layer.head_dim, rope=layer.rope)


def with_heads(layer: GroupedQueryAttention, heads: Heads) -> GroupedQueryAttention:
    """The layer with other weights of the same shapes, loaded into it."""
    layer.load_state_dict(join(heads, layer.state_dict()))
    return layer


def with_kv(layer: GroupedQueryAttention, **rows: Tensor) -> GroupedQueryAttention:
    """The layer with other heads ``k`` or ``v`` ``[g, d, m + 1]``, loaded into it."""
    heads = heads_of(layer)
    weights = {name: rows.get(name, getattr(heads, name)) for name in ("q", "k", "v", "o")}
    return with_heads(layer, replace(heads, **weights))


def permuted(layer: GroupedQueryAttention, order: list[int]) -> GroupedQueryAttention:
    """The layer with its KV heads in another order, loaded into it."""
    return with_heads(layer, regroup(heads_of(layer), tuple((i,) for i in order)))


def orthogonal(*shape: int, seed: int = 3) -> Tensor:
    """Random orthogonal matrices ``[*shape, d, d]``, given d last."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64))[0]


def phases(*shape: int, seed: int = 4) -> Tensor:
    """Random complex numbers of absolute value 1."""
    angles = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 6.28
    return torch.polar(torch.ones_like(angles), angles)


def close(a: Tensor, b: Tensor, within: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=within, atol=within)


def far(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-3 * b.abs().max())


def state_copy(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items()}
