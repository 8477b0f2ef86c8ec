"""Decoding benchmarks over full caches: other libraries, MLA, int8 and fp8, forks, and batch invariance."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from .. import KVLayout, KVView
from .compare import APART, attempt, compare_calls
from .peers import present
from .place import Target
from .report import Line, Table
from .speed import Rows
from .stored import Decoding, copied, forked, ours, peer, stored
from .watchdog import watched

ROUGH = 5e-2  # largest relative error allowed for int8 and fp8 caches

MHA, GQA, MQA = (KVLayout.grouped(heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 1))
MLA = KVLayout.latent(512, 64, dtype=torch.bfloat16)
GROUPED = (
    Decoding("GQA 32/8, 1 x 128k", 1, 32, 131072, GQA),
    Decoding("GQA 32/8, 16 x 8k", 16, 32, 8192, GQA),
    Decoding("GQA 32/8, 64 x 8k", 64, 32, 8192, GQA),
    Decoding("GQA 32/8, 128 x 1k", 128, 32, 1024, GQA),
    Decoding("GQA 32/8, 1 x 1k", 1, 32, 1024, GQA),
    Decoding("MHA 32/32, 16 x 8k", 16, 32, 8192, MHA),
    Decoding("MQA 32/1, 64 x 8k", 64, 32, 8192, MQA),
)
LATENT = (
    Decoding("16 heads, 64 x 8k", 64, 16, 8192, MLA),
    Decoding("16 heads, 1 x 64k", 1, 16, 65536, MLA),
    Decoding("128 heads, 1 x 8k", 1, 128, 8192, MLA),
    Decoding("128 heads, 32 x 8k", 32, 128, 8192, MLA),
    Decoding("128 heads, 128 x 8k", 128, 128, 8192, MLA),
)
LATENTS = Decoding("MLA, 16 heads, 64 x 8k", 64, 16, 8192, MLA)
FEWER_BITS = (GROUPED[2], GROUPED[1], LATENTS)
SHARED = (
    Decoding("GQA 32/8, 32 x 16k", 32, 32, 16384, GQA),
    Decoding("MLA, 16 heads, 32 x 16k", 32, 16, 16384, MLA),
)
INVARIANT = (GROUPED[0], GROUPED[1], LATENTS)

# Each column of a table reads a cache that one of these functions has filled.
STORAGES = MappingProxyType(
    {"contiguous": partial(stored, page_size=None)}
    | {f"pages of {size}": partial(stored, page_size=size) for size in (1, 16, 64, 256)}
)
LATENT_STORAGES = MappingProxyType({name: STORAGES[name] for name in ("pages of 64", "contiguous")})
BYTES = MappingProxyType(
    {
        "fp8": partial(stored, store=torch.float8_e4m3fn),
        "int8": partial(stored, store=torch.int8),
        "bf16": stored,
    }
)
FORKS = MappingProxyType({"forked": forked, "stored apart": copied})
BATCHES = MappingProxyType({"batch-invariant": partial(stored, batch_invariant=True), "usual": stored})


def rows(
    place: Target,
    tables: Sequence[Table],
    work: Iterable[Decoding],
    fills: Mapping[str, Callable[..., KVView]],
    *,
    peers: Sequence[str] = (),
    checks: Sequence[str] = (),
    bound: float = APART,
) -> Rows:
    """Yield a table row for each case: the time of one decoding call for each kind of cache, in microseconds.

    Other libraries read their own tensors or pages.
    """
    for case in work:
        q, *keys = case.tensors(place.device)
        makers = {name: partial(ours, place, q, partial(fill, case, keys)) for name, fill in fills.items()}
        makers |= {name: partial(peer, place, name, case, q, keys) for name in (*present(peers), *checks)}
        mine = list(makers)[: tables[0].ours]
        with watched(f"{tables[0].name}, {case.name}"):
            seconds = compare_calls(place, makers, captured=case.calls, ours=mine, checks=checks, bound=bound)
        yield tables[0], Line(case.name, {name: attempt(lambda x: x * 1e6, x) for name, x in seconds.items()})
