"""Cost estimates of context parallelism, to choose between a ring, gathering and sharing heads."""

from typing import NamedTuple

import torch

from ..call.call import Call
from .heads import unshared
from .sharding import Sharing
from .source import KeyValueSource

NVLINK = 300e9  # bytes per second that a GPU receives from other GPUs of its host
FLOPS = 500e12  # FLOPs per second that 16-bit attention is assumed to reach
MEMORY = 3e12  # bytes per second that a GPU reads from or writes to its memory
# While a ring sends, its computation takes this much longer; only the last step sends nothing. On four H200,
# the forward at 128k tokens, without merging outputs, took 1.01 (GQA 32/8) and 1.07 (MLA 192/128) times as
# long as its computations alone (2026-11).
STALL = 0.07


class Costs(NamedTuple):
    """The selected form of context parallelism, and the estimated cost of one forward in each form.

    The cost is given as the bytes that a rank receives, and as the seconds that the forward takes.
    """

    form: str
    ranks: int
    received: dict[str, int]
    seconds: dict[str, float]

    def __str__(self) -> str:
        lines = (
            f"{x} {t * 1e3:.3g} ms, {self.received[x]:,} bytes received" for x, t in self.seconds.items()
        )
        return f"{self.form} over {self.ranks} ranks, estimated per forward: {'; '.join(lines)}"


def costs_of(
    call: Call, sharing: Sharing, source: KeyValueSource, *, form: str | None, bandwidth: float
) -> Costs:
    """Return the costs of all forms of context parallelism that the head counts allow.

    ``form=None`` selects the fastest form. A ring sends while it computes, which slows the computation, and
    merges outputs in fp32 after every step but the first.
    """
    q, others, k, v = call.q, sharing.ranks - 1, *_shapes(call, source)
    tokens, heads, width = q.shape[:-2].numel(), q.shape[-2], v[-1]
    sent = sum(x.numel() * x.element_size() for x in source.tensors)
    exchanged = tokens * (heads * (q.shape[-1] + width) + k[-2] * (k[-1] + width)) * q.element_size()
    received = {"ring": others * sent, "gather": others * sent, "heads": exchanged * others // sharing.ranks}
    if unshared(heads, k[-2], sharing.ranks):
        del received["heads"]
    pairs = tokens * q.shape[-3] * sharing.ranks * (1.0 if call.mask.band.right is None else 0.5)
    computed = 2 * pairs * heads * (q.shape[-1] + width) / FLOPS
    seconds = {name: computed + x / bandwidth for name, x in received.items()}
    slowed = computed * (1 + STALL * others / sharing.ranks)
    merged = others * 16 * tokens * heads * width / MEMORY
    seconds["ring"] = max(slowed, received["ring"] / bandwidth) + merged
    return Costs(form or min(seconds, key=seconds.__getitem__), sharing.ranks, received, seconds)


@torch.no_grad()
def _shapes(call: Call, source: KeyValueSource) -> tuple[torch.Size, torch.Size]:
    """Return the shapes that k and v have if they are cut down to one token."""
    k, v = source.expand(*(x.narrow(call.q.dim() - 3, 0, 1) for x in source.tensors))
    return k.shape, v.shape
