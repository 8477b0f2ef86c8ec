"""Plan the launches of a forward whose mask selects keys by lists."""

from math import prod

from ....call.spec import AttentionSpec
from ....fp8 import E4M3
from ..launching.config import LaunchConfig, power_of_two
from ..launching.launch import Launch
from . import tables
from .shapes import DenseShapes


def unsupported(spec: AttentionSpec) -> list[str]:
    """Return the reasons why no kernel computes the lists of a call with this spec."""
    given = {
        "with gradients": spec.grad,
        "with dropout": spec.dropout,
        "in fp8": spec.kind != "cached" and E4M3 in (spec.dtype, spec.compute_dtype),
        "in attention_weights and attention_maxima": spec.statistic,
    }
    lacking = [name for name, is_given in given.items() if is_given]
    return [f"has no kernels yet for masks.selected() {name}; use backend='torch'" for name in lacking]


def forward(x: DenseShapes, indices: tuple[int, ...], block_size: int) -> tuple[tuple[Launch, ...], int]:
    """Return the launches of a forward, and the size of the buffer ``lists`` in int32 values.

    ``indices`` is the shape of the lists, ``[b, s, c, n]`` or packed ``[t, c, n]``.
    """
    from ..kernels.selected.forward import selected_forward
    from ..kernels.selected.lists import list_blocks

    *tokens, planes, slots = indices
    rows = x.h // max(planes, x.g)  # query heads that share a list and a KV head
    tiles = tables.selected(x.case, rows=rows, block_size=block_size)
    more = {"planes": planes, "slots": slots, "rows": rows, "BLOCK_SIZE": block_size}
    queries = x.s + x.batch + 1 if x.packed else x.batch * x.s
    entries = LaunchConfig(power_of_two(slots), 0, 1, 4)
    units = x.h // rows * -(-rows // tiles.block_m)
    launches = (
        x.launch(list_blocks, queries * planes, entries, more),
        x.launch(selected_forward, queries * units, tiles, more),
    )
    return launches, prod(tokens) * planes * (slots + 1)
