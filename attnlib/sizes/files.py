"""Write a report of attention sizes to files: its rows as CSV, and a plot of cache size against context."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..internal.files import replacing
from ..internal.plots import COLOURS, blank, plain, png
from .cache import cache_bytes
from .models import Model
from .report import Row, Setting
from .text import human, short


def write_csv(model: Model, answers: Sequence[Row], path: Path) -> None:
    """Write the rows of a report as CSV below a header line; an unlimited context is an empty cell.

    The last column, ``is_model``, is True in the rows of ``model`` itself.

    Raises:
        OSError: the file cannot be written.
    """
    names = [field.name for field in fields(Row)]
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "is_model"])
        writer.writerows(
            [*(getattr(row, name) for name in names), row.variant == model.kind] for row in answers
        )


def draw(model: Model, models: Sequence[Model], setting: Setting, path: Path, *, batch: int = 1) -> None:
    """Write a PNG plot of cache bytes against context, one line per variant in ``models``.

    The plot is for ``batch`` sequences. A dashed line marks the memory that the weights of ``model`` itself
    leave for the cache, or the whole memory if they do not fit. Both axes are logarithmic, with ticks at
    powers of two.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = blank(8, 5)
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    longest = max(setting.contexts)
    contexts = sorted({max(1, longest >> halvings) for halvings in range(12)})
    for i, variant in enumerate(models):
        layouts = variant.shard(setting.ranks).layouts(
            dtype=setting.dtype, storage_dtype=setting.storage_dtype
        )
        used = [
            batch * cache_bytes(layouts, [n], page_size=setting.page_size, ranks=setting.context_ranks)
            for n in contexts
        ]
        style = {"label": variant.kind, "linewidth": 2}
        if variant.kind == model.kind:  # wider and behind the others, so that an equal variant cannot hide it
            style = {"label": f"{variant.kind} (the model itself)", "linewidth": 5, "zorder": 1.9}
        axes.plot(contexts, used, color=COLOURS[i % len(COLOURS)], **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    limit, text = _limit(model, setting)
    if limit:  # a logarithmic axis has no place for 0
        axes.axhline(limit, color="0.35", linestyle="--", linewidth=1.2)
        axes.text(0.01, limit, text, va="bottom", color="0.35", transform=axes.get_yaxis_transform())
    # Powers of 4 include 1, 4, 16, 64 and 256 of each unit of bytes.
    for axis, base, name in ((axes.xaxis, 2, short), (axes.yaxis, 4, human)):
        axis.set_major_locator(LogLocator(base, numticks=13))
        axis.set_major_formatter(lambda x, _, name=name: name(round(x)))
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    count = setting.ranks * setting.context_ranks // setting.sharing(model)
    ranks = f", one of {count} ranks" if count > 1 else ""
    axes.set(xlabel="context (tokens)", ylabel=f"cache of {sequences}{ranks}")
    axes.set_title(f"{model.name} and its variants", loc="left")
    plain(axes)
    figure.legend(loc="outside lower center", ncols=len(models), frameon=False)
    with replacing(path) as temporary:
        temporary.write_bytes(png(figure))


def _limit(model: Model, setting: Setting) -> tuple[int, str]:
    """Return the bytes of the dashed line in a plot, and the text above it."""
    memory, weights = setting.rank_memory, setting.weight_bytes(model)
    if weights > memory:
        return memory, f"{setting.chip.name}: {human(memory)}; the weights alone take {human(weights)}"
    after = f" beside {human(weights)} of weights" if weights else ""
    return memory - weights, f"{setting.chip.name}: {human(memory - weights)} for the cache{after}"
