"""Standard attention, forward and backward, with every intermediate result in slow memory.

Each step reads its operands once and writes its result once, which is the minimum for unfused steps. For q
``[s, d]``, k ``[t, d]`` and v ``[t, e]`` of one head, this moves Theta(s t) elements in addition to the
inputs and outputs, however large the fast memory is.
"""

import torch
from torch import Tensor

from .pairs import Pairs
from .softmax import advance, divide
from .traffic import SlowMemory


def forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, *, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    """Return output ``[s, e]`` and the probabilities ``[s, t]`` before dropout.

    S = scale Q K', P = softmax(S), O = (P * Z) V. The dropout factor Z is 0 for dropped pairs and
    1 / (1 - dropout_p) for others.
    """
    i, j = pairs.whole
    q, k, v = memory.inputs(q, k, v)
    o = memory.output(q, q.shape[0], v.shape[1])
    s, p = (memory.scratch(q, q.shape[0], k.shape[0]) for _ in range(2))
    s[:] = pairs.scores(q[:], k[:], i, j)
    p[:] = _softmax(s[:])
    o[:] = pairs.sum_keys(pairs.drop(p[:], i, j), v[:], i, j)
    return o.tensor, p.tensor


def backward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, do: Tensor, pairs: Pairs, *, memory: SlowMemory
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the output's gradient ``do`` and the saved probabilities p.

    dV = (P * Z)' dO, dP = (dO V') * Z, dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS' Q.
    Z is the dropout factor of :func:`forward`.
    """
    i, j = pairs.whole
    q, k, v, p, do = memory.inputs(q, k, v, p, do)
    dq, dk, dv = (memory.output(x, *x.shape) for x in (q, k, v))
    dp, ds = (memory.scratch(p, *p.shape) for _ in range(2))
    dv[:] = pairs.sum_queries(pairs.drop(p[:], i, j), do[:], i, j)
    dp[:] = pairs.hide(pairs.drop(do[:] @ v[:].T, i, j), i, j)
    ds[:] = _softmax_backward(p[:], dp[:])
    dq[:] = pairs.scale * pairs.sum_keys(ds[:], k[:], i, j)
    dk[:] = pairs.scale * pairs.sum_queries(ds[:], q[:], i, j)
    return dq.tensor, dk.tensor, dv.tensor


def _softmax(s: Tensor) -> Tensor:
    nothing = s.new_full(s.shape[:1], -torch.inf)
    _, pi, _, exponentials = advance(nothing, nothing.exp(), s)
    return divide(exponentials, pi)


def _softmax_backward(p: Tensor, dp: Tensor) -> Tensor:
    return p * (dp - (p * dp).sum(1, keepdim=True))
