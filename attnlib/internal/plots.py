"""Pictures: empty figures, a plain look, and colours that any colour vision tells apart."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of so many inches, which needs no display.

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
    """Leave two of the four lines around a plot, and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis=grid)


def png(figure: "Figure") -> bytes:
    """Return the picture: the same bytes for the same figure."""
    data = BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return data.getvalue()
