"""FlashAttention-2, forward and backward (Dao, 2023, arXiv 2307.08691).

In the forward, each program processes one tile i of queries. It loops over the tiles j of keys, keeps an
unnormalised output on chip, and saves only L = c + log pi. The backward computes P = exp(S - L), in one of
two ways. With one pass, each program processes a tile of keys and adds to dQ (atomically if programs run at
the same time). With two passes, every result is written once, by one program. Programs skip tiles in which no
pair is visible. Notation: the paper's D is our u, and B_r and B_c are ``rows`` and ``columns``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .pairs import Pairs
from .softmax import advance, divide, exponentials
from .traffic import Array, SlowMemory, tiles


class Flash2Saved(NamedTuple):
    """The tensors that the forward saves for the backward: q, k, v, the output o, and the LSE."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor


class _Inputs(NamedTuple):
    """The inputs of a backward pass over tiles: q, k, v, the LSE, u, and the gradient of the output."""

    q: Array
    k: Array
    v: Array
    lse: Array
    u: Array
    do: Array


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, *, rows: int, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor]:
    """Compute attention of one head; return output ``[s, e]`` and LSE ``[s]`` (algorithm 1 of the paper)."""
    q, k, v = memory.inputs(q, k, v)
    s, e = q.shape[0], v.shape[1]
    o, lse = memory.output(q, s, e), memory.scratch(q, s)
    for i in tiles(s, rows):
        q_i = q[i]
        c_i, pi_i, o_i = o.tile(len(q_i), fill=-torch.inf), o.tile(len(q_i)), o.tile(len(q_i), e)
        for j in pairs.seen_by(i, columns):
            c_i, pi_i, alpha, p_ij = advance(c_i, pi_i, pairs.scores(q_i, k[j], i, j))
            o_i = alpha[:, None] * o_i + pairs.sum_keys(pairs.drop(p_ij, i, j), v[j], i, j)
        o[i], lse[i] = divide(o_i, pi_i), c_i + pi_i.log()
    return o.tensor, lse.tensor


def backward_one_pass(
    saved: Flash2Saved, do: Tensor, pairs: Pairs, *, rows: int, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in one pass over the tiles of pairs (algorithm 2 of the paper)."""
    q, k, v, o, lse, do = memory.inputs(*saved, do)
    u = _row_sums(o, do, rows, memory)
    dq = memory.output(q, *q.shape, fill=0.0)
    dk, dv = _pass_over_keys(_Inputs(q, k, v, lse, u, do), pairs, rows, columns, memory, add_to=dq)
    return dq.tensor, dk.tensor, dv.tensor


def backward_two_pass(
    saved: Flash2Saved, do: Tensor, pairs: Pairs, *, rows: int, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in two passes: one over tiles of keys, one over tiles of queries.

    Both passes compute P.
    """
    q, k, v, o, lse, do = memory.inputs(*saved, do)
    u = _row_sums(o, do, rows, memory)
    dq = memory.output(q, *q.shape)
    dk, dv = _pass_over_keys(_Inputs(q, k, v, lse, u, do), pairs, rows, columns, memory)
    for i in tiles(q.shape[0], rows):
        q_i, lse_i, u_i, do_i = q[i], lse[i], u[i], do[i]
        dq_i = dq.tile(*q_i.shape)
        for j in pairs.seen_by(i, columns):
            k_j = k[j]
            p_ij = exponentials(pairs.scores(q_i, k_j, i, j), lse_i)
            ds_ij = p_ij * (pairs.drop(do_i @ v[j].T, i, j) - u_i[:, None])
            dq_i += pairs.scale * pairs.sum_keys(ds_ij, k_j, i, j)
        dq[i] = dq_i
    return dq.tensor, dk.tensor, dv.tensor


def _pass_over_keys(
    inputs: _Inputs,
    pairs: Pairs,
    rows: int,
    columns: int,
    memory: SlowMemory,
    *,
    add_to: Array | None = None,
) -> tuple[Array, Array]:
    """Return dK and dV, computed one tile of keys at a time; also add to dQ if it is given as ``add_to``."""
    q, k, v, lse, u, do = inputs
    dk, dv = (memory.output(x, *x.shape) for x in (k, v))
    for j in tiles(k.shape[0], columns):
        k_j, v_j = k[j], v[j]
        dk_j, dv_j = dk.tile(*k_j.shape), dv.tile(*v_j.shape)
        for i in pairs.seeing(j, rows):
            q_i, do_i = q[i], do[i]
            p_ij = exponentials(pairs.scores(q_i, k_j, i, j), lse[i])
            ds_ij = p_ij * (pairs.drop(do_i @ v_j.T, i, j) - u[i][:, None])
            dv_j += pairs.sum_queries(pairs.drop(p_ij, i, j), do_i, i, j)
            dk_j += pairs.scale * pairs.sum_queries(ds_ij, q_i, i, j)
            if add_to is not None:
                add_to[i] += pairs.scale * pairs.sum_keys(ds_ij, k_j, i, j)
        dk[j], dv[j] = dk_j, dv_j
    return dk, dv


def _row_sums(o: Array, do: Array, rows: int, memory: SlowMemory) -> Array:
    """Return u = rowsum(dO * O), which all tiles of keys share."""
    u = memory.scratch(o, o.shape[0])
    for i in tiles(o.shape[0], rows):
        u[i] = (do[i] * o[i]).sum(1)
    return u
