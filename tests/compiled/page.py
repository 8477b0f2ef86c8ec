"""docs/compiled.md: what of a chip each kernel takes, written, read, and compared with what it takes now."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from .cached_builds import AnyBuild, CachedBuild
from .chipless import CHIPS, Binary

PAGE = "docs/compiled.md"
SLACK = 16  # bytes that a thread may spill beyond the page: changes that matter move more
WORST = 12  # builds named of those that spill most
PAIRS = "### Flags in pairs"  # what ends the tables that later runs compare with
ABSENT = "not built"  # a kernel that the newest Triton has, and this one does not
COLUMNS = """\
| kernel and call | chip | tiles | registers | spilled, bytes | shared, KiB | per SM |
|---|---|---|---:|---:|---:|---:|
"""
INTRODUCTION = f"""\
---
orphan: true
---
# Compiled kernels

`make compile-check` compiles the kernels for chips that need not be there, with each Triton below, and writes
this page: what each entry of the launch tables takes with the newest, and where that is something else with
the others; and which kernels spill most of those for calls in which any two of these meet: chip, head, dtype,
mask, padding or packing, softcap, slopes, sinks, dropout, a gradient of the LSE, length. For caches these are
chip, layer, dtype, store, page size, batch, new tokens, packing, mask and flags, and every kind of call is
built for every chip. `make compile-quick`, in CI, compiles the tables' entries alone, and fails where one
does not compile, does not fit, reads a register that ptxas never wrote, spills over {SLACK} bytes more than
here, or leaves an SM fewer programs at once and spills no less.

Registers and spilled bytes are a thread's (the size of a stack that holds nothing else), shared memory is a
program's; `per SM` is how many programs an SM has room for.

Kernels of Hopper's own, whose calls say `Hopper`, have warps that load beside warps that multiply: tiles say
all of them, and the slots for keys and for values. Registers are those at the launch; warps that load then
give theirs to those that multiply. The check reads the loops of each: a trip without masking has the matrix
instructions of its two products and no more, waits for them as often as it should, has its exponentials
before the wait for the product that they run under, and leaves the stack alone, but for the entries of
`SPILLING` in `tests/compiled/loops.py`. What else they spill, they spill outside such trips: in a tile's
first and last block, or where one is masked or done again.

Calls over caches (`decode`, then `combine` for splits of sequences, which `schedule` cuts; `write` stores
tokens) say query heads x channels of a stored key and value, `32 x d128`, with four query heads to a KV head,
or those of a latent and its rotary key, `16 x d512+64`. They are of 16 sequences with one new token each,
over pages of 64 tokens, but where they say otherwise. Tiles are rows of queries x keys; of `combine` splits x
channels, of `schedule` sequences x splits.
"""

Built = Mapping[AnyBuild, Binary | BaseException]


class Committed(NamedTuple):
    """What the page says of a build."""

    tiles: str
    spilled: int
    resident: int


def shortfall(build: AnyBuild, result: Binary | BaseException) -> str:
    """Why a build can never run, or must not, or nothing."""
    if isinstance(result, BaseException):
        text = " ".join(str(result).split()).replace("|", "/")
        return f"does not compile: {type(result).__name__}: {text[-200:]}"
    most = CHIPS[build.arch].shared - 1
    if result.shared > most << 10:
        return f"takes {result.shared / 1024:.1f} KiB of shared memory, of at most {most}"
    if result.lost:
        return f"reads what ptxas never wrote: {result.lost[0]}"
    if result.reused:
        return f"has a barrier where other things lie: {result.reused[0]}"
    if result.disorder:
        return "; ".join(result.disorder)
    return ""


def regressions(built: Built, expected: Mapping[tuple[str, str], Committed]) -> list[str]:
    """Where what was built is worse than the page, or the page is about something else."""
    found = []
    for build, result in built.items():
        if shortfall(build, result):
            continue
        was, name, now = expected.get(_key(build)), " on ".join(_key(build)), result.resident(build.arch)
        if was is None:
            found.append(f"{name} is not in {PAGE}")
        elif was.tiles != result.tiles:
            found.append(f"{name} has tiles of {result.tiles}; expected {was.tiles}, as {PAGE} says")
        elif result.spilled > was.spilled + SLACK:
            found.append(
                f"{name} spills {result.spilled} bytes; expected {was.spilled}, as {PAGE} says, or {SLACK} "
                "more"
            )
        elif now < was.resident and result.spilled >= was.spilled:
            found.append(
                f"{name} leaves an SM {now} programs at once; expected {was.resident}, as {PAGE} says"
            )
    known = {_key(build) for build in built}
    return found + [
        f"{' on '.join(key)} is in {PAGE} and was not built" for key in expected if key not in known
    ]


def section(tables: Built, more: Built) -> str:
    """What the page says of one Triton: of the tables' entries, and of all else that was built."""
    cached = {build: result for build, result in more.items() if isinstance(build, CachedBuild)}
    pairs = {build: result for build, result in more.items() if build not in cached}
    parts = ["### Launch tables", _table(tables)]
    if more:
        parts += [PAIRS, *_summary(pairs), "### More calls over caches", *_summary(cached)]
    return "\n".join(f"{part.strip()}\n" for part in parts)


