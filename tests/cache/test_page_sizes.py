"""A page may hold any number of tokens: attention over a cache does not depend on it."""

import pytest
import torch

from attnlib import CAUSAL, KVCache, KVLayout, Mask, cached_attention_with_lse, sliding

LAYOUTS = (
    KVLayout.grouped(2, 8, 5, index_dim=3, dtype=torch.float64),
    KVLayout.latent(16, 4, window=600, index_dim=3, index_dtype=torch.float8_e4m3fn, dtype=torch.float64),
)
MASKS = ((CAUSAL, Mask(None, 0, 7)), (sliding(600), sliding(5)))


@torch.no_grad()
def answers(page_size: int | None, backend: str) -> list[torch.Tensor]:
    """Outputs, LSEs and index keys over two sequences that grow past a thousand tokens, in dense and packed
    steps.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"max_sequences": 2, "max_length": 1400}
    if page_size is None:
        cache = KVCache.contiguous(LAYOUTS, **sizes)
    else:
        cache = KVCache.paged(LAYOUTS, pages=2 * -(-1400 // page_size), page_size=page_size, **sizes)
    first, second = cache.admit(2, left_padding=[3, 0])
    found = []
    for tokens in (4, {first: 1250, second: 500}, {second: 700}, 2):
        rows = (2, tokens) if isinstance(tokens, int) else (sum(tokens.values()),)
        with cache.step(tokens) as layers:
            for kv, masks in zip(layers, MASKS, strict=True):
                layout = kv.layout
                widths = ((16,), (4,)) if layout.is_latent else ((2, 8), (2, 5))
                new = [torch.randn(*rows, *x, dtype=torch.float64, generator=generator) for x in widths]
                index = torch.randn(*rows, 1, 3, dtype=torch.float64, generator=generator)
                view = kv.append(*new, index=index)
                keys = view.index_keys()
                found += [keys[row, max(0, n - 600) : n] for row, n in enumerate(view.lengths.tolist())]
                q = torch.randn(
                    *rows, 4, layout.dim + layout.rope_dim, dtype=torch.float64, generator=generator
                )
                last = q[:, -9:] if isinstance(tokens, int) else q
                for mask in masks:
                    found += cached_attention_with_lse(last, view, mask=mask, backend=backend)
    return found


@pytest.mark.parametrize("page_size", [1, 3, 24, 512, 513, 672, 1000])
def test_any_page_size_gives_the_same(page_size):
    for ours, contiguous in zip(answers(page_size, "torch"), answers(None, "torch"), strict=True):
        torch.testing.assert_close(ours, contiguous, rtol=1e-12, atol=1e-12)


def test_the_definition_agrees():
    for ours, defined in zip(answers(672, "torch"), answers(672, "reference"), strict=True):
        torch.testing.assert_close(ours, defined, rtol=1e-12, atol=1e-12)
