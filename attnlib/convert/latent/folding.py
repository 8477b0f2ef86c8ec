"""Conversion of grouped-query to latent layers with ordinary rope, by merging similar frequencies."""

from dataclasses import replace

import torch
from einops import rearrange, repeat
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of
from .embedding import Latent, assemble
from .narrowed import narrowed


def even_queries(heads: Heads, calibration: Calibration) -> Heads:
    """Scale each key channel pair, and its queries inversely, so that all queries have equal mean square.

    The layer's output does not change. Errors in all key channels then have the same effect on scores. A key
    pair whose queries are small becomes small, but never 0.
    """
    energy = heads.pairs(calibration.energy(heads.q[:, :, None])[..., None])
    query_energy = (energy.real + energy.imag).unflatten(0, (len(heads.k), -1)).sum(1)  # [g, p / 2, 1]
    if not query_energy.any():
        return heads
    # The factors have a lower limit, because queries that are small here may be larger in another text.
    size = (query_energy / query_energy.mean()).clamp(min=1e-6).sqrt()
    size = rows_of(torch.complex(size, size), interleaved=heads.rope.interleaved)  # [g, p, 1]
    size = torch.nn.functional.pad(size, (0, 0, 0, heads.k.shape[1] - heads.rotated), value=1.0)
    return replace(heads, q=heads.q / size.repeat_interleave(heads.group, 0), k=heads.k * size)


def fold(heads: Heads, rope_dim: int, calibration: Calibration, *, reach: int) -> tuple[Latent, float]:
    """Return a latent layer whose rotary channels have an ordinary rope, and the error that this causes.

    The layer has ``rope_dim`` rotary channels.

    Let f be the number of old rotary channels for each new one. New pair i rotates like pair ``f * i`` of the
    old rope, see :func:`narrowed`. Each run of f old pairs, over all g heads, keeps one rotated component;
    the rest is no longer rotated (Meng et al., 2025, TransMLA, arXiv 2502.07864: FreqFold). The component is
    a linear combination of the run's ``f * g`` complex numbers, chosen for the least mean square error of
    keys over distances up to ``reach``. For f = 1 it is the first principal component. For f > 1, pairs that
    drift out of phase with the run's first pair within reach count less.

    The second result is the mean square error of the rotated keys over these distances, relative to their
    mean square. At distance 0 there is no error. After :func:`even_queries`, keys are weighted by their
    effect on scores.

    Raises:
        ValueError, NotImplementedError: as :func:`narrowed`.
    """
    rope, width, plain = heads.rope, heads.rotated, narrowed(heads.rope, rope_dim)
    runs, g = (rope_dim // 2, width // rope_dim), len(heads.k)
    keys = rearrange(heads.pairs(heads.k), "g (c j) m -> c (j g) m", c=runs[0])
    moments = keys @ calibration.moment.to(keys.dtype) @ keys.mH
    speeds = rope.inverse_frequencies(device=keys.device).double().unflatten(0, runs)
    # Averaged over distances, the error is E |rotated - folded|^2 = sum 2 (1 - cos) |k|^2 - u^H A u, where u
    # is the direction that keeps its rotation.
    alike = (
        _mean_cos(speeds - speeds[:, :1], reach)
        - _mean_cos(speeds[:, :1], reach)
        - _mean_cos(speeds, reach)
        + 1
    )
    alike = repeat(alike, "c j -> c (j g)", g=g)
    gains, vectors = torch.linalg.eigh((alike[:, :, None] + alike[:, None] - alike[:, :1, None]) * moments)
    bases = rearrange(vectors.flip(-1).mH, "c a (j g) -> c a j g", g=g)
    kept = torch.zeros(bases.shape[:2], dtype=torch.bool, device=keys.device)
    kept[:, 0] = True
    sizes = moments.diagonal(dim1=1, dim2=2).real
    turned = 2 * (1 - _mean_cos(speeds, reach)).repeat_interleave(g, 1) * sizes
    lost = (turned.sum() - gains[:, -1].sum()).clamp(min=0) / sizes.sum() if sizes.any() else sizes.sum()
    return assemble(heads, bases, kept, plain), lost.item()


def _mean_cos(speeds: Tensor, reach: int) -> Tensor:
    """Return the mean of ``cos(speed * distance)`` over distances up to ``reach``."""
    return torch.sinc(speeds * reach / torch.pi)
