"""Apply an algorithm for one head to a batch with many heads; on a GPU, this loop would be the grid."""

from collections.abc import Callable

from torch import Tensor

# An algorithm takes q [s, d], k [t, d], v [t, e] and the indices of the sequence and the query head; it
# returns the output [s, e] and the LSE [s].
Algorithm = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


def over_heads(algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run an algorithm on each head; return output ``[b, s, h, e]`` and LSE ``[b, h, s]``.

    The inputs are q ``[b, s, h, d]``, k ``[b, t, g, d]`` and v ``[b, t, g, e]``; each KV head serves h / g
    query heads in a row. Heads are independent of each other, and so are the tiles of queries in
    FlashAttention-2, where b * h * ceil(s / rows) programs can run at the same time.
    """
    (b, s, h, _), group = q.shape, q.shape[2] // k.shape[2]
    out, lse = q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s)
    for n in range(b):
        for head in range(h):
            own = q[n, :, head], k[n, :, head // group], v[n, :, head // group]
            out[n, :, head], lse[n, head] = algorithm(*own, n, head)
    return out, lse
