"""Formulas for the memory traffic of each attention algorithm; ``SlowMemory`` counts the same numbers.

The traffic of FlashAttention depends on its tiles only through ``TileVisits``. Without a mask, it reads all s
queries for each of t / columns tiles of keys. If its tiles fill a fast memory of M elements, the forward
over T tokens moves Theta(T**2 d**2 / M) elements; standard attention moves Theta(T**2 + T d) (Dao et al.,
2022, arXiv 2205.14135, theorem 2). FlashAttention therefore moves fewer elements if d**2 is much smaller
than M.
"""

from typing import NamedTuple

from .traffic import Traffic


class ProblemSizes(NamedTuple):
    """The sizes of one head: ``s`` queries and ``t`` keys of ``d`` channels, and values of ``e`` channels."""

    s: int
    t: int
    d: int
    e: int


class TileVisits(NamedTuple):
    """The numbers of queries and keys that an algorithm reads, summed over all tiles that it processes.

    The constructors ``full`` (no mask) and ``causal`` give exact numbers. For other masks, ``full`` gives an
    upper bound, since it counts every tile.
    """

    queries: int
    keys: int

    @classmethod
    def full(cls, sizes: ProblemSizes, rows: int, columns: int) -> "TileVisits":
        return cls(_tiles(sizes.t, columns) * sizes.s, _tiles(sizes.s, rows) * sizes.t)

    @classmethod
    def causal(cls, length: int, tile: int) -> "TileVisits":
        """Return the visits under a causal mask with square tiles.

        With n = length / tile, n (n + 1) / 2 tiles are processed. The sequence has as many queries as keys,
        and ``tile`` must divide its length.
        """
        if length % tile:
            raise ValueError(f"causal: expected a tile that divides length={length}, got {tile}")
        n = length // tile
        return cls(tile * n * (n + 1) // 2, tile * n * (n + 1) // 2)


def matmul(s: int, m: int, t: int, tile: int) -> Traffic:
    """Return the memory traffic of a tiled product of matrices ``[s, m]`` and ``[m, t]``.

    If all three sizes are n and the tile divides n, this is 2 n**3 / tile reads and n**2 writes.
    """
    return Traffic(_tiles(t, tile) * s * m + _tiles(s, tile) * m * t, s * t)


def three_pass(s: int, t: int) -> Traffic:
    """Return the traffic of the three-pass softmax: three reads and one write per score, and the LSE."""
    return Traffic(3 * s * t, s * t + s)


def two_pass(s: int, t: int) -> Traffic:
    """Return the traffic of the two-pass softmax: two reads and one write per score, and the LSE."""
    return Traffic(2 * s * t, s * t + s)


def one_pass(s: int, t: int, e: int) -> Traffic:
    """Return the traffic of the one-pass softmax, which also multiplies by the values.

    It reads each score and each value once, and writes the output and the LSE.
    """
    return Traffic(s * t + t * e, s * e + s)


def standard_forward(sizes: ProblemSizes) -> Traffic:
    """Return the traffic of the forward of standard attention: Q K', the softmax, and P V."""
    s, t, d, e = sizes
    return Traffic((s + t) * d + s * t + s * t + t * e, s * t + s * t + s * e, extra=2 * s * t)


def standard_backward(sizes: ProblemSizes) -> Traffic:
    """Return the traffic of the backward of standard attention: dV, dP, dS, dQ and dK.

    Matrices as large as the scores are read five times and written twice.
    """
    s, t, d, e = sizes
    read = (s * t + s * e) + (s + t) * e + 2 * s * t + (s * t + t * d) + (s * t + s * d)
    return Traffic(read, t * e + s * t + s * t + s * d + t * d, extra=2 * s * t)


def incremental_forward(sizes: ProblemSizes, visits: TileVisits, columns: int) -> Traffic:
    """Return the traffic of incremental attention, where a single tile contains all queries.

    Each visit of a tile reads q, k, v, o, c and pi, writes o, c and pi, and writes and reads the scores.
    """
    s, t, d, e = sizes
    scores = s * visits.keys
    read = visits.queries * (d + e + 2) + visits.keys * (d + e) + scores + s * (e + 1)
    return Traffic(read, (s + visits.queries) * (e + 2) + scores + s * e, extra=s * (min(columns, t) + 2))


def flash1_forward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Return the traffic of FlashAttention's forward.

    Keys and values are read once; each visit of a tile reads q, o, c and pi, and writes o, c and pi.
    """
    s, t, d, e = sizes
    return Traffic(t * (d + e) + visits.queries * (d + e + 2), (s + visits.queries) * (e + 2), extra=2 * s)


def flash1_backward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Return the traffic of FlashAttention's backward.

    Keys and values are read once; each visit of a tile reads q, o, do, dq, c and pi, and writes dq.
    """
    s, t, d, e = sizes
    return Traffic(t * (d + e) + visits.queries * (2 * d + 2 * e + 2), (s + visits.queries) * d + t * (d + e))


def flash2_forward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Return the traffic of FlashAttention-2's forward.

    Queries are read once, each visit of a tile reads k and v, and the output and the LSE are written once.
    """
    s, _, d, e = sizes
    return Traffic(s * d + visits.keys * (d + e), s * (e + 1), extra=s)


def flash2_backward_one_pass(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Return the traffic of FlashAttention-2's backward in one pass.

    First, u = rowsum(dO * O) is computed. Then keys and values are read once, and each visit of a tile reads
    q, do, dq, L and u, and writes dq.
    """
    s, t, d, e = sizes
    read = 2 * s * e + t * (d + e) + visits.queries * (2 * d + e + 2)
    return Traffic(read, s + (s + visits.queries) * d + t * (d + e), extra=s)


def flash2_backward_two_pass(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Return the traffic of FlashAttention-2's backward in two passes.

    First, u = rowsum(dO * O) is computed. Then each program reads its own tile once and the tiles that it
    visits; every gradient is written once.
    """
    s, t, d, e = sizes
    keys = t * (d + e) + visits.queries * (d + e + 2)
    queries = s * (d + e + 2) + visits.keys * (d + e)
    return Traffic(2 * s * e + keys + queries, s + s * d + t * (d + e), extra=s)


def _tiles(total: int, size: int) -> int:
    return -(-total // size)
