"""Traffic of context parallelism in training: how many bytes a rank receives and retains per layer."""

from typing import NamedTuple

import torch

from ..internal.signatures import kind, leading_to
from .attention import LatentShape, Shape

FORMS = ("ring", "gather", "heads")


@leading_to("exchange_bytes(shape, tokens) makes it")
class Exchange(NamedTuple):
    """The bytes that one rank receives in a layer's forward and backward, and retains for the backward.

    ``kept`` counts keys and values, or latents from which a rank computes keys and values again.
    """

    forward: int
    backward: int
    kept: int


@kind
def exchange_bytes(shape: Shape, tokens: int, *, ranks: int, form: str, dtype: torch.dtype) -> Exchange:
    """Return the bytes that one rank receives and retains in one layer of context-parallel training.

    A sequence of ``tokens`` tokens is sharded over ``ranks`` ranks. ``form`` is the form of
    :class:`attnlib.parallel.ContextParallel`; in ``"ring"`` and ``"gather"``, MLA layers send their latents.
    With activation checkpointing, a layer receives its forward bytes twice.

    >>> from attnlib.sizes import GroupedShape
    >>> shape = GroupedShape(hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    >>> exchange_bytes(shape, 131072, ranks=8, form="gather", dtype=torch.bfloat16)
    Exchange(forward=469762048, backward=469762048, kept=536870912)

    Raises:
        ValueError: the form is unknown, a count is below 1, or the ranks cannot share the heads.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    if tokens < 1 or ranks < 1:
        raise ValueError(f"exchange_bytes: expected tokens and ranks of at least 1, got {tokens} and {ranks}")
    here, others = -(-tokens // ranks) * dtype.itemsize, ranks - 1
    sent, query, pair, output = _widths(shape)
    if form == "heads":
        if not shares_heads(shape, ranks):
            raise ValueError(
                f"form: expected heads that {ranks} ranks can share, got {shape.kind}; use another form"
            )
        exchanged = here * (query + pair + output) * others // ranks
        return Exchange(exchanged, exchanged, here * pair)
    received = here * sent * others
    if form == "gather":
        return Exchange(received, received, here * ranks * pair)
    # Gradients travel around the ring and back to their rank. All hops but the first and the last are in fp32
    # or wider.
    wide = max(4, dtype.itemsize) // dtype.itemsize
    gradients = here * sent * (2 + (ranks - 2) * wide) if others else 0
    return Exchange(received, received + gradients, here * sent)


def shares_heads(shape: Shape, ranks: int) -> bool:
    """True if ``ranks`` ranks can divide the query and KV heads evenly."""
    kv_heads = shape.num_heads if isinstance(shape, LatentShape) else shape.num_kv_heads
    return shape.num_heads % ranks == 0 and kv_heads % ranks == 0


def _widths(shape: Shape) -> tuple[int, int, int, int]:
    """Return the number of values per token in ring messages, queries, keys plus values, and outputs.

    Each number covers all heads.
    """
    heads = shape.num_heads
    if isinstance(shape, LatentShape):
        key = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        sent = shape.kv_lora_rank + shape.qk_rope_head_dim
        return sent, heads * key, heads * (key + shape.v_head_dim), heads * shape.v_head_dim
    pair = 2 * shape.num_kv_heads * shape.head_dim
    return pair, heads * shape.head_dim, pair, heads * shape.head_dim
