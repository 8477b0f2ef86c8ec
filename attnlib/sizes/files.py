"""Write a report of attention sizes to files: its rows as CSV, and a plot of cache size against context."""

import csv
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ..internal.files import replacing
from ..internal.plots import COLOURS, blank, plain, png
from .cache import cache_bytes
from .models import Model
from .report import Row, Setting, human, short


def write_csv(answers: Sequence[Row], path: Path) -> None:
    """Write the rows of a report as CSV below a header line; an unlimited context is an empty cell.

    Raises:
        OSError: the file cannot be written.
    """
    names = [field.name for field in fields(Row)]
    with replacing(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in answers)


def draw(models: Sequence[Model], setting: Setting, path: Path) -> None:
    """Write a PNG plot of cache bytes against context, one line per model.

    The plot is for the largest batch in ``setting``. A dashed line marks the memory available to the cache.
    Both axes are logarithmic, with ticks at powers of two.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = blank(8, 5)
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    batch, longest = max(setting.batches), max(setting.contexts)
    contexts = sorted({max(1, longest >> halvings) for halvings in range(12)})
    for i, model in enumerate(models):
        layouts = model.shard(setting.ranks).layouts(dtype=setting.dtype, storage_dtype=setting.storage_dtype)
        used = [
            batch * cache_bytes(layouts, [n], page_size=setting.page_size, ranks=setting.context_ranks)
            for n in contexts
        ]
        axes.plot(contexts, used, color=COLOURS[i % len(COLOURS)], linewidth=2, label=model.kind)
    limit = f"{setting.chip.name}: {human(setting.budget)} for the cache"
    axes.axhline(setting.budget, color="0.35", linestyle="--", linewidth=1.2, label=limit)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis, name in ((axes.xaxis, short), (axes.yaxis, human)):
        axis.set_major_locator(LogLocator(2, numticks=13))
        axis.set_major_formatter(lambda x, _, name=name: name(round(x)))
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    count = setting.ranks * setting.context_ranks // setting.sharing(models[0])
    ranks = f", one of {count} ranks" if count > 1 else ""
    axes.set(xlabel="context (tokens)", ylabel=f"cache of {sequences}{ranks}")
    axes.set_title(f"{models[0].name} and its variants", loc="left")
    plain(axes)
    axes.legend(frameon=False)
    with replacing(path) as temporary:
        temporary.write_bytes(png(figure))
