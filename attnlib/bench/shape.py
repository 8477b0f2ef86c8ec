"""Time one attention call of your own: ``python -m attnlib bench --shape b,h,g,s,d``."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from .. import CAUSAL, FULL, Mask, sliding
from . import tables
from .cases import Case
from .compare import Failure, attempt
from .peers import present
from .place import Target
from .report import Line, Table
from .speed import Column, compare
from .watchdog import watched

SHAPE = "b,h,g,s,d"  # batch, query heads, KV heads, tokens, and channels or key/value channels
MASKS = "causal, full, sliding:WINDOW or prefix:TOKENS"
DTYPES = ("bfloat16", "float16", "float32")
PEERS = ("cuDNN", "FA2", "efficient", "Flex", "FA4")
# eager stores all scores, several times over if there are gradients. Above 1 GiB of fp32, leave it out.
SCORES = 1 << 28


def case_of(shape: str, mask: str, dtype: torch.dtype) -> Case:
    """Return the case that the options describe: ``shape`` is "b,h,g,s,d" or "b,h,g,s,d/dv".

    Raises:
        ValueError: the shape or the mask cannot be read, or h is not a multiple of g.
    """
    *counts, channels = shape.split(",")
    counts += channels.split("/")
    if len(counts) not in (5, 6) or not all(n.strip().isdecimal() and int(n) > 0 for n in counts):
        raise ValueError(f"--shape: expected {SHAPE}, such as 2,32,8,4096,128, or 192/128 for d, got {shape}")
    batch, heads, kv_heads, tokens, dim, value_dim = map(int, [*counts, counts[-1]][:6])
    if heads % kv_heads:
        raise ValueError(f"--shape: expected query heads h that are a multiple of g={kv_heads}, got {heads}")
    name = f"{shape}, {mask}, {str(dtype).removeprefix('torch.')}"
    return Case(name, batch, heads, kv_heads, tokens, dim, value_dim, mask_of(mask), dtype=dtype)


def mask_of(text: str) -> Mask:
    """Return the mask for a text such as "causal" or "sliding:1024".

    Raises:
        ValueError: the text names no mask.
    """
    kind, colon, number = text.partition(":")
    if not colon and kind in ("causal", "full"):
        return CAUSAL if kind == "causal" else FULL
    if kind in ("sliding", "prefix") and number.isdecimal() and int(number) > 0:
        return sliding(int(number)) if kind == "sliding" else Mask(right=0, prefix=int(number))
    raise ValueError(f"--mask: expected {MASKS}, got {text}")


def columns(case: Case, place: Target) -> list[Column]:
    """Return a column for attnlib and for each implementation that might run the case on this device."""
    names = {"SDPA": "transposed", "Flex": "Flex"}
    if place.device == "cuda":
        names = {name: name for name in present(PEERS)} | {"SDPA": "SDPA"}
    if case.batch * case.heads * case.tokens**2 <= SCORES:
        names["eager"] = "eager"
    return [Column(column, name, case) for column, name in {"ours": "ours", **names}.items()]


def rows(place: Target, case: Case, whats: Iterable[str]) -> Iterator[Line]:
    """Yield a row for each of ``whats`` ("inference", "forward", "backward" or "both"), in milliseconds."""
    # On a CPU nothing hangs, and long calls take minutes.
    with watched(case.name) if place.device == "cuda" else nullcontext():
        taken = compare(place, columns(case, place), whats)
    for what, seconds in taken.items():
        label = "forward + backward" if what == "both" else what
        yield Line(label, {name: attempt(lambda x: x * 1e3, x) for name, x in seconds.items()})


def verdict(table: Table, row: Line) -> str:
    """Return a sentence that compares attnlib with the fastest other implementation of the row."""
    best, ours = table.best(row.cells), row.cells["ours"]
    if isinstance(ours, Failure):
        return f"{row.name}: attnlib has no result ({ours})"
    if not best:
        return f"{row.name}: no other implementation ran this call, so nothing checked attnlib's result"
    ratio = row.cells[best] / ours
    return f"{row.name}: attnlib runs at {ratio:.2f}x the speed of {best}, the fastest other implementation"


def run(place: Target, case: Case, folder: Path, command: str, *, backward: bool = False) -> int:
    """Time the case and print a table and its verdict; return 1 if attnlib failed, else 0."""
    table = Table("shape", case.name, "ms")
    whats, found = ("forward", "backward", "both") if backward else ("inference",), []

    def fill(place: Target, filled: Sequence[Table]) -> Iterator[tuple[Table, Line]]:
        for row in rows(place, case, whats):
            found.append(row)
            yield filled[0], row

    code = tables.run(place, (tables.TableEntry(fill, table),), folder, command)
    print(*(verdict(table, row) for row in found), sep="\n")
    return code
