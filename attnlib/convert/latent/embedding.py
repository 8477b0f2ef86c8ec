"""Conversion of a grouped-query layer to a latent layer: exact, or with rope on only a few channels."""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ...rope.rope import Rope
from ...rope.selected import select
from ..calibration import Calibration
from ..weights import Heads, rows_of


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """The weights of a latent layer, split by heads, in fp64.

    The inputs have m channels; if a matrix has m + 1 columns, the last one is its bias.

    - ``q`` ``[h, d, m + 1]``: the old queries.
    - ``to_nope`` ``[h, n, d]``: map from q to the query channels that are not rotated.
    - ``to_rope`` ``[h, p, d]``: map from q to the rotated query channels; p is 0 without ``rope``.
    - ``down`` ``[r, m + 1]``: map from the inputs to the latent.
    - ``k_rope`` ``[p, m + 1]``: map from the inputs to the rotated key.
    - ``k_up`` ``[h, n, r]``, ``v_up`` ``[h, e, r]``: maps from the latent to the other keys and to values.
    - ``q_down`` ``[k, m]``: map from the inputs to the k channels of low-rank queries. If it is given, q maps
      from these channels instead of the inputs and is ``[h, d, k + 1]``.
    """

    q: Tensor
    to_nope: Tensor
    to_rope: Tensor
    down: Tensor
    k_rope: Tensor
    k_up: Tensor
    v_up: Tensor
    rope: Rope | None
    q_down: Tensor | None = None

    @property
    def q_nope(self) -> Tensor:
        """The map from inputs to the query channels that are not rotated: ``[h, n, m + 1]``."""
        return self.to_nope @ self.q

    @property
    def q_rope(self) -> Tensor:
        """The map from inputs to the rotated query channels: ``[h, p, m + 1]``."""
        return self.to_rope @ self.q


def embed(heads: Heads) -> Latent:
    """Convert the heads of a grouped-query layer to a latent layer that computes exactly the same.

    With g KV heads of d channels, p of which rope rotates, it has rank ``g * (2 * d - p)`` and ``g * p``
    rotary channels. If rope rotates all channels, the latent holds only the values and its rank is ``g * d``;
    without rope the rank is ``2 * g * d``.
    """
    g, pairs = len(heads.k), heads.rotated // 2
    bases = torch.eye(g, dtype=torch.complex128, device=heads.k.device).expand(pairs, g, g)
    return _select(heads, bases, torch.ones(pairs, g, dtype=torch.bool, device=heads.k.device))


