"""Find the stored tensors of mixture-of-experts layers, which transformers stacks into one."""

from collections.abc import Container, Iterator
from itertools import count
from types import MappingProxyType

RENAMED = (
    ("", ""),
    (".mlp.", ".block_sparse_moe."),
    (".router.weight", ".router.layer.weight"),
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".mlp.router.weight", ".block_sparse_moe.gate.weight"),
    (".mlp.gate.", ".mlp."),
    (".mlp.gate.", ".mlp.router.gate."),
    (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
)
SINGLE = MappingProxyType(
    {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
)

Parts = tuple[tuple[str, ...], ...]


def parts_of(name: str, stored: Container[str]) -> Parts | None:
    """Return the names of the stored tensors that make up transformers' tensor ``name``.

    The result has one row of names for each expert: concatenate the tensors of each row and stack the rows. A
    single name means that the file has the tensor itself; None means that it has no matching tensors.
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
    """Yield a row of tensor names for each expert, until an expert's tensors are not all stored."""
    for expert in count():
        row = tuple(f"{place}{expert}.{part}.weight" for part in parts)
        if not all(name in stored for name in row):
            return
        yield row
