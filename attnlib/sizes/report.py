"""Report a model's attention sizes at several contexts and batches, as rows of numbers or as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch

from ..internal.signatures import kind, leading_to
from ..kv import KVLayout
from .attention import LatentShape, Shape, decode_bytes, decode_flops, prefill_flops
from .cache import cache_bytes, largest_batch, longest_context
from .catalogue import CHIPS, Chip
from .exchange import FORMS, exchange_bytes, shares_heads
from .models import Model

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@kind
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The serving setup for which a report computes sizes.

    ``memory`` is the number of bytes that the cache of one rank may take; None means the chip's whole memory.
    ``ranks`` tensor-parallel ranks divide the heads between them. ``context_ranks`` ranks divide the tokens
    of each cache, and of each sequence in training: first the tensor-parallel ranks that hold the same KV
    heads, then additional ranks.

    Raises:
        ValueError: a size is below 1, or ``memory`` is negative.
    """

    contexts: tuple[int, ...] = (4_096, 32_768, 131_072)
    batches: tuple[int, ...] = (1, 8, 64)
    dtype: torch.dtype = torch.bfloat16
    storage_dtype: torch.dtype | None = None
    page_size: int = 64
    ranks: int = 1
    context_ranks: int = 1
    chip: Chip = CHIPS[0]
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("contexts", min(self.contexts, default=0)),
            ("batches", min(self.batches, default=0)),
        ):
            if least < 1:
                raise ValueError(f"{name}: expected sizes of at least 1, got {getattr(self, name)}")
        if self.page_size < 1:
            raise ValueError(f"page_size: expected at least 1 token, got {self.page_size}")
        if self.context_ranks < 1:
            raise ValueError(f"context_ranks: expected at least 1, got {self.context_ranks}")
        if self.memory is not None and self.memory < 0:
            raise ValueError(
                f"memory: the weights take {human(-self.memory)} more than one rank has; use more ranks"
            )

    @property
    def budget(self) -> int:
        """The number of bytes that the cache of one rank may take."""
        return self.chip.memory if self.memory is None else self.memory

    def sharing(self, model: Model) -> int:
        """Return how many ranks shard both the tokens of the cache and the heads."""
        return gcd(self.context_ranks, *(_copies(shape, self.ranks) for shape in model.layers))


@leading_to("rows(models, setting) makes them")
@dataclass(frozen=True, slots=True)
class Row:
    """The sizes of one variant of a model at one context and batch, per rank except ``total_token_bytes``.

    If ranks share the tokens of a cache, the numbers are those of the rank with the most tokens.

    Attributes:
        token_bytes: bytes of one token on a rank that stores it, while all sliding windows include the token.
        total_token_bytes: bytes of one token on all ranks together.
        prefill_flops: FLOPs for the prompt of one sequence.
        decode_flops, decode_bytes: FLOPs and bytes read in a decoding step of the whole batch.
        bound: what limits a decoding step, "memory" or "compute"; empty unless the dtype has 16 bits.
        longest_context: the longest context at this batch; None means no limit.
        ring_bytes, gather_bytes, heads_bytes: bytes that a rank receives in training on one sequence, forward
            and backward, in each form of context parallelism; None if the ranks cannot divide the heads.
    """

    variant: str
    context: int
    batch: int
    parameters: int
    token_bytes: int
    total_token_bytes: int
    cache_bytes: int
    prefill_flops: int
    decode_flops: int
    decode_bytes: int
    bound: str
    longest_context: int | None
    largest_batch: int
    ring_bytes: int
    gather_bytes: int
    heads_bytes: int | None

    @property
    def intensity(self) -> float:
        """The FLOPs per byte read in a decoding step."""
        return self.decode_flops / self.decode_bytes


@kind
def rows(models: Sequence[Model], setting: Setting) -> list[Row]:
    """Return one row for each model, context and batch.

    >>> from attnlib.sizes import model
    >>> [row] = rows([model("llama-2-7b")], Setting(contexts=(4096,), batches=(1,)))
    >>> row.token_bytes, row.cache_bytes, row.bound
    (524288, 2147483648, 'memory')

    Raises:
        ValueError: a model cannot be sharded over the ranks.
    """
    return [
        _row(model, setting, context=context, batch=batch)
        for model in models
        for context in setting.contexts
        for batch in setting.batches
    ]


def _row(model: Model, setting: Setting, *, context: int, batch: int) -> Row:
    rank = model.shard(setting.ranks)
    stored = {"dtype": setting.dtype, "storage_dtype": setting.storage_dtype}
    layouts, shared = rank.layouts(**stored), {"ranks": setting.context_ranks}
    paged = {"page_size": setting.page_size} | shared
    flops = batch * sum(_step_flops(shape, context, setting, setting.sharing(model)) for shape in rank.layers)
    read = sum(decode_bytes(shape, context, batch=batch, **stored, **shared) for shape in rank.layers)
    bound = "compute" if flops / read > setting.chip.ridge else "memory"
    return Row(
        variant=model.kind,
        context=context,
        batch=batch,
        parameters=rank.parameters,
        token_bytes=sum(layout.token_bytes for layout in layouts),
        total_token_bytes=_on_all_ranks(model, layouts, setting),
        cache_bytes=cache_bytes(layouts, [context], **paged) * batch,
        prefill_flops=sum(prefill_flops(shape, context) for shape in rank.layers),
        decode_flops=flops,
        decode_bytes=read,
        bound=bound if setting.dtype.itemsize == 2 else "",
        longest_context=longest_context(layouts, setting.budget, batch=batch, **paged),
        largest_batch=largest_batch(layouts, setting.budget, context=context, **paged),
        **{f"{form}_bytes": _received(rank, context, setting, form) for form in FORMS},
    )


