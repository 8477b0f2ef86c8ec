"""Write a report of attention sizes as text: tables with a line per variant of the model."""

from collections.abc import Callable, Sequence

import torch

from ..internal.signatures import kind
from .exchange import FORMS
from .models import Model
from .report import Row, Setting

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@kind
def table(model: Model, answers: Sequence[Row], setting: Setting) -> str:
    """Return the report as text: tables with a line per variant, and a column per context and batch.

    An asterisk marks the rows of ``model`` itself.
    """
    by_place = {(row.variant, row.context, row.batch): row for row in answers}
    marked = {row.variant: row.variant + " *" * (row.variant == model.kind) for row in answers}
    places = [(context, batch) for context in setting.contexts for batch in setting.batches]

    def grid(title: str, cell: Callable[[Row], str]) -> str:
        lines = [["variant", *(f"{short(context)} x {batch:,}" for context, batch in places)]]
        for variant, name in marked.items():
            lines.append([name, *(cell(by_place[variant, *place]) for place in places)])
        return _section(title, lines)

    by_name = {name: [row for row in answers if row.variant == variant] for variant, name in marked.items()}
    counted = setting.weights is None and any(row.weight_bytes for row in answers)
    sections = (
        _head(model, setting),
        _section(
            "attention in all layers",
            [
                ["variant", "parameters", "KiB/token"]
                + ["KiB/token, all ranks"] * _has_ranks(setting)
                + ["model weights"] * counted,
                *([name, *_summary(own, setting, counted)] for name, own in by_name.items()),
            ],
        ),
        grid("cache size, context x batch", lambda row: human(row.cache_bytes)),
        grid("bytes read in a decoding step", lambda row: human(row.decode_bytes)),
        grid("bound of a decoding step, and its FLOPs per byte read", _verdict),
        _section("TFLOP per prompt, and GFLOP per token decoded at that context", _flops(by_name, setting)),
        _section(
            "limits of the memory: the longest context at a batch, the largest batch at a context",
            _limits(by_name, setting),
        ),
    )
    if setting.context_ranks > 1:
        title = (
            "training: bytes a rank receives per sequence, forward and backward, in each form of context "
            "parallelism"
        )
        sections += (_section(title, _exchanges(by_name, setting)),)
    return "\n\n".join(sections)