def _summary(built: Built) -> list[str]:
    """How many there are, those that can never run, and those that spill most."""
    lacking = {build: result for build, result in built.items() if shortfall(build, result)}
    spilling = {build: result for build, result in built.items() if build not in lacking and result.spilled}
    worst = sorted(spilling, key=lambda build: -spilling[build].spilled)[:WORST]
    parts = [
        f"{len(built)} more kernels. {len(lacking) or 'None'} fail to compile or to "
        f"fit{':' if lacking else '.'}"
    ]
    parts += [_table(lacking)] * bool(lacking)
    return [
        *parts,
        f"{len(spilling)} spill, these the most:",
        _table({build: spilling[build] for build in worst}),
    ]


def written(text: str, version: str, section: str) -> str:
    """The page with another section for one Triton; the newest comes first, of others only what differs from
    it.
    """
    sections = _sections(text) | {version: section}
    order = sorted(sections, key=lambda name: [int(n) for n in re.findall(r"\d+", name)], reverse=True)
    newest = sections[order[0]]
    parts = [newest, *(_differences(sections[name], newest, order[0]) for name in order[1:])]
    return "\n".join(
        [INTRODUCTION, *(f"## triton {name}\n\n{x.strip()}\n" for name, x in zip(order, parts, strict=True))]
    )


def committed(text: str, version: str) -> dict[tuple[str, str], Committed]:
    """What the page says of the launch tables with one Triton, by build and chip; nothing if it has none."""
    rows = _rows(_sections(text).get(version, "")).items()
    cells = {key: [cell.strip() for cell in line.split("|")[3:-1]] for key, line in rows}
    return {
        key: Committed(tiles, int(spilled), int(resident))
        for key, (tiles, _, spilled, _, resident) in cells.items()
        if spilled
    }


def _sections(text: str) -> dict[str, str]:
    """Return the section of each Triton, with the rows that it shares with the first filled in."""
    _, *parts = re.split(r"^## triton (.*)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    first = _rows(next(iter(sections.values()), ""))
    return {name: _with_rows(section, first | _rows(section)) for name, section in sections.items()}


def _differences(section: str, newest: str, name: str) -> str:
    """A section of which only the rows stay that differ from those of the newest Triton, which is called
    ``name``.
    """
    first, own = _rows(newest), _rows(section)
    absent = {key: f"| {' | '.join((*key, ABSENT))} | | | | |" for key in first if key not in own}
    differing = {
        key: x
        for key, x in own.items()
        if key not in first or _but_registers(x) != _but_registers(first[key])
    }
    differing |= absent
    told = f"As with triton {name} but for registers, and for {len(differing)} of {len(first)} kernels:"
    return _with_rows(section, differing, told)


def _but_registers(row: str) -> list[str]:
    """The cells of a row but that of the registers, of which most versions take some more or less."""
    cells = row.split("|")
    return cells[:4] + cells[5:]


def _rows(section: str) -> dict[tuple[str, str], str]:
    """The rows of a section's launch tables by build and chip."""
    lines = section.partition(PAIRS)[0].splitlines()
    return {tuple(cell.strip() for cell in x.split("|")[1:3]): x for x in lines if " | sm_" in x}


def _with_rows(section: str, rows: Mapping[tuple[str, str], str], told: str = "") -> str:
    """A section with other rows in its launch tables, and a sentence before them."""
    _, pairs, rest = section.partition(PAIRS)
    built = [line for line in rows.values() if told or f"| {ABSENT} |" not in line]
    head = "\n".join(["### Launch tables", *(["", told] if told else []), "", COLUMNS + "\n".join(built)])
    return f"{head}\n\n{pairs}{rest}".strip() + "\n"


def _table(built: Built) -> str:
    rows = [[*_key(build), *_cells(build, result)] for build, result in built.items()]
    return COLUMNS + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _cells(build: AnyBuild, result: Binary | BaseException) -> list[str]:
    if isinstance(result, BaseException):
        return [shortfall(build, result), "", "", "", ""]
    numbers = result.registers, result.spilled, f"{result.shared / 1024:.1f}", result.resident(build.arch)
    return [result.tiles, *map(str, numbers)]


def _key(build: AnyBuild) -> tuple[str, str]:
    return str(build), f"sm_{build.arch}"
