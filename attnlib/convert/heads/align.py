"""Alignment of attention heads: rotate them towards each other without changing the layer's output.

The output projection is the only reader of value heads, and queries are the only readers of key heads. If the
reader undoes a rotation of a head, the output does not change (Jin et al., 2024, arXiv 2412.20677). Values
can be rotated by any orthogonal matrix. Keys can be rotated only by matrices that commute with rope: one
phase for each rotated pair, and any orthogonal matrix for the other channels. If the layer has q_norm and
k_norm, the rotation must also commute with their weights.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of

Align = Literal["none", "values", "all"]
SWEEPS = 1_000  # maximum number of sweeps of coordinate ascent; fewer than twenty are usually enough
GROWTH = 1e-5  # the search stops if a sweep raises the agreement by less than this fraction
# Singular values below this fraction of the largest one count as zero. The threshold is above the rounding
# errors of second moments, and below the smallest singular values that matter in real activations.
TIE = 1e-10


def rotate_values(heads: Heads, rotations: Tensor) -> Heads:
    """Rotate the value heads by orthogonal ``rotations`` ``[g, d, d]``, and undo the rotations in o."""
    o = torch.einsum("mhe,hde->mhd", heads.o, rotations.repeat_interleave(heads.group, 0))
    return replace(heads, v=rotations @ heads.v, o=o)


def rotate_keys(heads: Heads, phases: Tensor, rotations: Tensor) -> Heads:
    """Rotate each key head together with its queries, without changing any score.

    ``phases`` ``[g, p / 2]``, complex numbers of absolute value 1, rotate the channel pairs that rope
    rotates, in either rope layout. The orthogonal ``rotations`` ``[g, n, n]`` rotate the other channels.

    Raises:
        ValueError: the weights of q_norm or k_norm do not commute with rotations of keys.
    """
    check_norm_weights(heads)

    def rotate(rows: Tensor, phases: Tensor, rotations: Tensor) -> Tensor:
        pairs = heads.pairs(rows) * phases[..., None]
        rotated = rows_of(pairs, interleaved=heads.rope is not None and heads.rope.interleaved)
        return torch.cat((rotated, rotations @ rows[:, heads.rotated :]), 1)

    k = rotate(heads.k, phases, rotations)
    return replace(
        heads, k=k, q=rotate(heads.q, *(x.repeat_interleave(heads.group, 0) for x in (phases, rotations)))
    )


def check_norm_weights(heads: Heads) -> None:
    """Raise ValueError if the weights of q_norm and k_norm do not commute with a rotation of the keys.

    A rotation does not change the root mean square by which q_norm and k_norm divide. It commutes with their
    weights only if the weights are equal within each rotated pair, and equal over all channels without rope.
    Norms with separate weights for each head are always an error: they subtract a mean or span all heads.

    Raises:
        ValueError: the weights differ; the message names the channels or heads.
    """
    if heads.gains is None:
        return
    gains = torch.stack([each[0] for each in heads.gains])
    paired = heads.pairs(gains[:, :, None])
    free = gains[:, heads.rotated :]
    if any(not each.equal(each[:1].expand_as(each)) for each in heads.gains):
        where = "between heads"
    elif not torch.equal(paired.real, paired.imag):
        where = "within a rotated pair"
    elif not torch.equal(free, free[:, :1].expand_as(free)):
        where = "between channels that are not rotated"
    else:
        return
    raise ValueError(
        f"align: q_norm and k_norm have weights that differ {where}, so rotating keys would change the "
        'output; use align="values"'
    )


def align(heads: Heads, groups: int, calibration: Calibration, what: Align) -> Heads:
    """Rotate the heads of each group towards each other without changing the layer's output.

    The heads are divided into ``groups`` runs of neighbours. ``what`` selects the heads to rotate: none,
    values, or keys and values. The rotations maximise the agreement: the sum of ``E <x_i, x_j>`` over pairs
    of heads in a group, where x is the key before rope or the value. For two heads, orthogonal Procrustes
    gives the maximum (Schoenemann, 1966). For more heads, coordinate ascent rotates one at a time
    (generalised Procrustes; Gower, 1975).

    Raises:
        ValueError: ``what`` is unknown, or :func:`check_norm_weights` raises it for the norm weights.
    """
    check_align(what)
    if what == "none":
        return heads

    def rotations(rows: Tensor) -> Tensor:
        """Return unitary matrices ``[g, c, d, d]`` that align heads, given as rows ``[g, c, d, m + 1]``."""
        rows = rows.unflatten(0, (groups, -1))
        moments = _moments(rows, rows, calibration, "gfcdm,gkcem->gcfkde")
        return towards_each_other(moments).movedim(1, 2).flatten(0, 1)

    heads = rotate_values(heads, rotations(heads.v[:, None])[:, 0])
    if what == "values":
        return heads
    phases = rotations(heads.pairs(heads.k)[:, :, None])[:, :, 0, 0]
    return rotate_keys(heads, phases, rotations(heads.k[:, None, heads.rotated :])[:, 0])


def towards_each_other(moments: Tensor) -> Tensor:
    """Return unitary matrices ``[..., f, d, d]`` that rotate f random vectors x towards each other.

    ``moments`` ``[..., f, f, d, d]``, real or complex, holds ``moments[i, j] = E x_i x_j^H``. The first
    vector is not rotated. The :func:`agreement` of the vectors is never lower than without rotations.
    """
    f, d = moments.shape[-3], moments.shape[-1]
    untouched = torch.eye(d, dtype=moments.dtype, device=moments.device).expand(*moments.shape[:-4], f, d, d)
    rotations, reached = untouched.clone(), None
    for sweep in range(SWEEPS):
        for i in range(1, f):
            # In the first sweep, align vector i only with earlier vectors. They are already aligned, and
            # later ones still point in arbitrary directions.
            others = [j for j in range(f) if j < i or (sweep and j != i)]
            rotations[..., i, :, :] = polar(
                (rotations[..., others, :, :] @ moments[..., others, i, :, :]).sum(-3)
            )
        before, reached = reached, agreement(moments, rotations)
        if before is not None and not (reached > before + GROWTH * before.abs()).any():
            break
    better = reached >= agreement(moments, untouched)
    return torch.where(better[..., None, None, None], rotations, untouched)


def agreement(moments: Tensor, rotations: Tensor) -> Tensor:
    """Return the agreement ``sum_ij E <R_i x_i, R_j x_j>`` of vectors x under rotations R."""
    rotated = torch.einsum("...fde,...fkeb->...fkdb", rotations, moments)
    return torch.einsum("...fkdb,...kdb->...", rotated, rotations.conj()).real


def polar(x: Tensor) -> Tensor:
    """Return the unitary factor of ``x`` ``[..., d, d]``: the R with the largest ``Re tr(R^H x)``.

    In directions that never occur in the inputs, R is close to the identity. Otherwise rounding errors would
    determine the rotation there, and equal heads would become different.
    """
    u, s, vh = torch.linalg.svd(x)
    determined = s > TIE * s[..., :1]
    if determined.all():
        return u @ vh
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    kept_u, kept_v = u * determined[..., None, :], vh.mH * determined[..., None, :]
    u, _, vh = torch.linalg.svd(kept_u @ kept_v.mH + (eye - kept_u @ kept_u.mH) @ (eye - kept_v @ kept_v.mH))
    return u @ vh


def similarity(heads: Heads, calibration: Calibration, what: Align) -> Tensor:
    """Return the similarity of each pair of KV heads after the best rotation: ``[g, g]``, from -1 to 1.

    The similarity is ``max E <R x_i, x_j> / sqrt(E |x_i|^2 E |x_j|^2)`` over all rotations R that ``what``
    permits, averaged over keys and values. The diagonal is 1.

    Raises:
        ValueError: ``what`` is unknown.
    """
    check_align(what)
    values = _cosines([heads.v[:, None]], calibration, rotated=what != "none")
    keys = [heads.pairs(heads.k)[:, :, None], heads.k[:, None, heads.rotated :]]
    return (values + _cosines(keys, calibration, rotated=what == "all")) / 2


def _cosines(parts: list[Tensor], calibration: Calibration, *, rotated: bool) -> Tensor:
    products = sum(torch.stack(list(_products(rows, calibration, rotated=rotated))) for rows in parts)
    products = (products + products.T) / 2
    size = products.diagonal().clamp(min=torch.finfo(products.dtype).tiny).sqrt()
    return products / size / size[:, None]


def _products(rows: Tensor, calibration: Calibration, *, rotated: bool) -> Iterator[Tensor]:
    """Yield each head's agreement ``[g]`` with every head; looping over heads saves memory."""
    for one in rows:
        moments = _moments(one, rows, calibration, "cdm,gcem->gcde")
        if rotated and moments.numel():
            yield torch.linalg.svdvals(moments).sum((-2, -1))
        else:
            yield moments.diagonal(dim1=-2, dim2=-1).sum((-2, -1)).real


def _moments(a: Tensor, b: Tensor, calibration: Calibration, equation: str) -> Tensor:
    return torch.einsum(equation, a @ calibration.moment.to(a.dtype), b.conj())


def check_align(what: str) -> None:
    """Raise ValueError if ``what`` is not a known alignment."""
    if what not in get_args(Align):
        raise ValueError(f"align: expected one of {get_args(Align)}, got {what!r}")
