"""Decoding over full caches: against torch's attentions, over latents, in fewer bits, of forks, in mixed steps."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..cache.layout import KVLayout
from .place import Place
from .race import Failure
from .replays import race
from .report import Cells, Claim, Row, Table
from .speed import Rows
from .stored import Decoding, apart, by_definition, copied, forked, ours, peer, stored, together

PAGES = (1, 16, 64, 256)
PEERS = ("cuDNN", "FA2", "Flex")
ROUGH = 5e-2  # relative norm of what storing in a byte changes

MHA, GQA, MQA = (KVLayout.grouped(heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 1))
MLA = KVLayout.latent(512, 64, dtype=torch.bfloat16)
GROUPED = (
    Decoding("GQA 32/8, 1 x 128k", 1, 32, 131072, GQA),
    Decoding("GQA 32/8, 16 x 8k", 16, 32, 8192, GQA),
    Decoding("GQA 32/8, 64 x 8k", 64, 32, 8192, GQA),
    Decoding("GQA 32/8, 128 x 1k", 128, 32, 1024, GQA),
    Decoding("GQA 32/8, 1 x 1k", 1, 32, 1024, GQA, asked=10),
    Decoding("MHA 32/32, 16 x 8k", 16, 32, 8192, MHA),
    Decoding("MQA 32/1, 64 x 8k", 64, 32, 8192, MQA),
)
LATENT = (
    Decoding("16 heads, 64 x 8k", 64, 16, 8192, MLA, asked=190),
    Decoding("16 heads, 1 x 64k", 1, 16, 65536, MLA, asked=45),
    Decoding("128 heads, 1 x 8k", 1, 128, 8192, MLA, asked=24),
    Decoding("128 heads, 32 x 8k", 32, 128, 8192, MLA, asked=280),
    Decoding("128 heads, 128 x 8k", 128, 128, 8192, MLA, asked=1050),
)
# Each with how many times faster than bf16 it was asked to be.
FEWER_BITS = (
    (Decoding("GQA 32/8, 64 x 8k", 64, 32, 8192, GQA), 1.6),
    (Decoding("GQA 32/8, 16 x 8k", 16, 32, 8192, GQA), 1.6),
    (Decoding("MLA, 16 heads, 64 x 8k", 64, 16, 8192, MLA), 1.4),
)
STORES = (("fp8", torch.float8_e4m3fn), ("int8", torch.int8), ("bf16", None))
SHARED = (
    Decoding("GQA 32/8, 32 x 16k", 32, 32, 16384, GQA),
    Decoding("MLA, 16 heads, 32 x 16k", 32, 16, 16384, MLA),
)
# Each with the new tokens of one of its sequences; the others have one.
MIXED = (
    (Decoding("GQA 32/8, 64 x 4k", 64, 32, 4096, GQA), 256),
    (Decoding("GQA 32/8, 8 x 32k", 8, 32, 32768, GQA), 9),
    (Decoding("GQA 32/8, 8 x 32k", 8, 32, 32768, GQA), 100),
    (Decoding("MLA, 16 heads, 64 x 4k", 64, 16, 4096, MLA), 256),
)
INVARIANT = (GROUPED[0], GROUPED[1], Decoding("MLA, 16 heads, 64 x 8k", 64, 16, 8192, MLA))


def storage(page_size: int | None) -> str:
    """The column of a page size, None for contiguous storage."""
    return "contiguous" if page_size is None else f"pages of {page_size}"


def grouped(
    place: Place,
    tables: Sequence[Table],
    work: Iterable[Decoding] = GROUPED,
    pages: Sequence[int] = PAGES,
    peers: Sequence[str] = PEERS,
) -> Rows:
    """Contiguous and paged caches against torch's attentions over plain tensors."""
    sizes = (None, *pages)
    bounds = {storage(size): 0.9 if size is None else 0.75 if size < 16 else 0.88 for size in sizes}
    for case in work:
        yield from _rows(tables, case, _against_peers(place, case, sizes, peers), bounds)


def _against_peers(place: Place, case: Decoding, sizes: Sequence[int | None], peers: Sequence[str]) -> Cells:
    q, keys = case.tensors(place.device)
    makers = {storage(size): partial(ours, place, q, partial(stored, case, keys, size)) for size in sizes}
    mine = tuple(makers)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, *keys)]
    makers |= {name: partial(peer, place, name, case, heads_first) for name in peers}
    return race(place, makers, calls=case.calls, ours=mine)