def concentrate(heads: Heads, rope_dim: int, calibration: Calibration, *, reach: int) -> tuple[Latent, float]:
    """Return a latent layer that rotates only ``rope_dim`` key channels, and the error that this causes.

    Rope multiplies each pair of channels, seen as a complex number, by a phase. The phase of pair c is the
    same in all heads, so any unitary matrix may mix pair c across heads (Meng et al., 2025, TransMLA, arXiv
    2502.07864: RoRoPE). For each pair, the principal components over the heads concentrate the keys in few
    channels. Rotation is kept for the components that would lose most without it. The loss of a component is
    the mean square of its key, times that of its queries (Ji et al., 2025, MHA2MLA, arXiv 2502.14837), times
    ``1 - mean cos(w * distance)`` for the frequency w of its pair and distances up to ``reach``.

    The second result is the mean square error of the rotated keys over these distances, weighted by queries
    and relative to the keys' mean square. At distance 0 there is no error.

    Raises:
        ValueError: ``rope_dim`` is odd, less than 2, or more than the number of rotated channels.
    """
    widest = len(heads.k) * heads.rotated
    if not 2 <= rope_dim <= widest or rope_dim % 2:
        raise ValueError(
            f"rope_dim: expected an even number from 2 to {widest}, the rotary channels, got {rope_dim}"
        )
    moment = calibration.moment.to(torch.complex128)
    keys, queries = heads.pairs(heads.k), heads.pairs(heads.q)
    squares, vectors = torch.linalg.eigh(torch.einsum("gcm,fcm->cgf", keys @ moment, keys.conj()))
    bases = vectors.flip(-1).mH  # [c, component, g]
    query_energy = calibration.energy(queries[:, :, None]).unflatten(0, (len(heads.k), -1)).sum(1)  # [g, c]
    query_energy = torch.einsum("cag,gc->ca", bases.abs().square(), query_energy)
    length = reach if heads.rope.needs_length else None
    turn = heads.rope.inverse_frequencies(length=length, device=keys.device).double() * reach
    sizes = squares.flip(-1).clamp(min=0) * query_energy
    matters = sizes * (1 - torch.sinc(turn / torch.pi))[:, None]
    kept = torch.zeros_like(matters, dtype=torch.bool)
    kept.view(-1)[matters.flatten().sort(descending=True, stable=True).indices[: rope_dim // 2]] = True
    lost = 2 * matters[~kept].sum() / sizes.sum() if sizes.any() else sizes.sum()
    return _select(heads, bases, kept), lost.item()


def assemble(heads: Heads, bases: Tensor, kept: Tensor, rope: Rope | None) -> Latent:
    """Return a latent layer that rotates only the ``kept`` components of the keys.

    The channel pairs of the keys are divided into runs c of f consecutive pairs j. The components of a run
    are linear combinations of its pairs in all heads g: ``y_ca = sum_jg bases[c, a, j, g] * k_gcj``.
    ``bases`` ``[c, a, j, g]`` is unitary, so ``k_gcj = sum_a conj(bases[c, a, j, g]) * y_ca``. A query of
    head group g reads y_ca through ``sum_j bases[c, a, j, g] * q_cj``. ``kept`` ``[c, a]`` is True for
    components that remain rotated; pair i of ``rope`` rotates the i-th of them.
    """
    g, fold = len(heads.k), bases.shape[2]
    interleaved = rope is not None and rope.interleaved
    owner = torch.arange(len(heads.q), device=heads.q.device) // heads.group  # KV head of query head h
    old = torch.eye(heads.q.shape[1], dtype=heads.q.dtype, device=heads.q.device).expand(len(heads.q), -1, -1)
    queries = rearrange(heads.pairs(old), "h (c j) d -> h c j d", j=fold) * temperature(heads)
    components = torch.einsum(
        "cajg,gcjm->cam", bases, rearrange(heads.pairs(heads.k), "g (c j) m -> g c j m", j=fold)
    )

    run, component = kept.nonzero(as_tuple=True)
    met = rearrange(bases[run, component][..., owner], "kept j h -> h kept j")
    to_rope = rows_of((queries[:, run] * met[..., None]).sum(2), interleaved=interleaved)
    k_rope = rows_of(components[kept], interleaved=interleaved)

    # Components without rotation become ordinary key channels: map them back to the pairs of their runs.
    lost, component = (~kept).nonzero(as_tuple=True)
    still = (~kept).any(1).nonzero()[:, 0]
    back = rearrange(bases[lost, component][..., owner], "lost j h -> h j lost").conj()
    back = torch.where((still[:, None] == lost)[:, None], back[:, None], 0).flatten(1, 2)
    back = torch.cat((torch.cat((back.real, -back.imag), -1), torch.cat((back.imag, back.real), -1)), -2)
    rest, q_rest = components[~kept], queries[:, still].flatten(1, 2)
    free_k = heads.k[:, heads.rotated :]

    to_nope = torch.cat((q_rest.real, q_rest.imag, old[:, heads.rotated :]), 1)
    down = torch.cat((rest.real, rest.imag, free_k.flatten(0, 1), heads.v.flatten(0, 1)))
    values = _own(owner, g, heads.v.shape[1], down)
    k_up = [
        torch.block_diag(*parts) for parts in zip(back, _own(owner, g, free_k.shape[1], down), strict=True)
    ]
    k_up = torch.nn.functional.pad(torch.stack(k_up), (0, values.shape[-1]))
    v_up = torch.nn.functional.pad(values, (len(down) - values.shape[-1], 0))
    if not to_nope.shape[1]:  # a latent layer needs at least one key channel that is not rotated
        to_nope, k_up = to_nope.new_zeros(len(old), 1, old.shape[-1]), k_up.new_zeros(len(k_up), 1, len(down))
    return Latent(heads.q, to_nope, to_rope, down, k_rope, k_up, v_up, rope)


def _select(heads: Heads, bases: Tensor, kept: Tensor) -> Latent:
    """Call :func:`assemble` for runs of a single channel pair: ``bases`` is ``[c, a, g]``."""
    pairs = tuple(kept.nonzero()[:, 0].tolist())
    return assemble(heads, bases[:, :, None], kept, select(heads.rope, pairs) if pairs else None)


def _own(owner: Tensor, groups: int, width: int, like: Tensor) -> Tensor:
    """Return the map ``[h, width, g * width]`` that selects the channels of each query head's own group."""
    mine = torch.nn.functional.one_hot(owner, groups).to(like.dtype)
    eye = torch.eye(width, dtype=like.dtype, device=like.device)
    return torch.einsum("hg,de->hdge", mine, eye).flatten(-2)


def temperature(heads: Heads) -> float:
    """Return YaRN's temperature if the layer applies it to rotated query channels, otherwise 1.

    Only layers that rotate a part of each head apply it to q; in others it is part of the softmax scale.
    """
    partial = 0 < heads.rotated < heads.k.shape[1]
    return heads.rope.amplitude**2 if partial else 1.0
