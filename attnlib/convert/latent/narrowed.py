"""A rope with fewer channels, whose pairs rotate like evenly spaced pairs of a given rope (DeepSeek-V3)."""

import math
from dataclasses import replace

import torch

from ...rope.rope import Rope, yarn_ramp
from ...rope.scaling import LinearScaling, Llama3Scaling, YaRNScaling

ROUNDING = 1e-6  # relative tolerance when comparing inverse frequencies, a few fp32 rounding errors


def narrowed(rope: Rope, dim: int) -> Rope:
    """Return the interleaved rope of ``dim`` channels whose pair i rotates like pair ``f * i`` of ``rope``.

    ``f`` is ``rope.dim / dim``. Without scaling, the frequencies agree because ``theta ** (-2 * i / dim) =
    theta ** (-2 * f * i / rope.dim)``. Linear and Llama 3 scaling depend only on the frequency, so they do
    not change. YaRN interpolates along a ramp over the pairs, whose ends are given as numbers of rotations.
    These numbers do not change either, unless rounding to whole pairs moves the ends. YaRN's temperature
    applies to all channels, as in DeepSeek's config: it is in ``latent_scale``, not in ``amplitude``.

    Raises:
        ValueError: ``dim`` is not even or does not divide the number of channels that ``rope`` rotates.
        NotImplementedError: the rope has several axes, or DeepSeek's config cannot represent its scaling or
            YaRN's ramp.
    """
    if dim < 2 or dim % 2 or rope.dim % dim:
        raise ValueError(f"rope_dim: expected an even divisor of {rope.dim}, the rotated channels, got {dim}")
    if rope.axes is not None:
        raise NotImplementedError(
            f"rope: expected one axis, as DeepSeek-V3's ropes have, got {rope.axes}; use gqa_to_mla"
        )
    if not isinstance(rope.scaling, LinearScaling | Llama3Scaling | YaRNScaling | None):
        raise NotImplementedError(
            "rope: expected no scaling, Linear, Llama3 or YaRN, which DeepSeek-V3's config can represent, "
            f"got {type(rope.scaling).__name__}; use gqa_to_mla or --to attnlib"
        )
    scaling = _ramp(rope, rope.scaling, dim) if isinstance(rope.scaling, YaRNScaling) else rope.scaling
    new = Rope(dim, theta=rope.theta, scaling=scaling, interleaved=True)
    if _has_same_ramp(rope, new):  # frequencies then differ by fp32 rounding, which a steep ramp amplifies
        return new
    wanted = rope.inverse_frequencies()[:: rope.dim // dim]
    if not torch.allclose(new.inverse_frequencies(), wanted, rtol=ROUNDING, atol=0.0):
        raise NotImplementedError(
            f"rope_dim: expected {rope.dim}, because YaRN's ramp ends beyond the last pair of fewer "
            f"channels, got {dim}"
        )
    return new


def _has_same_ramp(old: Rope, new: Rope) -> bool:
    """True if both ropes use YaRN, and their ramps have the same ends, as parts of all pairs."""
    if not isinstance(new.scaling, YaRNScaling):
        return False
    ends = zip(yarn_ramp(old, old.scaling), yarn_ramp(new, new.scaling), strict=True)
    return all(math.isclose(a / old.dim, b / new.dim, rel_tol=1e-12) for a, b in ends)


def _ramp(rope: Rope, yarn: YaRNScaling, dim: int) -> YaRNScaling:
    """Return YaRN for ``dim`` channels, with a ramp that is ``rope.dim / dim`` times shorter.

    Both ends of the ramp are pair indices, which are divided by this factor. The numbers of rotations that
    define the ends stay the same if YaRN's rounding then gives the same ends. This is preferable, because
    vLLM and llama.cpp always round, and llama.cpp assumes YaRN's defaults, 32 and 1, for every file.
    """
    f, new = rope.dim // dim, replace(yarn, attention_factor=None, mscale=1.0, mscale_all_dim=1.0)
    low, high = (pair / f for pair in yarn_ramp(rope, yarn))
    if yarn_ramp(Rope(dim, theta=rope.theta), yarn) == (low, high):
        return new
    fast, slow = (
        yarn.original_max_position / (2 * math.pi * rope.theta ** (2 * pair / dim)) for pair in (low, high)
    )
    return replace(new, beta_fast=max(fast, slow), beta_slow=slow, truncate=False)