def latent(place: Place, tables: Sequence[Table], work: Iterable[Decoding] = LATENT, page_size: int = 64) -> Rows:
    """Absorbed MLA, whose keys are their own values; torch has nothing to compare it with."""
    for case in work:
        q, keys = case.tensors(place.device)
        sizes = (page_size, None)
        makers = {storage(size): partial(ours, place, q, partial(stored, case, keys, size)) for size in sizes}
        mine = tuple(makers)
        makers["definition"] = partial(by_definition, q, *keys)
        yield from _rows(tables, case, race(place, makers, calls=case.calls, ours=mine, judges=("definition",)))


def fewer_bits(place: Place, tables: Sequence[Table], work=FEWER_BITS, page_size: int = 64) -> Rows:
    """Caches that keep a byte a value against bf16."""
    for case, least in work:
        q, keys = case.tensors(place.device)
        layouts = {name: replace(case.layout, store=store) for name, store in STORES}
        makers = {
            name: partial(ours, place, q, partial(stored, case._replace(layout=layout), keys, page_size))
            for name, layout in layouts.items()
        }
        seconds = race(place, makers, calls=case.calls, ours=("fp8", "int8"), bound=ROUGH)
        yield from _rows(tables, case, seconds, {"fp8": least, "int8": least})


def shared(place: Place, tables: Sequence[Table], work: Iterable[Decoding] = SHARED, page_size: int = 64) -> Rows:
    """Sequences forked from one prompt against as many that store it each; every one has a last token of its own."""
    for case in work:
        q, keys = case.tensors(place.device)
        ways = {"forked": forked, "stored apart": copied}
        makers = {name: partial(ours, place, q, partial(fill, case, keys, page_size)) for name, fill in ways.items()}
        yield from _rows(tables, case, race(place, makers, calls=case.calls))


def mixed(place: Place, tables: Sequence[Table], work=MIXED, page_size: int = 64) -> Rows:
    """A piece of one prompt in one step with single tokens of others, against a call for each of both."""
    for case, count in work:
        q, keys = case.tensors(place.device)
        source = torch.Generator(place.device).manual_seed(1)
        prompt = torch.randn(count, *q.shape[2:], device=place.device, dtype=q.dtype, generator=source)
        packed = torch.cat((q[:-1, 0], prompt))
        ways = {"one call": together, "two calls": apart}
        makers = {name: partial(way, place, case, packed, keys, page_size) for name, way in ways.items()}
        named = case._replace(name=f"{case.name}, a prompt of {count}")
        yield from _rows(tables, named, race(place, makers, calls=case.calls))


def invariant(place: Place, tables: Sequence[Table], work=INVARIANT, page_size: int = 64) -> Rows:
    """Batch-invariant caches against others."""
    for case in work:
        q, keys = case.tensors(place.device)
        kinds = {"batch-invariant": True, "usual": False}
        makers = {
            name: partial(ours, place, q, partial(stored, case, keys, page_size, batch_invariant=kind))
            for name, kind in kinds.items()
        }
        yield from _rows(tables, case._replace(asked=None), race(place, makers, calls=case.calls))


def _rows(tables: Sequence[Table], case: Decoding, seconds: Cells, bounds: dict[str, float] | None = None) -> Iterator:
    """A row of each table: microseconds with what was asked of them, or a rate."""
    for table in tables:
        cells = {c: x if isinstance(x, Failure) else _in_units(table, case, x) for c, x in seconds.items()}
        claim = None if table.more_is_better else _tightest(table, case, cells, bounds or {})
        yield table, Row(case.name, cells, claim)


def _in_units(table: Table, case: Decoding, seconds: float) -> float:
    if table.unit == "us":
        return seconds * 1e6
    return (case.flops / 1e12 if table.unit == "TFLOP/s" else case.bytes / 1e9) / seconds


def _tightest(table: Table, case: Decoding, cells: Cells, bounds: dict[str, float]) -> Claim | None:
    """Of all that was asked, what has the least room: leads over the best other column, and microseconds."""
    leads = {c: table.lead(cells, c, table.best(cells)) for c in bounds if c in cells}
    claims = [Claim(lead, bounds[c], of=c) for c, lead in leads.items() if lead is not None]
    if case.asked is not None:
        mine = {c: x for c, x in list(cells.items())[: table.ours] if not isinstance(x, Failure)}
        claims += [Claim(x, case.asked, most=True, unit=" us", of=c) for c, x in mine.items()]
    return min(claims, key=lambda claim: claim.room, default=None)
