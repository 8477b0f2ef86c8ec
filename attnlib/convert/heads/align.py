"""Turning heads towards each other without changing what the layer computes.

Attention reads a value head only through o and a key head only through dot products with queries, so a
rotation of a head that its partner undoes is free (Jin et al., 2024, arXiv 2412.20677). V and O take any
orthogonal matrix. Q and K take what commutes with rope: one phase for each rotated pair, and any orthogonal
matrix of the channels that are not rotated. Norms of q and k lie in between, and pass on only what their
gains do not see.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..calibration import Calibration
from ..weights import Heads, rows_of

Align = Literal["none", "values", "all"]
SWEEPS = 1_000  # of coordinate ascent at most; most end after fewer than twenty
GROWTH = 1e-5  # of the agreement in a sweep: less ends the climb
TIE = 1e-10  # of the largest singular value: above the rounding of moments, below what activations show


def turn_values(heads: Heads, turns: Tensor) -> Heads:
    """The same function with value head ``g`` turned by the orthogonal ``turns[g]``; ``[g, d, d]``."""
    o = torch.einsum("mhe,hde->mhd", heads.o, turns.repeat_interleave(heads.group, 0))
    return replace(heads, v=turns @ heads.v, o=o)


def turn_keys(heads: Heads, phases: Tensor, turns: Tensor) -> Heads:
    """The same function with key head ``g`` and its queries turned.

    ``phases`` complex ``[g, p / 2]`` of absolute value 1 turn the pairs that rope rotates, whatever its
    layout, and the orthogonal ``turns`` ``[g, n, n]`` the other channels.

    Raises:
        ValueError: gains of q_norm or k_norm that a turn would not pass.
    """
    check_gains(heads)

    def turned(rows: Tensor, phases: Tensor, turns: Tensor) -> Tensor:
        pairs = heads.pairs(rows) * phases[..., None]
        rotated = rows_of(pairs, interleaved=heads.rope is not None and heads.rope.interleaved)
        return torch.cat((rotated, turns @ rows[:, heads.rotated :]), 1)

    k = turned(heads.k, phases, turns)
    return replace(
        heads, k=k, q=turned(heads.q, *(x.repeat_interleave(heads.group, 0) for x in (phases, turns)))
    )


def check_gains(heads: Heads) -> None:
    """Refuse to turn keys under norms with gains that differ where channels would be mixed.

    A turn keeps the root mean square that q_norm and k_norm divide by. It commutes with their gains only
    where these are equal: within each rotated pair, and over all channels that are not rotated. Gains of each
    head's own come with norms that subtract a mean, or go over all heads, and are not turned.

    Raises:
        ValueError: with the reason.
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
        f"align: q_norm and k_norm have gains that differ {where}, so that turning keys would change the "
        "function; "
        'use align="values"'
    )


def align(heads: Heads, groups: int, calibration: Calibration, what: Align) -> Heads:
    """The same function, with the heads of each of ``groups`` runs of neighbours turned towards each other.

    ``what`` is turned: nothing, values, or keys and values. The agreement that grows is the sum over pairs of
    heads of ``E <x_i, x_j>``, x being keys before rope or values; its maximum for two heads is orthogonal
    Procrustes (Schoenemann, 1966), for more it is climbed a head at a time (generalised Procrustes; Gower,
    1975).

    Raises:
        ValueError: an unknown ``what``, or gains as in :func:`check_gains`.
    """
    check_align(what)
    if what == "none":
        return heads

    def turns(rows: Tensor) -> Tensor:
        """``[g, c, d, m + 1]`` to the unitary ``[g, c, d, d]``."""
        rows = rows.unflatten(0, (groups, -1))
        moments = _moments(rows, rows, calibration, "gfcdm,gkcem->gcfkde")
        return towards_each_other(moments).movedim(1, 2).flatten(0, 1)

    heads = turn_values(heads, turns(heads.v[:, None])[:, 0])
    if what == "values":
        return heads
    phases = turns(heads.pairs(heads.k)[:, :, None])[:, :, 0, 0]
    return turn_keys(heads, phases, turns(heads.k[:, None, heads.rotated :])[:, 0])


