"""Errors of a head merge, measured by their effect on scores and on the output of the layer."""

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads
from .distances import Distances
from .parts import query_metric, values_of
from .principal import Merged


def relative_errors(
    heads: Heads, merged: Merged, stored: Heads, calibration: Calibration
) -> tuple[float, float]:
    """Return the relative errors of keys and values that are caused by replacing ``heads`` with ``stored``.

    The maps in ``merged`` restore the old heads from ``stored``, to compare them with ``heads``. Each error
    is a root mean square over the calibration (for keys, also over distances), relative to the error of
    dropping all heads.
    """
    k = stored.k.repeat_interleave(len(heads.k) // len(stored.k), 0)
    eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    maps = eye if merged.keys is None else merged.keys.maps[:, 0]
    metric, rotated = query_metric(heads, calibration), Distances.of(heads, merged.reach).rotated
    old, across, new = (
        rotated(a @ calibration.moment @ b.mT) for a, b in ((heads.k, heads.k), (heads.k, k), (k, k))
    )
    missed = old - 2 * across @ maps.mT + maps @ new @ maps.mT
    keys = relative_root(torch.einsum("gde,ged->", metric, missed), torch.einsum("gde,ged->", metric, old))
    values, v = values_of(heads), stored.v.repeat_interleave(len(heads.k) // len(stored.k), 0)[:, None]
    if merged.values is not None:
        v = merged.values.maps @ v
    return keys, relative_root(values.lost(v, calibration), values.size(calibration))


def relative_root(lost: Tensor, whole: Tensor) -> float:
    """Return the square root of ``lost / whole``, or 0 if both are 0."""
    return float((lost.clamp(min=0) / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt())
