"""Batch and heads: an algorithm of one head, run for each. On a device this loop is the grid."""

from collections.abc import Callable

from torch import Tensor

# Takes q [s, d], k [t, d], v [t, e], the sequence's number and the query head's; gives [s, e] and [s].
Algorithm = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def over_heads(algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[b, s, h, e]`` and LSE ``[b, h, s]`` of q ``[b, s, h, d]``, k ``[b, t, g, d]``, v ``[b, t, g,
    e]``.

    Query head h reads KV head h // (h / g). No result depends on another, so that with FlashAttention-2's
    tiles of queries there are b * h * ceil(s / rows) programs to run at once.
    """
    (b, s, h, _), group = q.shape, q.shape[2] // k.shape[2]
    out, lse = q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s)
    for n in range(b):
        for head in range(h):
            own = q[n, :, head], k[n, :, head // group], v[n, :, head // group]
            out[n, :, head], lse[n, head] = algorithm(*own, n, head)
    return out, lse
