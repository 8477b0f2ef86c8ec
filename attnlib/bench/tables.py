"""The benchmark's tables: choose, fill and write them."""

import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from . import (
    blocks,
    cases,
    cpu,
    decode,
    functions,
    gates,
    memory,
    parallel,
    selected,
    speed,
    steps,
    stored,
    trees,
    weights,
)
from .compare import Failure, attempt
from .implementations import PEERS
from .peers import versions
from .place import Target
from .plots import draw, draw_bars
from .report import Line, Report, Table, markdown


class TableEntry(NamedTuple):
    """A table and the function that fills it; adjacent tables with the same function are filled together."""

    fill: Callable[[Target, Sequence[Table]], speed.Rows]
    table: Table


def _table(fill: Callable, name: str, title: str, unit: str = "us", **options: object) -> TableEntry:
    return TableEntry(fill, Table(name, title, unit, **options))


TRAINING = partial(speed.rows, work=cases.TRAINING, peers=(*PEERS, "FA4"))
WIDE = partial(speed.rows, work=cases.WIDE, peers=("efficient", "Flex"))
LONG = partial(speed.rows, work=cases.LONG, peers=("FA2", "cuDNN", "FA4"))
GROWING = partial(speed.rows, work=cases.GROWING, peers=("eager", "efficient", *PEERS, "FA4"))
DECODE = partial(decode.rows, work=decode.GROUPED, fills=decode.STORAGES, peers=(*PEERS, "FlashInfer"))
MLA = partial(
    decode.rows,
    work=decode.LATENT,
    fills=decode.LATENT_STORAGES,
    peers=("FlashInfer",),
    checks=("definition",),
)
QUANTISED = partial(decode.rows, work=decode.FEWER_BITS, fills=decode.BYTES, bound=decode.ROUGH)
SHARED = partial(decode.rows, work=decode.SHARED, fills=decode.FORKS)
INVARIANT = partial(decode.rows, work=decode.INVARIANT, fills=decode.BATCHES)
STEPS = partial(steps.rows, work=steps.STEPS, measure=steps.ways)
LAUNCH = partial(steps.rows, work=steps.STEPS, measure=steps.launches)
FORMS = partial(steps.rows, work=steps.FORMS, measure=steps.forms)
RATE = "TFLOP/s"
GPU = (
    _table(TRAINING, "forward", "Forward, bf16", RATE, what="forward"),
    _table(TRAINING, "backward", "Backward, bf16", RATE, what="backward"),
    _table(WIDE, "wide", "Forward of heads wider than 256, 8/4 heads, 2 x 8k, bf16", RATE, what="forward"),
    _table(
        WIDE,
        "wide-backward",
        "Backward of heads wider than 256, 8/4 heads, 2 x 8k, bf16",
        RATE,
        what="backward",
    ),
    _table(LONG, "long", "Long sequences, 16 heads d128 causal, bf16", "ms", what="both", growing=True),
    _table(
        speed.varlen, "varlen", "Packed sequences compared with a batch, 16 heads d128 causal, bf16", RATE
    ),
    _table(
        speed.window,
        "window",
        "A sliding window compared with full causal attention, 16 heads d128, bf16",
        "ms",
    ),
    _table(
        speed.grouped, "gqa", "Grouped KV heads compared with as many as query heads, d128 causal, bf16", "ms"
    ),
    _table(
        gates.rows,
        "gates",
        "Training a layer with an output gate, compiled, 32/8 heads d128 causal, 2 x 8k, bf16",
        "ms",
    ),
    _table(
        weights.rows,
        "weights",
        "Largest scores and probabilities recomputed, compared with the forward, bf16",
        "ms",
    ),
    _table(
        trees.rows,
        "trees",
        "Sequences with a common prefix as a tree, per visible pair, GQA 32/8 d128, bf16",
        RATE,
    ),
    _table(
        functions.rows,
        "functions",
        "Mask and score functions, 16 heads causal, 2 x 8k, bf16",
        "ms",
    ),
    _table(selected.rows, "selected", "Selected keys, causal, bf16", "ms"),
    _table(speed.overhead, "launch", "CPU time of a small call, bf16"),
    _table(memory.rows, "memory", "Peak memory of training, 16 heads d128 causal, bf16", "MiB", growing=True),
    _table(GROWING, "growing", "48 heads d64, causal forward, bf16", RATE, what="forward", growing=True),
    _table(
        GROWING,
        "growing-training",
        "48 heads d64, causal forward + backward, bf16",
        RATE,
        what="both",
        growing=True,
    ),
    _table(DECODE, "decode", "One token over a full cache, d128, bf16", ours=5),
    _table(MLA, "mla-decode", "One token over a latent cache, 512 + 64, absorbed, bf16", ours=2),
    _table(QUANTISED, "decode-quantised", "One token over an fp8 or int8 cache, pages of 64", ours=2),
    _table(SHARED, "shared-prefix", "One token over forks of one prompt, pages of 64, bf16"),
    _table(INVARIANT, "batch-invariant", "The same bits in any batch, pages of 64, bf16"),
    _table(STEPS, "decode-calls", "A step of 4 layers of 4096 channels, GQA 32/8, pages of 64, bf16"),
    _table(LAUNCH, "decode-launch", "CPU time of append and attention, GQA 32/8, pages of 64, bf16"),
    _table(selected.steps, "selected-decode", "One token over selected keys, pages of 64, bf16"),
    _table(FORMS, "mla-layer", "One token through an MLA layer over its cache, pages of 64, bf16"),
)
CPU = (
    _table(cpu.calls, "cpu", "Causal attention, fp32", "ms"),
    _table(cpu.decoding, "cpu-decode", "One token through 8 layers of 512 channels, fp32", "ms"),
)


