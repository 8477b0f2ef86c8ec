"""The rope of fewer channels whose pairs turn as every f-th pair of another one, as DeepSeek's config can say
it.
"""

import math
from dataclasses import replace

import torch

from ...rope.rope import Rope, yarn_ramp
from ...rope.scaling import Linear, Llama3, YaRN

ROUNDING = 1e-6  # of an inverse frequency in fp32, relatively: some units in the last place


def narrowed(rope: Rope, dim: int) -> Rope:
    """The interleaved rope of ``dim`` channels whose pair i turns as pair ``f * i`` of ``rope``, f times as
    wide.

    Without scaling that is ``theta ** (-2 * i / dim) = theta ** (-2 * f * i / rope.dim)``, which linear and
    Llama 3 scaling look at alone. YaRN has a ramp over the pairs, whose ends are told as numbers of turns: a
    pair of either rope turns as often as its likes of the other, so that the ends keep their turns, unless
    rounding to whole pairs moves them. Its temperature is said as DeepSeek says it, of all channels: in
    ``latent_scale``, not ``amplitude``.

    Raises:
        ValueError: ``dim`` is not even or does not divide the channels that ``rope`` turns.
        NotImplementedError: a scaling that DeepSeek's config has not, or a ramp that its rules do not allow.
    """
    if dim < 2 or dim % 2 or rope.dim % dim:
        raise ValueError(f"rope_dim: expected an even divisor of {rope.dim}, the rotated channels, got {dim}")
    if not isinstance(rope.scaling, Linear | Llama3 | YaRN | None):
        raise NotImplementedError(
            "rope: expected none, Linear, Llama3 or YaRN, which DeepSeek-V3 can say of its few channels, "
            f"got {type(rope.scaling).__name__}; gqa_to_mla takes it, and --to attnlib"
        )
    scaling = _ramp(rope, rope.scaling, dim) if isinstance(rope.scaling, YaRN) else rope.scaling
    new = Rope(dim, theta=rope.theta, scaling=scaling, interleaved=True)
    wanted = rope.inverse_frequencies()[:: rope.dim // dim]
    if not torch.allclose(new.inverse_frequencies(), wanted, rtol=ROUNDING, atol=0.0):
        raise NotImplementedError(
            f"rope_dim: expected {rope.dim}, as YaRN's ramp ends where fewer channels have no pairs, got "
            f"{dim}"
        )
    return new


def _ramp(rope: Rope, yarn: YaRN, dim: int) -> YaRN:
    """YaRN whose ramp over ``dim`` channels begins and ends at an f-th of the pairs at which that of ``rope``
    does.

    Where these are whole, rounding finds them from the numbers of turns as they were, which are left then:
    vLLM and llama.cpp always round, and llama.cpp takes the numbers of every file for YaRN's own, 32 and 1.
    """
    f, new = rope.dim // dim, replace(yarn, attention_factor=None, mscale=1.0, mscale_all_dim=1.0)
    low, high = (pair / f for pair in yarn_ramp(rope, yarn))
    if yarn_ramp(Rope(dim, theta=rope.theta), yarn) == (low, high):
        return new
    fast, slow = (
        yarn.original_max_position / (2 * math.pi * rope.theta ** (2 * pair / dim)) for pair in (low, high)
    )
    return replace(new, beta_fast=max(fast, slow), beta_slow=slow, truncate=False)
