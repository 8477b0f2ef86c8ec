"""Helpers for plots: empty figures, a plain style, and colours that colour-blind readers can tell apart."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito designed this palette for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure, ``width`` x ``height`` inches, that needs no display.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a picture needs matplotlib: pip install 'attnlib[demo]'") from error
    made = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(made)
    return made


def plain(axes: "Axes", *, grid: str = "both") -> None:
    """Remove the top and right lines around a plot, and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis=grid)


def png(figure: "Figure") -> bytes:
    """Return the figure as a PNG; the same figure gives the same bytes."""
    data = BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()


def svg(figure: "Figure") -> bytes:
    """Return the figure as an SVG, whose text stays text; the same figure gives the same bytes."""
    from matplotlib import rc_context

    data = BytesIO()
    with rc_context({"svg.hashsalt": "attnlib", "svg.fonttype": "none"}):
        figure.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
    return data.getvalue()
