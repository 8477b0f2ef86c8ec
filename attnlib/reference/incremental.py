"""Incremental attention, one chunk of keys after another (Rabe and Staats, 2021, arXiv 2112.05682).

A chunk has ``columns`` keys, and all queries process it at once. The scores therefore take O(s * columns)
extra memory instead of O(s t). Notation: the paper's m* is our running maximum ``c``, s* the normaliser
``pi``, and v* the unnormalised output.
"""

import torch
from torch import Tensor

from .pairs import Pairs
from .softmax import advance, divide
from .traffic import SlowMemory


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, *, columns: int, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[s, e]``, row maxima c ``[s]`` and normalisers pi ``[s]``; the LSE is c + log pi."""
    i, _ = pairs.whole
    q, k, v = memory.inputs(q, k, v)
    (s, _), (t, e) = q.shape, v.shape
    o = memory.output(q, s, e, fill=0.0)
    c, pi = memory.scratch(q, s, fill=-torch.inf), memory.scratch(q, s, fill=0.0)
    scores = memory.scratch(q, s, min(columns, t))
    for j in pairs.seen_by(i, columns):
        width = slice(0, j.stop - j.start)
        scores[:, width] = pairs.scores(q[:], k[j], i, j)
        c[:], pi[:], alpha, p_j = advance(c[:], pi[:], scores[:, width])
        o[:] = alpha[:, None] * o[:] + pairs.sum_keys(pairs.drop(p_j, i, j), v[j], i, j)
    o[:] = divide(o[:], pi[:])
    return o.tensor, c.tensor, pi.tensor
