"""The GPU benchmark: its tables, chosen, filled and written one after another."""

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from . import decode, memory, overhead, speed, steps
from .place import Place
from .plots import draw
from .race import Failure, attempt
from .report import Report, Row, Table, markdown


class Group(NamedTuple):
    """Tables that one function fills together, given a place and those of them that are wanted."""

    fill: Callable[[Place, Sequence[Table]], speed.Rows]
    tables: tuple[Table, ...]
    asked: bool = False  # left out unless it is asked for by name


def _decoding(name: str, title: str, unit: str = "us", ours: int = 1) -> Table:
    return Table(name, f"{title}, bf16", unit, ours=ours)


def _growing(name: str, title: str, what: str) -> Table:
    return Table(name, f"48 heads of 64 channels, {title}, bf16", "TFLOP/s", what, growing=True)


GROUPS = (
    Group(
        speed.training,
        (
            Table("forward", "Forward, bf16", "TFLOP/s", "forward"),
            Table("backward", "Backward, bf16", "TFLOP/s", "backward"),
        ),
    ),
    Group(
        speed.long,
        (Table("long", "Forward and backward of long sequences, 16 heads d128 causal, bf16", "ms", "both", True),),
    ),
    Group(speed.varlen, (Table("varlen", "Packed sequences against a batch, 16 heads d128 causal, bf16", "TFLOP/s"),)),
    Group(speed.window, (Table("window", "A sliding window against all earlier keys, 16 heads d128, bf16", "ms"),)),
    Group(speed.grouped, (Table("gqa", "Grouped against as many KV heads, d128 causal, bf16", "ms"),)),
    Group(overhead.rows, (Table("launch", "CPU time of a small call, bf16", "us"),)),
    Group(
        memory.rows,
        (
            Table(
                "memory",
                "Peak memory of forward and backward beyond q, k, v and dout, 16 heads d128 causal, bf16",
                "MiB",
                "both",
                growing=True,
            ),
        ),
    ),
    Group(
        speed.growing,
        (
            _growing("growing", "causal forward", "forward"),
            _growing("growing-training", "causal forward + backward", "both"),
        ),
    ),
    Group(
        decode.grouped,
        (
            _decoding("decode", "One token over a full cache, d128", ours=5),
            _decoding("decode-bandwidth", "K and V read for one token over a full cache, d128", "GB/s", ours=5),
        ),
    ),
    Group(
        decode.latent,
        (
            _decoding("mla-decode", "One token over a cache of latents, 512 + 64, absorbed", ours=2),
            _decoding("mla-decode-flops", "One token over a cache of latents, 512 + 64, absorbed", "TFLOP/s", ours=2),
        ),
    ),
    Group(
        decode.fewer_bits,
        (_decoding("decode-quantised", "One token over a cache of one byte a value, pages of 64", ours=2),),
    ),
    Group(decode.shared, (_decoding("shared-prefix", "One token over forks of one prompt, pages of 64"),)),
    Group(decode.mixed, (_decoding("decode-mixed", "A prompt among single tokens, pages of 64"),)),
    Group(decode.invariant, (_decoding("batch-invariant", "The same bits in any batch, pages of 64"),)),
    Group(steps.calls, (_decoding("decode-calls", "A step of 4 layers of 4096 channels, GQA 32/8, pages of 64"),)),
    Group(steps.launch, (_decoding("decode-launch", "CPU time of append and attention, GQA 32/8, pages of 64"),)),
    Group(steps.forms, (_decoding("mla-layer", "One token through an MLA layer over its cache, pages of 64"),)),
    Group(
        speed.growing_full,
        (
            _growing("full", "full forward", "forward"),
            _growing("full-training", "full forward + backward", "both"),
        ),
        asked=True,
    ),
)


def choose(names: Sequence[str]) -> list[tuple[Group, tuple[Table, ...]]]:
    """The groups of the named tables, with those tables; without names, all that need not be asked for.

    Raises:
        ValueError: no table is called so.
    """
    known = [table.name for group in GROUPS for table in group.tables]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    chosen = []
    for group in GROUPS:
        wanted = tuple(t for t in group.tables if t.name in names or not (names or group.asked))
        if wanted:
            chosen.append((group, wanted))
    return chosen


def listing() -> str:
    """The tables, one a line."""
    lines = [
        f"  {table.name:17} {table.title}, {table.unit}{' (only when asked for)' if group.asked else ''}"
        for group in GROUPS
        for table in group.tables
    ]
    return "\n".join(lines)


def run(place: Place, names: Sequence[str], folder: Path) -> int:
    """Fill the chosen tables and write them into ``folder``; returns 1 if ours failed anywhere, else 0."""
    chosen = choose(names)
    torch.manual_seed(0)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    report = Report(folder, facts(place, names), say)
    print(", ".join(report.facts.values()), flush=True)
    for group, tables in chosen:
        ended = attempt(_fill, report, place, group, tables)
        if isinstance(ended, Failure):
            for table in tables:
                report.add(table, Row("the rest", {"ours": ended}))
        for table in tables:
            print(f"\n{markdown(table, report.tables[table], report.facts)}", flush=True)
        _draw(report, tables)
    failed = [f"{table.name}, {row.name}" for table, rows in report.tables.items() for row in rows if table.failed(row)]
    say(f"done; the tables are in {folder}" + (f"; ours failed: {'; '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _fill(report: Report, place: Place, group: Group, tables: Sequence[Table]) -> None:
    for table, row in group.fill(place, tables):
        report.add(table, row)


def _draw(report: Report, tables: Iterable[Table]) -> None:
    if find_spec("matplotlib") is None:
        report.say("no pictures without matplotlib: pip install 'attnlib[demo]'")
        return
    for table in tables:
        drawn = attempt(draw, table, report.tables[table], report.folder / f"{table.name}.png")
        if isinstance(drawn, Failure):
            report.say(f"no picture of {table.name}: {drawn}")


def facts(place: Place, names: Sequence[str]) -> dict[str, str]:
    """The command, what it ran on, and when."""
    only = ["--only", ",".join(names)] if names else []
    cuda = place.device == "cuda"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "absent"
    return {
        "command": shlex.join(["python", "-m", "attnlib", "bench", "--gpu", *only]),
        "device": torch.cuda.get_device_name() if cuda else place.device,
        "torch": f"torch {torch.__version__}",
        "triton": f"triton {triton}",
        "cuDNN": f"cuDNN {torch.backends.cudnn.version() if cuda else 'absent'}",
        "date": date.today().isoformat(),
    }