def _copies(shape: Shape, ranks: int) -> int:
    """Return how many tensor-parallel ranks store the same keys and values, or the same latents."""
    return (
        ranks
        if isinstance(shape, LatentShape)
        else ranks * shape.shard(ranks).num_kv_heads // shape.num_kv_heads
    )


def _step_flops(shape: Shape, context: int, setting: Setting, sharing: int) -> int:
    """Return the FLOPs of one rank and layer to decode one token.

    Unless the layer has a window, ``sharing`` ranks divide the tokens of the same KV heads between them, and
    each computes the query heads of all of these ranks over its own tokens.
    """
    own, projections = decode_flops(shape, context, ranks=setting.context_ranks), 2 * shape.weights
    return own if shape.window is not None else projections + sharing * (own - projections)


def _on_all_ranks(model: Model, layouts: Sequence[KVLayout], setting: Setting) -> int:
    """Return how many bytes all ranks together use to store one token.

    If ranks share a cache, only one of them stores the token, except in windowed layers, where each does.
    """
    ranks = setting.ranks * setting.context_ranks // setting.sharing(model)
    apart = (ranks // setting.context_ranks if layout.window is None else ranks for layout in layouts)
    return sum(layout.token_bytes * count for layout, count in zip(layouts, apart, strict=True))


@kind
def table(model: Model, answers: Sequence[Row], setting: Setting) -> str:
    """Return the report as text: tables with a line per variant, and a column per context and batch."""
    by_place = {(row.variant, row.context, row.batch): row for row in answers}
    names = list(dict.fromkeys(row.variant for row in answers))
    places = [(context, batch) for context in setting.contexts for batch in setting.batches]

    def grid(title: str, cell: Callable[[Row], str]) -> str:
        head = ["variant", *(f"{short(context)} x {batch:,}" for context, batch in places)]
        return _section(
            title, [head, *([name, *(cell(by_place[name, *place]) for place in places)] for name in names)]
        )

    by_name = {name: [row for row in answers if row.variant == name] for name in names}
    sections = (
        _head(model, setting),
        _section(
            "attention in all layers",
            [
                ["variant", "parameters", "KiB/token"] + ["KiB/token, all ranks"] * _has_ranks(setting),
                *(_summary(own, setting) for own in by_name.values()),
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


def _received(rank: Model, context: int, setting: Setting, form: str) -> int | None:
    """Return how many bytes a rank receives over all layers while training on one sequence.

    The result is None if the ranks cannot divide the heads evenly.
    """
    ranks = setting.context_ranks
    if form == "heads" and not all(shares_heads(shape, ranks) for shape in rank.layers):
        return None
    options = {"ranks": ranks, "form": form, "dtype": setting.dtype}
    found = (exchange_bytes(shape, context, **options) for shape in rank.layers)
    return sum(one.forward + one.backward for one in found)


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
    stored = f"{setting.dtype}, stored as {setting.storage_dtype or setting.dtype}".replace("torch.", "")
    return (
        f"{model.name}: {len(model.layers)} layers, "
        f"{model.kind}{where}{f' ({model.source})' if model.source else ''}\n{stored}, pages of "
        f"{setting.page_size} tokens, {human(setting.budget)} for the cache\n{chip.name}: "
        f"{chip.bandwidth / 1e12:g} TB/s, {chip.flops / 1e12:g} TFLOP/s, compute-bound from {chip.ridge:.0f} "
        "FLOPs per byte"
    )


def _has_ranks(setting: Setting) -> bool:
    return max(setting.ranks, setting.context_ranks) > 1


def _summary(rows: Sequence[Row], setting: Setting) -> list[str]:
    first = rows[0]
    kib = [f"{first.token_bytes / 1024:,.10g}", f"{first.total_token_bytes / 1024:,.10g}"]
    return [first.variant, f"{first.parameters:,}", *kib[: 1 + _has_ranks(setting)]]


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
        lines.append([name, *(f"{n / 1e12:,.4g}" for n in prompts), *(f"{n / 1e9:,.4g}" for n in tokens)])
    return lines


def _limits(by_name: dict[str, list[Row]], setting: Setting) -> list[list[str]]:
    head = [f"context at batch {batch:,}" for batch in setting.batches]
    head += [f"batch at {short(context)}" for context in setting.contexts]
    lines = [["variant", *head]]
    for name, own in by_name.items():
        longest = {
            row.batch: "any" if row.longest_context is None else f"{row.longest_context:,}" for row in own
        }
        largest = {row.context: f"{row.largest_batch:,}" for row in own}
        lines.append([name, *longest.values(), *largest.values()])
    return lines


def _exchanges(by_name: dict[str, list[Row]], setting: Setting) -> list[list[str]]:
    lines = [["variant", *(f"{form} {short(context)}" for context in setting.contexts for form in FORMS)]]
    for name, own in by_name.items():
        of_context = {row.context: (row.ring_bytes, row.gather_bytes, row.heads_bytes) for row in own}
        cells = ("-" if size is None else human(size) for sizes in of_context.values() for size in sizes)
        lines.append([name, *cells])
    return lines


def short(tokens: int) -> str:
    """Format a number of tokens; multiples of 1,024 are given in units of 1,024 (K).

    >>> short(4096), short(1600)
    ('4K', '1,600')
    """
    return f"{tokens // 1024:,}K" if tokens % 1024 == 0 else f"{tokens:,}"


def _section(title: str, lines: list[list[str]]) -> str:
    """Format a table with a title above it; only the first column is left-aligned."""
    first, *others = ([len(cell) for cell in column] for column in zip(*lines, strict=True))
    width, widths = max(first), [*map(max, others)]
    return "\n".join(
        [title, *("  ".join((name.ljust(width), *map(str.rjust, cells, widths))) for name, *cells in lines)]
    )
