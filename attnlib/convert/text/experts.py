"""Where a file has what transformers has in one tensor: the experts of a layer, which many files store one by
one.
"""

from collections.abc import Container, Iterator
from itertools import count
from types import MappingProxyType

RENAMED = (
    ("", ""),
    (".mlp.", ".block_sparse_moe."),
    (".router.weight", ".router.layer.weight"),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
)
SINGLE = MappingProxyType(
    {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
)

Parts = tuple[tuple[str, ...], ...]


def parts_of(name: str, stored: Container[str]) -> Parts | None:
    """The tensors in a file that make what transformers calls ``name``, one row of names for each expert.

    The tensors of a row are joined, one above the other, and several rows are stacked. One name alone is the
    tensor itself; None: the file has nothing of the kind.
    """
    for new, old in RENAMED:
        if name.replace(new, old) in stored:
            return ((name.replace(new, old),),)
    stem, _, joined = name.rpartition(".experts.")
    for parts in SINGLE.get(joined, ()):
        for place in (stem, stem.replace(".mlp", ".block_sparse_moe")):
            rows = tuple(_rows(f"{place}.experts.", parts, stored))
            if rows:
                return rows
    return None


def _rows(place: str, parts: tuple[str, ...], stored: Container[str]) -> Iterator[tuple[str, ...]]:
    """The names of one expert after another, up to the first of which one is missing."""
    for expert in count():
        row = tuple(f"{place}{expert}.{part}.weight" for part in parts)
        if not all(name in stored for name in row):
            return
        yield row
