"""Draw how a call and a cache are built, as call.svg and cache.svg.

    python docs/pictures/structure.py

Each box names an object of the package and the file that defines it; a test compares both with the code.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT, COLUMN, ROW = 250, 74, 330, 116  # of a box, and from one box to the next
MARGIN, LINE = 20, 17
INK, QUIET, FILL = "#1f2933", "#52606d", "#f0f4f8"
FOLDER = Path(__file__).parent


class Box(NamedTuple):
    """An object at a column and a row of the picture: its name, its file below attnlib, and what it holds."""

    name: str
    file: str
    text: str
    column: float
    row: float

    @property
    def corner(self) -> tuple[float, float]:
        """The left and upper edge."""
        return MARGIN + self.column * COLUMN, MARGIN + self.row * ROW


class Arrow(NamedTuple):
    """A step from one box to another, by name, with the function that makes it."""

    start: str
    stop: str
    label: str = ""


CALL = (
    Box("GroupedQueryAttention", "layers/gqa.py", "projects and rotates x", 0, 0),
    Box("attention", "functional.py", "q, k, v and options", 1, 0),
    Box("Inputs", "layers/inputs.py", "the arguments of forward()", 0, 1),
    Box("AttentionCall", "layers/attending.py", "with the layer's options", 0, 2),
    Box("Call", "call/call.py", "one attention call", 0.5, 3),
    Box("CallCache", "call/cache.py", "launches of repeated calls", 1.5, 3),
    Box("Arguments", "backends/operators.py", "the operators' flat list", 0.5, 4),
    Box("AttentionSpec", "call/spec.py", "decides the backend", 1.5, 4),
    Box("Key", "backends/_triton/launching/layouts.py", "Arguments without addresses", 0.5, 5),
    Box("Launch", "backends/_triton/launching/launch.py", "a kernel and its arguments", 0.5, 6),
)
CALL_ARROWS = (
    Arrow("GroupedQueryAttention", "Inputs"),
    Arrow("Inputs", "AttentionCall"),
    Arrow("AttentionCall", "Call"),
    Arrow("attention", "Call"),
    Arrow("Call", "CallCache", "repeated"),
    Arrow("Call", "AttentionSpec", "checked()"),
    Arrow("Call", "Arguments", "flat()"),
    Arrow("Arguments", "Key", "key_of()"),
    Arrow("Key", "Launch", "plan, cached"),
)
CACHE = (
    Box("KVCache", "cache/kv_cache.py", "steps as transactions", 0.5, 0),
    Box("SequenceHandle", "cache/pages.py", "names one sequence", 1.5, 0),
    Box("KVLayout", "kv.py", "what one token stores", -0.5, 0),
    Box("Sequences", "cache/sequences.py", "all allocators in step", 1.5, 1),
    Box("StepBuffers", "cache/step.py", "tables and lengths on the GPU", 0.5, 1),
    Box("LayerCache", "cache/layer_cache.py", "planes of pages of one layer", -0.5, 1),
    Box("PageAllocator", "cache/pages.py", "owners of each page", 1.5, 2),
    Box("KVView", "kv.py", "planes, table, lengths, route", 0, 2),
    Box("Route", "kv.py", "shards or shared prefixes", 0, 3),
    Box("cached_attention", "functional.py", "reads the view", 1, 3),
)
CACHE_ARROWS = (
    Arrow("KVCache", "SequenceHandle", "admit()"),
    Arrow("KVLayout", "KVCache"),
    Arrow("KVLayout", "LayerCache"),
    Arrow("KVCache", "StepBuffers", "step()"),
    Arrow("SequenceHandle", "Sequences"),
    Arrow("Sequences", "PageAllocator", "reserve()"),
    Arrow("StepBuffers", "KVView"),
    Arrow("LayerCache", "KVView", "append()"),
    Arrow("KVView", "Route", "None for most"),
    Arrow("KVView", "cached_attention"),
)


def svg(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    """Return the picture of these boxes and arrows."""
    left = min(box.column for box in boxes)
    placed = {box.name: box._replace(column=box.column - left) for box in boxes}
    width = max(x for x, _ in (box.corner for box in placed.values())) + WIDTH + MARGIN
    height = max(y for _, y in (box.corner for box in placed.values())) + HEIGHT + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker>',
        *(line for arrow in arrows for line in _arrow(placed[arrow.start], placed[arrow.stop], arrow.label)),
        *(line for box in placed.values() for line in _box(box)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(box: Box) -> list[str]:
    (x, y), middle = box.corner, box.corner[0] + WIDTH / 2
    texts = ((box.name, INK, "bold"), (box.text, INK, "normal"), (box.file, QUIET, "normal"))
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{FILL}" '
        f'stroke="{QUIET}"/>',
        *(
            f'<text x="{middle:g}" y="{y + 24 + n * LINE:g}" text-anchor="middle" fill="{color}" '
            f'font-weight="{weight}" font-size="{12 if text == box.file else 14}">{escape(text)}</text>'
            for n, (text, color, weight) in enumerate(texts)
        ),
    ]


def _arrow(start: Box, stop: Box, label: str) -> list[str]:
    """A line between facing edges: sideways within a row, otherwise from the lower edge to the upper one."""
    (x0, y0), (x1, y1) = start.corner, stop.corner
    if start.row == stop.row:
        a, b = (x0 + WIDTH, y0 + HEIGHT / 2), (x1, y1 + HEIGHT / 2)
    else:
        shift = 40 * (stop.column > start.column) - 40 * (stop.column < start.column)
        a, b = (x0 + WIDTH / 2 + shift, y0 + HEIGHT), (x1 + WIDTH / 2 - shift, y1)
    line = f'<path d="M{a[0]:g} {a[1]:g}L{b[0]:g} {b[1]:g}" stroke="{QUIET}" marker-end="url(#tip)"/>'
    at = ((a[0] + b[0]) / 2 + 6 * (start.row != stop.row), (a[1] + b[1]) / 2 - 5 * (start.row == stop.row))
    anchor = "middle" if start.row == stop.row else "start"
    text = f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" fill="{QUIET}" font-size="12">'
    return [line, *([f"{text}{escape(label)}</text>"] if label else [])]


PICTURES = {"call.svg": svg(CALL, CALL_ARROWS), "cache.svg": svg(CACHE, CACHE_ARROWS)}


def main() -> None:
    """Write both pictures."""
    for name, picture in PICTURES.items():
        (FOLDER / name).write_text(picture)
        print(f"wrote {FOLDER / name}")


if __name__ == "__main__":
    main()