def _parallel(sequences: Sequence[cases.Case], caches: Sequence[stored.Decoding]) -> tuple[TableEntry, ...]:
    shared = partial(parallel.rows, measure=parallel.sequence, work=sequences)
    decoded = partial(parallel.rows, measure=parallel.latents, work=caches)
    return (
        _table(
            shared,
            "parallel",
            "A sequence sharded over ranks, compared with one rank",
            "ms",
            ours=3,
        ),
        _table(
            shared,
            "parallel-peers",
            "A sequence sharded over ranks, compared with torch's context_parallel",
            "ms",
            ours=3,
        ),
        _table(
            decoded,
            "parallel-decode",
            "One token over a latent cache sharded over ranks, each with its own heads",
            "ms",
        ),
    )


BLOCKS_GPU = (
    _table(blocks.rows, "blocks", "Transformer blocks by their attention, bf16", blocks.SPEED, bars=True),
    _table(blocks.rows, "blocks-memory", "Peak memory of a training step of a block, bf16", blocks.MEMORY),
)
BLOCKS_CPU = (
    _table(
        partial(blocks.rows, work=blocks.SMALL_BLOCKS),
        "blocks",
        "Transformer blocks by their attention, fp32",
        blocks.SPEED,
        bars=True,
    ),
)
PARALLEL_GPU = _parallel(parallel.SEQUENCES, parallel.CACHES)
PARALLEL_CPU = _parallel(parallel.SMALL_SEQUENCES, parallel.SMALL_CACHES)


def choose(entries: Sequence[TableEntry], names: Sequence[str]) -> tuple[TableEntry, ...]:
    """Return the tables with the given names, or all tables if no names are given.

    Raises:
        ValueError: a name is unknown.
    """
    known = [entry.table.name for entry in entries]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple(entry for entry in entries if entry.table.name in (names or known))


def listing(entries: Sequence[TableEntry]) -> str:
    """Return the help text that lists all tables: name, title and unit, one per line."""
    return "\n".join(f"  {table.name:17} {table.title}, {table.unit}" for _, table in entries)


def run(place: Target, entries: Sequence[TableEntry], folder: Path, command: str) -> int:
    """Fill the tables and write them into ``folder``; return 1 if attnlib failed in any row, else 0."""
    torch.manual_seed(0)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    report = Report(folder, facts(place, command), say)
    print(", ".join(report.facts.values()), flush=True)
    for fill, group in groupby(entries, key=attrgetter("fill")):
        tables = [entry.table for entry in group]
        ended = attempt(_fill, report, place, fill, tables)
        for table in tables:
            if isinstance(ended, Failure):
                report.add(table, Line("the rest", {"ours": ended}))
            print(f"\n{markdown(table, report.tables[table], report.facts)}", flush=True)
            if table.growing or table.bars:
                _draw(report, table)
    failed = [
        f"{table.name}, {row.name}"
        for table, rows in report.tables.items()
        for row in rows
        if table.failed(row)
    ]
    say(f"done; the tables are in {folder}" + (f"; ours failed: {'; '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _fill(report: Report, place: Target, fill: Callable, tables: Sequence[Table]) -> None:
    for table, row in fill(place, tables):
        report.add(table, row)


def _draw(report: Report, table: Table) -> None:
    if find_spec("matplotlib") is None:
        report.say("no pictures without matplotlib: pip install 'attnlib[demo]'")
        return
    where = f"attnlib on {', '.join(report.facts[name] for name in ('device', 'torch', 'date'))}"
    path, drawer = report.folder / f"{table.name}.png", draw_bars if table.bars else draw
    drawn = attempt(drawer, table, report.tables[table], path, where)
    if isinstance(drawn, Failure):
        report.say(f"no picture of {table.name}: {drawn}")


def facts(place: Target, command: str) -> dict[str, str]:
    """Return the facts to print above a table: the command, the device, the versions and the date."""
    found = {"command": command, "device": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    if place.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["triton"] = f"triton {version('triton')}"
        found["cuDNN"] = f"cuDNN {torch.backends.cudnn.version()}"
        found |= versions()
    return found | {"torch": f"torch {torch.__version__}", "date": date.today().isoformat()}
