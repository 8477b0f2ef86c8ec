"""Loop over batch and heads around an algorithm of one head; on a device this loop is the grid."""

from collections.abc import Callable

from torch import Tensor

# Arguments: q [s, d], k [t, d], v [t, e], sequence number, query head number. Returns output [s, e], LSE [s].
Algorithm = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def over_heads(algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output ``[b, s, h, e]`` and LSE ``[b, h, s]`` of an algorithm that runs on each head.

    The inputs are q ``[b, s, h, d]``, k ``[b, t, g, d]`` and v ``[b, t, g, e]``; query head n reads KV head n
    // (h / g). All results are independent, so with FlashAttention-2's tiles of queries b * h * ceil(s /
    rows) programs can run at once.
    """
    (b, s, h, _), group = q.shape, q.shape[2] // k.shape[2]
    out, lse = q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s)
    for n in range(b):
        for head in range(h):
            own = q[n, :, head], k[n, :, head // group], v[n, :, head // group]
            out[n, :, head], lse[n, head] = algorithm(*own, n, head)
    return out, lse
