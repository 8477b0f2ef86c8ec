"""The conversion report as a chart: error and size of each layer."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..internal.plots import COLOURS, blank, plain, png
from .check.lost import own_errors
from .checkpoint.writing import write_file

PICTURE = "conversion_report.png"


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Write a PNG chart of a conversion report into ``folder``: the errors and the size of each layer.

    Sizes are omitted if ``report`` does not list them per layer.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers, sizes = report["layers"], report["settings"].get("sizes")
    indices, names = (
        [layer["layer"] for layer in layers],
        [name for name in own_errors(layers[0]) if name != "layer"],
    )
    figure = blank(9, 5 if sizes is None else 7)
    rows = figure.subplots(
        1 if sizes is None else 2, sharex=True, squeeze=False, height_ratios=[3, 2][: 1 + bool(sizes)]
    )
    errors = rows[0, 0]
    for name, colour in zip(names, COLOURS, strict=False):
        found = [math.nan if layer[name] is None else layer[name] for layer in layers]
        if any(found) or name == names[0]:
            errors.plot(indices, found, color=colour, marker="o", markersize=4, label=name.replace("_", " "))
    errors.set_ylabel("relative RMS error")
    errors.set_ylim(bottom=0)
    errors.legend(frameon=False)
    if sizes is not None:
        rows[1, 0].bar(indices, sizes, color="0.5")
        rows[1, 0].set_ylabel("KV heads" if report["settings"]["layers"] == "gqa" else "rank")
    rows[-1, 0].set_xlabel("layer")
    for axes in rows[:, 0]:
        plain(axes)
    figure.suptitle("Conversion error by layer", x=0.01, ha="left")
    write_file(folder, PICTURE, png(figure))
