"""Decoding cases for the benchmark, and caches that store their tokens on pages in random order."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import CAUSAL, FULL, KVCache, KVLayout, KVView, cached_attention
from .cases import Case
from .implementations import implementation
from .peers import flashinfer
from .place import Target

PAGE = 64  # default number of tokens per page
READ = 16 << 30  # a CUDA graph captures enough calls to read about this many bytes
SHELVES = 64  # to shuffle pages, this many sequences take all pages and free them in random order


class Decoding(NamedTuple):
    """A decoding step to time: one new token per sequence, over a cache of ``tokens`` tokens each."""

    name: str
    batch: int
    heads: int
    tokens: int
    layout: KVLayout

    @property
    def calls(self) -> int:
        """The number of calls per graph, large enough to hide the cost of a replay."""
        return max(4, min(200, READ // (self.batch * self.tokens * self.layout.token_bytes)))

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return random queries, and random tensors to store: k and v, or latents and rotary keys."""
        layout, source = self.layout, torch.Generator(device).manual_seed(0)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, device=device, dtype=layout.dtype, generator=source)

        q = random(self.batch, 1, self.heads, layout.dim + layout.rope_dim)
        rows, heads = (self.batch, self.tokens), () if layout.is_latent else (layout.heads,)
        widths = (layout.dim, layout.rope_dim if layout.is_latent else layout.value_dim)
        return q, *(random(*rows, *heads, width) for width in widths)


def cache_for(
    layouts: Sequence[KVLayout],
    batch: int,
    tokens: int,
    page_size: int | None,
    device: torch.device | str,
    mesh: DeviceMesh | None = None,
    **options: object,
) -> KVCache:
    """Return an empty cache for ``batch`` sequences of ``tokens`` tokens.

    Without a page size it is contiguous; otherwise it allocates its pages in random order.
    """
    if page_size is None:
        return KVCache.contiguous(layouts, max_sequences=batch, max_length=tokens, device=device, **options)
    of_all_ranks = page_size * (1 if mesh is None else mesh.size())
    pages, rows = -(-tokens // of_all_ranks), max(batch, SHELVES)
    cache = KVCache.paged(
        layouts,
        pages=batch * pages,
        page_size=page_size,
        max_sequences=rows,
        max_length=pages * of_all_ranks,
        device=device,
        mesh=mesh,
        **options,
    )
    _mix(cache, batch * pages, of_all_ranks, rows)
    return cache


def _mix(cache: KVCache, pages: int, page_size: int, rows: int) -> None:
    """Shuffle the free pages of a cache, so that it allocates them in random order.

    Sequences take all pages and then, in random order, give them back one by one. The cache always
    reuses the page that was freed most recently.
    """
    shelves = cache.admit(rows)
    held = {shelf: (pages // rows + (i < pages % rows)) * page_size for i, shelf in enumerate(shelves)}
    with cache.step(held, replay=True):
        pass  # these tokens are never read
    turns = [shelf for shelf, tokens in held.items() for _ in range(tokens // page_size)]
    Random(0).shuffle(turns)
    for shelf in turns:
        held[shelf] -= page_size
        cache.truncate(shelf, held[shelf])
    cache.release(*shelves)


def stored(
    case: Decoding,
    keys: Sequence[Tensor],
    *,
    page_size: int | None = PAGE,
    store: torch.dtype | None = None,
    batch_invariant: bool = False,
    mesh: DeviceMesh | None = None,
) -> KVView:
    """Store ``keys`` in a new cache, and return its view for a step with one query per sequence."""
    layout, device = replace(case.layout, storage_dtype=store), keys[0].device
    cache = cache_for(
        [layout], case.batch, case.tokens, page_size, device, mesh, batch_invariant=batch_invariant
    )
    cache.admit(case.batch)
    with cache.step(case.tokens) as (layer,):
        layer.append(*keys)
    with cache.read(1) as (layer,):
        return layer.view()


def forked(case: Decoding, keys: Sequence[Tensor]) -> KVView:
    """Return the view of forks of one sequence, which share all tokens except the last.

    The shared tokens are stored only once, and read only once per step.
    """
    cache = cache_for([case.layout], case.batch, case.tokens, PAGE, keys[0].device, shared_prefixes=1)
    [first] = cache.admit()
    with cache.step(case.tokens - 1) as (layer,):
        layer.append(*(x[:1, :-1] for x in keys))
    cache.fork(first, case.batch - 1)
    with cache.step(1) as (layer,):
        return layer.append(*(x[:, -1:] for x in keys))


def copied(case: Decoding, keys: Sequence[Tensor]) -> KVView:
    """Return a view of the same tokens as :func:`forked`, but stored separately for each sequence."""
    repeated = [torch.cat((x[:1, :-1].expand(case.batch, *x[0, :-1].shape), x[:, -1:]), 1) for x in keys]
    return stored(case, repeated)


def ours(place: Target, q: Tensor, fill: Callable[[], KVView]) -> Callable[[], Tensor]:
    """Return a call of attnlib's attention over the cache that ``fill`` creates and fills."""
    view = fill()
    return lambda: cached_attention(q, view, mask=CAUSAL, backend=place.backend)


def peer(place: Target, name: str, case: Decoding, q: Tensor, keys: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a call that decodes the same step with another implementation, chosen by ``name``.

    It is torch's attention over contiguous tensors, FlashInfer, or, for latents only, plain fp32 attention.
    """
    if name == "definition":
        return by_definition(q, *keys)
    if name == "FlashInfer":
        return flashinfer(case.layout, q, keys)
    layout, sizes = case.layout, (case.layout.dim, case.layout.value_dim)
    work = Case(
        case.name, case.batch, case.heads, layout.heads, case.tokens, *sizes, FULL, dtype=layout.dtype
    )
    call = implementation(name, work, place).call
    tensors = [x.transpose(1, 2).contiguous() for x in (q, *keys)]
    return lambda: call(*tensors).transpose(1, 2)


def by_definition(q: Tensor, latent: Tensor, rope: Tensor) -> Callable[[], Tensor]:
    """Return a call that computes attention over latents by definition: in fp32, storing all scores."""

    def one(q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        keys = torch.cat((latent, rope), -1).float()
        return torch.softmax(q.float() @ keys.T * q.shape[-1] ** -0.5, -1) @ latent.float()

    return lambda: torch.stack([one(*x) for x in zip(q, latent, rope, strict=True)]).to(q.dtype)
