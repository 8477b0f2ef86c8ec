"""Softmax in three, two and one passes (Milakov and Gimelshein, 2018, arXiv 1805.02867).

Rows are independent of each other; an algorithm reads ``columns`` columns at a time. A row with only -inf (a
query that sees no key) has the result 0 and the LSE -inf. Notation: the paper's m is our running maximum
``c``, and d is our normaliser ``pi``.
"""

import torch
from torch import Tensor

from .traffic import SlowMemory, tiles


def correction(old: Tensor, new: Tensor) -> Tensor:
    """Return exp(old - new), which rescales sums to a new maximum; exactly 1 if both maxima are equal."""
    # If both maxima are -inf, their difference would be NaN.
    return torch.where(old == new, 1, torch.exp(old - new))


def exponentials(x: Tensor, c: Tensor) -> Tensor:
    """Return exp(x - c), but 0 where x is -inf, even if c is -inf too."""
    return torch.where(x == -torch.inf, 0, torch.exp(x - c[:, None]))


def divide(x: Tensor, pi: Tensor) -> Tensor:
    """Return x / pi, but 0 in rows whose normaliser pi is 0 because all of their scores are -inf."""
    return torch.where(pi[:, None] == 0, 0, x / pi[:, None])


def advance(c: Tensor, pi: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one step of the online softmax over the columns in ``x``.

    Return the new maximum c, the new normaliser pi, the factor that rescales earlier sums, and exp(x - c).
    """
    new = torch.cat((c[:, None], x), 1).amax(1)
    p = exponentials(x, new)
    alpha = correction(c, new)
    return new, alpha * pi + p.sum(1), alpha, p


def three_pass(x: Tensor, *, columns: int, memory: SlowMemory) -> tuple[Tensor, Tensor]:
    """Return softmax and LSE ``[s]`` of x ``[s, t]`` in three passes: maximum, normaliser, result."""
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
    """Return softmax and LSE ``[s]`` of x ``[s, t]`` in two passes.

    The first pass computes maximum and normaliser together (algorithm 3 of Milakov and Gimelshein). The
    second pass computes the result.
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
    """Return softmax(x) v ``[s, e]`` and LSE ``[s]`` for scores x ``[s, t]`` and values v ``[t, e]``.

    A single pass computes both without storing the softmax.
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
