"""FlashAttention as first published, forward and backward.

See Dao, Fu, Ermon, Rudra and Re, 2022, arXiv 2205.14135. The outer loop runs over tiles j of keys and the
inner loop over tiles i of queries. Every inner step therefore reads and writes data of its queries again: the
output and its statistics in the forward, and dQ in the backward. Tiles in which all pairs are hidden are
skipped, as in the paper's block-sparse algorithm 5. Notation: the paper's m is our c, l is pi, D_i is u_i,
and B_r and B_c are ``rows`` and ``columns``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .pairs import Pairs
from .softmax import advance, divide, exponentials
from .traffic import SlowMemory, tiles


class Flash1Saved(NamedTuple):
    """The tensors that the backward needs: q, k, v, the output o, and the statistics c and pi of each row."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    c: Tensor
    pi: Tensor


def tile_sizes(on_chip: int, d: int) -> tuple[int, int]:
    """Return the rows and columns of tiles, four of which fill a fast memory of ``on_chip`` elements.

    >>> tile_sizes(49_152, 64)
    (64, 192)
    """
    columns = -(-on_chip // (4 * d))
    return min(columns, d), columns


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, *, rows: int, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[s, e]``, row maxima c ``[s]`` and normalisers pi ``[s]`` (algorithm 2 of the paper).

    The LSE is c + log pi.
    """
    q, k, v = memory.inputs(q, k, v)
    (s, _), (t, e) = q.shape, v.shape
    o = memory.output(q, s, e, fill=0.0)
    c, pi = memory.scratch(q, s, fill=-torch.inf), memory.scratch(q, s, fill=0.0)
    for j in tiles(t, columns):
        k_j, v_j = k[j], v[j]
        for i in pairs.seeing(j, rows):
            pi_i = pi[i]
            c[i], pi_new, alpha, p_ij = advance(c[i], pi_i, pairs.scores(q[i], k_j, i, j))
            # The stored output is normalised, so undo the old normaliser, add, and apply the new one.
            total = (alpha * pi_i)[:, None] * o[i] + pairs.sum_keys(pairs.drop(p_ij, i, j), v_j, i, j)
            o[i], pi[i] = divide(total, pi_new), pi_new
    return o.tensor, c.tensor, pi.tensor


def backward(
    saved: Flash1Saved, do: Tensor, pairs: Pairs, *, rows: int, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; recompute P tile by tile (algorithm 4 of the paper).

    ``do`` is the gradient of the output. The gradient of a score needs the row sum u = rowsum(P * dP), which
    spans several tiles. It is computed as rowsum(dO * O) instead, which is equal.
    """
    q, k, v, o, c, pi, do = memory.inputs(*saved, do)
    dq, dk, dv = memory.output(q, *q.shape, fill=0.0), memory.output(k, *k.shape), memory.output(v, *v.shape)
    for j in tiles(k.shape[0], columns):
        k_j, v_j = k[j], v[j]
        dk_j, dv_j = dk.tile(*k_j.shape), dv.tile(*v_j.shape)
        for i in pairs.seeing(j, rows):
            q_i, do_i = q[i], do[i]
            p_ij = divide(exponentials(pairs.scores(q_i, k_j, i, j), c[i]), pi[i])
            dv_j += pairs.sum_queries(pairs.drop(p_ij, i, j), do_i, i, j)
            u_i = (do_i * o[i]).sum(1, keepdim=True)
            ds_ij = p_ij * (pairs.drop(do_i @ v_j.T, i, j) - u_i)
            dq[i] += pairs.scale * pairs.sum_keys(ds_ij, k_j, i, j)
            dk_j += pairs.scale * pairs.sum_queries(ds_ij, q_i, i, j)
        dk[j], dv[j] = dk_j, dv_j
    return dq.tensor, dk.tensor, dv.tensor
