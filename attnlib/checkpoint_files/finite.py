"""Weights that are not numbers."""

import torch


def count_nonfinite(x: torch.Tensor) -> dict[str, int]:
    """Count the ``nan`` and ``inf`` of a tensor; empty if it has none, or is not of a floating dtype."""
    if not x.dtype.is_floating_point or not x.numel():
        return {}
    if x.dtype.itemsize == 1:
        x = x.float()  # little is defined on eight bits
    # NaN and infinity show in the extremes, which are found twenty times as fast as every element is asked.
    if all(extreme.isfinite() for extreme in torch.aminmax(x)):
        return {}
    counts = {"nan": int(x.isnan().sum()), "inf": int(x.isinf().sum())}
    return {kind: count for kind, count in counts.items() if count}
