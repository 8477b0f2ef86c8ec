"""Batch-invariant caches: the bits of a sequence, whatever shares its steps and however its tokens come."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from helpers import assert_same_bits
from kernel_helpers import DEVICE, INTERPRETED
from torch import Tensor

from attnlib import CAUSAL, KVCache, KVLayout, Mask, sliding
from attnlib import cached_attention_with_lse as attend
from attnlib.backends._triton.decode import operators as triton_cached
from attnlib.backends._triton.decode import tables as decode_tables
from attnlib.backends._triton.launching.config import LaunchConfig
from attnlib.cache import buffer

if INTERPRETED:
    LENGTH, DTYPE, PAGE = 58, torch.float16, 4
    CASES = (
        (KVLayout.grouped(2, 16, dtype=DTYPE, window=40), sliding(40), {"sinks": 4, "softcap": 5.0}),
        (KVLayout.latent(32, 8, dtype=DTYPE, storage_dtype=torch.int8), CAUSAL, {}),
    )
else:
    LENGTH, DTYPE, PAGE = 2600, torch.bfloat16, 16
    CASES = (
        (KVLayout.grouped(2, 128, dtype=DTYPE), CAUSAL, {}),
        (KVLayout.grouped(1, 128, dtype=DTYPE, window=1500), sliding(1500), {"sinks": 4, "softcap": 5.0}),
        (KVLayout.grouped(2, 64, dtype=torch.float16, storage_dtype=torch.int8), CAUSAL, {"sinks": 8}),
        (KVLayout.grouped(1, 256, dtype=DTYPE), Mask(None, -3), {}),
        (KVLayout.latent(512, 64, dtype=DTYPE), CAUSAL, {}),
        (KVLayout.latent(512, 64, dtype=DTYPE, storage_dtype=torch.float8_e4m3fn), CAUSAL, {}),
        (KVLayout.grouped(2, 64, dtype=torch.float32), CAUSAL, {}),
    )


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """On the interpreter, splits and tiles that short sequences fill."""
    if INTERPRETED:
        monkeypatch.setattr(buffer, "MIN_SPLIT_SIZE", 32)
        monkeypatch.setattr(decode_tables, "fixed", lambda case: LaunchConfig(16, 16, 2, 4))


def test_a_schedule_of_other_splits_is_not_used():
    """It would have other slots than the kernels count with."""
    layout = KVLayout.grouped(1, 16)
    for invariant in (False, True):
        cache = KVCache.contiguous(
            [layout], max_sequences=2, max_length=2048, batch_invariant=invariant, device=DEVICE
        )
        cache.admit()
        with cache.read(1) as (layer,):
            view = layer.view()
            assert (triton_cached._schedule_of(view) is None) == (view.schedule is None)
            assert triton_cached._schedule_of(replace(view, split_size=0 if invariant else 1024)) is None


def steps(rng: Random, length: int, most: int) -> Iterator[int]:
    """Counts of new tokens that add up to ``length``."""
    while length:
        count = min(length, rng.choice((1, 2, 17, most)))
        yield count
        length -= count


@torch.no_grad()
def decoded(
    layout: KVLayout, mask: Mask, options: dict, ours: list[Tensor], rng: Random | None
) -> list[Tensor]:
    """Output and LSE of the tokens ``ours``, ``(k, v, q)``: in one step and alone, or in random ones with
    others.
    """
    cache = KVCache.paged(
        [layout], pages=64 * LENGTH // PAGE, page_size=PAGE, max_sequences=9, max_length=LENGTH,
        batch_invariant=True, device=DEVICE,
    )  # fmt: skip
    (handle, *others), at, results = cache.admit(9 if rng else 1), 0, []
    for count in steps(rng, LENGTH, LENGTH // 3) if rng else (LENGTH,):
        tokens = {handle: count}
        for other in rng.sample(others, rng.choice((0, 1, 8))) if rng else ():
            tokens[other] = min(rng.choice((1, 5, 33)), LENGTH - cache.length(other))
        order = rng.sample(list(tokens), len(tokens)) if rng else [handle]
        tokens, first = (
            {name: tokens[name] for name in order},
            sum(tokens[x] for x in order[: order.index(handle)]),
        )
        mine = slice(first, first + count)
        with cache.step(tokens) as (layer,):
            packed = [
                torch.randn(sum(tokens.values()), *x.shape[1:], device=DEVICE).to(x.dtype) for x in ours
            ]
            for x, known in zip(packed, ours, strict=True):
                x[mine] = known[at : at + count]
            k, v, q = (x.squeeze(1) if layout.is_latent and n < 2 else x for n, x in enumerate(packed))
            out, lse = attend(q, layer.append(k, v), mask=mask, backend="triton", **options)
            results.append((out[mine].float(), lse[:, mine].T[..., None]))
        at += count
    return [torch.cat(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("layout", "mask", "options"), CASES, ids=lambda x: str(x) if isinstance(x, Mask) else None
)
def test_bits_depend_on_the_sequence_alone(layout, mask, options):
    torch.manual_seed(0)
    heads = 16 if layout.is_latent else 4 * layout.heads
    shapes = (
        (layout.heads, layout.dim),
        (layout.heads, layout.rope_dim or layout.value_dim),
        (heads, layout.dim + layout.rope_dim),
    )
    ours = [torch.randn(LENGTH, *shape, device=DEVICE).to(layout.dtype) for shape in shapes]
    options = options | ({"sinks": torch.randn(heads, device=DEVICE)} if "sinks" in options else {})
    alone = decoded(layout, mask, options, ours, None)
    for seed in range(1 if INTERPRETED else 4):
        again = decoded(layout, mask, options, ours, Random(seed))
        if INTERPRETED:  # where a row lies in a tile decides how numpy adds its products up
            torch.testing.assert_close(again, alone, rtol=2e-3, atol=1e-3)
        else:
            assert_same_bits(*zip(again, alone, strict=True))
