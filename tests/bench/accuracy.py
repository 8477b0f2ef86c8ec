"""``python tests/bench/accuracy.py``: what a cache of one byte a value does to attention, as a Markdown
table.

One query over 4,096 tokens, the output against fp64 over the values before they were stored, relative, over
16 heads.
"""

from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor

from attnlib import FULL, KVCache, KVLayout, attention, cached_attention

TOKENS, HEADS = 4096, 16
STORES = MappingProxyType({"bf16": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn})


def normal(*shape: int) -> Tensor:
    """What random weights give."""
    return torch.randn(shape)


def outliers(*shape: int) -> Tensor:
    """Eight channels ten times as large as the others, as keys of trained models have."""
    x = torch.randn(shape)
    x[..., :8] *= 10
    return x


def heavy(*shape: int) -> Tensor:
    """Student's t with three degrees of freedom: single values that are much larger than the others of a
    token.
    """
    return torch.distributions.StudentT(3.0).sample(shape)


def error(layout: KVLayout, draw) -> float:
    """Of attention over a cache of this layout, relative to the norm of the output."""
    torch.manual_seed(0)
    k = draw(HEADS, TOKENS, layout.heads, layout.dim)
    rope = torch.randn(HEADS, TOKENS, layout.rope_dim)
    v = k if layout.is_latent else draw(HEADS, TOKENS, layout.heads, layout.value_dim)
    q = torch.randn(HEADS, 1, 1, layout.dim + layout.rope_dim)
    q /= k.square().mean().sqrt()  # scores of about one, whatever the scale of the keys
    whole = torch.cat((k, rope[:, :, None]), -1) if layout.is_latent else k
    exact = attention(q.double(), whole.double(), v.double(), mask=FULL)
    cache = KVCache.contiguous([layout], max_sequences=HEADS, max_length=TOKENS)
    cache.admit(HEADS)
    with torch.no_grad(), cache.step(TOKENS) as (layer,):
        given = (k[:, :, 0], rope) if layout.is_latent else (k, v)
        layer.append(*(x.to(layout.dtype) for x in given))
    with cache.read(1) as (layer,), torch.no_grad():
        out = cached_attention(q.to(layout.dtype), layer.view(), mask=FULL).double()
    return float((out - exact).norm() / exact.norm())


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield f"| relative error | bytes a token | {' | '.join(d.__name__ for d in (normal, outliers, heavy))} |"
    yield "|---|---:|---:|---:|---:|"
    for name, make, sizes in (
        ("d128", KVLayout.grouped, (1, 128)),
        ("latent 512 + 64", KVLayout.latent, (512, 64)),
    ):
        for stored, store in STORES.items():
            # What is computed with is fp32, so that it is storing alone that is measured; bf16 computes in
            # bf16.
            layout = make(*sizes, dtype=torch.float32 if store else torch.bfloat16, storage_dtype=store)
            size = make(*sizes, dtype=torch.bfloat16, storage_dtype=store).token_bytes
            errors = " | ".join(f"{error(layout, draw):.1e}" for draw in (normal, outliers, heavy))
            yield f"| {name}, {stored} | {size} | {errors} |"


if __name__ == "__main__":
    print(*rows(), sep="\n")