def towards_each_other(moments: Tensor) -> Tensor:
    """Unitary ``[..., f, d, d]`` that raise the agreement of f vectors with ``moments[i, j] = E x_i x_j^H``.

    ``moments`` is ``[..., f, f, d, d]``, real or complex. The first vector stays. Never less agreement than
    untouched.
    """
    f, d = moments.shape[-3], moments.shape[-1]
    untouched = torch.eye(d, dtype=moments.dtype, device=moments.device).expand(*moments.shape[:-4], f, d, d)
    turns, reached = untouched.clone(), None
    for sweep in range(SWEEPS):
        for i in range(1, f):
            # At first only towards those that have been turned already: the rest would pull in all
            # directions.
            others = [j for j in range(f) if j < i or (sweep and j != i)]
            turns[..., i, :, :] = polar((turns[..., others, :, :] @ moments[..., others, i, :, :]).sum(-3))
        before, reached = reached, agreement(moments, turns)
        if before is not None and not (reached > before + GROWTH * before.abs()).any():
            break
    better = reached >= agreement(moments, untouched)
    return torch.where(better[..., None, None, None], turns, untouched)


def agreement(moments: Tensor, turns: Tensor) -> Tensor:
    """``sum_ij E <R_i x_i, R_j x_j>``, real ``[...]``, for turns R ``[..., f, d, d]``."""
    turned = torch.einsum("...fde,...fkeb->...fkdb", turns, moments)
    return torch.einsum("...fkdb,...kdb->...", turned, turns.conj()).real


def polar(x: Tensor) -> Tensor:
    """The unitary factor of ``x`` ``[..., d, d]``: the R with the largest ``Re tr(R^H x)``, near identity in
    a tie.

    Directions that inputs never take are left unturned: rounding alone would turn them, and equal heads would
    differ.
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
    """How alike KV heads are after the best turn of each pair: ``[g, g]``, from -1 to 1, and 1 with
    themselves.

    The mean over keys and values of ``max E <R x_i, x_j> / sqrt(E |x_i|^2 E |x_j|^2)``, with R as ``what``
    permits.

    Raises:
        ValueError: an unknown ``what``.
    """
    check_align(what)
    values = _cosines([heads.v[:, None]], calibration, turned=what != "none")
    keys = [heads.pairs(heads.k)[:, :, None], heads.k[:, None, heads.rotated :]]
    return (values + _cosines(keys, calibration, turned=what == "all")) / 2


def _cosines(parts: list[Tensor], calibration: Calibration, *, turned: bool) -> Tensor:
    products = sum(torch.stack(list(_products(rows, calibration, turned=turned))) for rows in parts)
    products = (products + products.T) / 2
    size = products.diagonal().clamp(min=torch.finfo(products.dtype).tiny).sqrt()
    return products / size / size[:, None]


def _products(rows: Tensor, calibration: Calibration, *, turned: bool) -> Iterator[Tensor]:
    """Of each head of ``[g, c, d, m + 1]`` with all ``[g]``; one head at a time, for the sake of memory."""
    for one in rows:
        moments = _moments(one, rows, calibration, "cdm,gcem->gcde")
        if turned and moments.numel():
            yield torch.linalg.svdvals(moments).sum((-2, -1))
        else:
            yield moments.diagonal(dim1=-2, dim2=-1).sum((-2, -1)).real


def _moments(a: Tensor, b: Tensor, calibration: Calibration, equation: str) -> Tensor:
    return torch.einsum(equation, a @ calibration.moment.to(a.dtype), b.conj())


def check_align(what: str) -> None:
    """Refuse an unknown way to align."""
    if what not in get_args(Align):
        raise ValueError(f"align: expected one of {get_args(Align)}, got {what!r}")