def human(size: int) -> str:
    """Format a number of bytes in the largest unit that gives at least 1; omit decimals of whole numbers.

    >>> human(524288), human(70272), human(-1)
    ('512 KiB', '68.62 KiB', '-1 B')
    """
    power = min((abs(size).bit_length() - 1) // 10, len(UNITS) - 1) if size else 0
    value = size / 1024**power
    return f"{value:.0f} {UNITS[power]}" if value == int(value) else f"{value:.4g} {UNITS[power]}"


def _head(model: Model, setting: Setting) -> str:
    chip = setting.chip
    where = f"; one of {setting.ranks} tensor-parallel ranks" if setting.ranks > 1 else ""
    where += f"; {setting.context_ranks} ranks share every sequence" if setting.context_ranks > 1 else ""
    lines = [
        f"{model.name}: {len(model.layers)} layers, {model.kind} (marked *){where}",
        *([f"source: {model.source}"] if model.source else []),
        f"{_name(setting.dtype)}, stored as {_name(setting.storage_dtype or setting.dtype)}, pages of "
        f"{setting.page_size:,} tokens",
        f"{chip.name}: {chip.bandwidth / 1e12:g} TB/s, {chip.flops / 1e12:g} TFLOP/s, compute-bound from "
        f"{chip.ridge:.0f} FLOPs per byte",
        f"memory: {_memory(model, setting)}",
    ]
    return "\n".join(lines)


def _memory(model: Model, setting: Setting) -> str:
    """Say how much of the memory the weights take, and how much they leave for the cache."""
    memory, weights = setting.rank_memory, setting.weight_bytes(model)
    if setting.weights is None and model.total_parameters is None:
        return f"{human(memory)} for the cache; the weights are unknown, give them by --weights GIB"
    if not weights:
        return f"{human(memory)} for the cache, weights not counted"
    of = "weights, as given"
    if setting.weights is None:
        billions = model.shard(setting.ranks).total_parameters / 1e9
        of = f"{billions:,.4g} billion weights, {_name(setting.dtype)}"
    if weights > memory:
        return f"{human(memory)}, less than the weights: {human(weights)} ({of})"
    return f"{human(memory)} - {human(weights)} ({of}) = {human(memory - weights)} for the cache"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_ranks(setting: Setting) -> bool:
    return max(setting.ranks, setting.context_ranks) > 1


def _summary(rows: Sequence[Row], setting: Setting, counted: bool) -> list[str]:
    first = rows[0]
    kib = [f"{first.token_bytes / 1024:,.10g}", f"{first.total_token_bytes / 1024:,.10g}"]
    weights = [human(first.weight_bytes)] * counted
    return [f"{first.parameters:,}", *kib[: 1 + _has_ranks(setting)], *weights]


def _verdict(row: Row) -> str:
    digits = 0 if row.intensity >= 10 else 1
    return f"{row.bound} {row.intensity:.{digits}f}".strip()


def _flops(by_name: dict[str, list[Row]], setting: Setting) -> list[list[str]]:
    contexts = [short(context) for context in setting.contexts]
    lines = [
        [
            "variant",
            *(f"prompt {context}" for context in contexts),
            *(f"token {context}" for context in contexts),
        ]
    ]
    for name, own in by_name.items():
        one = {row.context: (row.prefill_flops, row.decode_flops // row.batch) for row in own}
        prompts, tokens = zip(*one.values(), strict=True)
        lines.append([name, *(_number(n / 1e12) for n in prompts), *(_number(n / 1e9) for n in tokens)])
    return lines


def _number(value: float) -> str:
    """Format a number with at least 4 digits and no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _limits(by_name: dict[str, list[Row]], setting: Setting) -> list[list[str]]:
    head = [f"context at batch {batch:,}" for batch in setting.batches]
    head += [f"batch at {short(context)}" for context in setting.contexts]
    fits = any(rows[0].weight_bytes <= setting.rank_memory for rows in by_name.values())
    lines = [["variant", *head] if fits else ["variant"]]
    for name, own in by_name.items():
        if own[0].weight_bytes > setting.rank_memory:
            lines.append([name, _too_small(own[0], setting)])
            continue
        longest = {
            row.batch: "any" if row.longest_context is None else f"{row.longest_context:,}" for row in own
        }
        largest = {row.context: f"{row.largest_batch:,}" for row in own}
        lines.append([name, *longest.values(), *largest.values()])
    return lines


def _too_small(row: Row, setting: Setting) -> str:
    """Return the message for weights that exceed the memory, with a remedy."""
    if setting.weights is not None:
        remedy = "use more ranks or a bigger chip"
    elif row.least_ranks is None:
        remedy = "use a bigger chip"
    else:
        remedy = f"use --tensor-parallel {row.least_ranks} or a bigger chip"
    weights, memory = human(row.weight_bytes), human(setting.rank_memory)
    return f"weights alone take {weights}, the memory is {memory}: {remedy}"


def _exchanges(by_name: dict[str, list[Row]], setting: Setting) -> list[list[str]]:
    lines = [["variant", *(f"{form} {short(context)}" for context in setting.contexts for form in FORMS)]]
    for name, own in by_name.items():
        of_context = {row.context: (row.ring_bytes, row.gather_bytes, row.heads_bytes) for row in own}
        cells = ("-" if size is None else human(size) for sizes in of_context.values() for size in sizes)
        lines.append([name, *cells])
    return lines


def short(tokens: int) -> str:
    """Format a number of tokens; multiples of 1,024 are given in K (1,024) or M (1,024 K).

    >>> short(4096), short(2**20), short(1600)
    ('4K', '1M', '1,600')
    """
    for suffix, unit in (("M", 2**20), ("K", 2**10)):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit:,}{suffix}"
    return f"{tokens:,}"


def _section(title: str, lines: list[list[str]]) -> str:
    """Format a table with a title above it; only the first column is left-aligned.

    A line may have a name and a sentence instead of one cell per column.
    """
    first = max(len(name) for name, *_ in lines)
    columns = zip(*(cells for _, *cells in lines if len(cells) == len(lines[0]) - 1), strict=True)
    widths = [max(map(len, column)) for column in columns]

    def line(name: str, *cells: str) -> str:
        aligned = map(str.rjust, cells, widths) if len(cells) == len(widths) else cells
        return "  ".join((name.ljust(first), *aligned)).rstrip()

    return "\n".join([title, *(line(*cells) for cells in lines)])
