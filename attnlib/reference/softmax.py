"""Softmax in three passes, in two and in one (Milakov and Gimelshein, 2018, arXiv 1805.02867).

Rows are independent; ``columns`` of each are read at a time. Their m is our running maximum ``c``, their d
our normaliser ``pi``. A row of nothing but -inf has seen nothing: it gives 0, and an LSE of -inf.
"""

import torch
from torch import Tensor

from .traffic import SlowMemory, tiles


def correction(old: Tensor, new: Tensor) -> Tensor:
    """What sums taken under the maximum ``old`` are multiplied by under ``new``: exactly 1 where it did not
    move.
    """
    # The selection matters while nothing has been seen: -inf - (-inf) is a NaN.
    return torch.where(old == new, 1, torch.exp(old - new))


def exponentials(x: Tensor, c: Tensor) -> Tensor:
    """exp(x - c), 0 where x is -inf whatever c is."""
    return torch.where(x == -torch.inf, 0, torch.exp(x - c[:, None]))


def divide(x: Tensor, pi: Tensor) -> Tensor:
    """x / pi, 0 in rows that have seen nothing."""
    return torch.where(pi[:, None] == 0, 0, x / pi[:, None])


def advance(c: Tensor, pi: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of the online softmax over columns ``x``: the new c and pi, the correction, and exp(x - c)."""
    new = torch.cat((c[:, None], x), 1).amax(1)
    p = exponentials(x, new)
    alpha = correction(c, new)
    return new, alpha * pi + p.sum(1), alpha, p


def three_pass(x: Tensor, *, columns: int, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    """Softmax and LSE ``[s]`` of x ``[s, t]``: the maximum, then the normaliser, then the result."""
    (x,) = memory.inputs(x)
    s, t = x.shape
    y, lse = memory.output(x, s, t), memory.output(x, s)
    c, pi = x.tile(s, fill=-torch.inf), x.tile(s)
    for j in tiles(t, columns):
        c = torch.maximum(c, x[:, j].amax(1))
    for j in tiles(t, columns):
        pi = pi + exponentials(x[:, j], c).sum(1)
    for j in tiles(t, columns):
        y[:, j] = divide(exponentials(x[:, j], c), pi)
    lse[:] = c + pi.log()
    return y.tensor, lse.tensor


def two_pass(x: Tensor, *, columns: int, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    """Softmax and LSE ``[s]`` of x ``[s, t]``: maximum and normaliser together (their algorithm 3), then the
    result.
    """
    (x,) = memory.inputs(x)
    s, t = x.shape
    y, lse = memory.output(x, s, t), memory.output(x, s)
    c, pi = x.tile(s, fill=-torch.inf), x.tile(s)
    for j in tiles(t, columns):
        c, pi, _, _ = advance(c, pi, x[:, j])
    for j in tiles(t, columns):
        y[:, j] = divide(exponentials(x[:, j], c), pi)
    lse[:] = c + pi.log()
    return y.tensor, lse.tensor


def one_pass(x: Tensor, v: Tensor, *, columns: int, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    """softmax(x) v ``[s, e]`` and LSE ``[s]`` of x ``[s, t]`` and v ``[t, e]``: the softmax itself is never
    there.
    """
    x, v = memory.inputs(x, v)
    (s, t), e = x.shape, v.shape[1]
    out, lse = memory.output(x, s, e), memory.output(x, s)
    c, pi, total = x.tile(s, fill=-torch.inf), x.tile(s), x.tile(s, e)
    for j in tiles(t, columns):
        c, pi, alpha, p = advance(c, pi, x[:, j])
        total = alpha[:, None] * total + p @ v[j]
    out[:] = divide(total, pi)
    lse[:] = c + pi.log()
    return out.tensor, lse.tensor
