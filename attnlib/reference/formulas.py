"""What each algorithm moves, as formulas. A run under ``SlowMemory`` counts the same to the element.

FlashAttention's traffic depends on its tiles through ``TileVisits`` alone. Without a mask those are s * t /
columns queries, so that with tiles that fill a fast memory of M elements the forward pass moves Theta(T**2
d**2 / M), against Theta(T**2 + T d) of standard attention (Dao et al., 2022, arXiv 2205.14135, theorem 2). It
gains while d**2 << M.
"""

from typing import NamedTuple

from .traffic import Traffic


class ProblemSizes(NamedTuple):
    """``s`` queries and ``t`` keys of ``d`` channels, values of ``e``."""

    s: int
    t: int
    d: int
    e: int


class TileVisits(NamedTuple):
    """The queries, and the keys, of every tile of pairs that is visited, added up.

    ``full`` and ``causal`` are exact. Under any other mask ``full`` is a bound: it visits every tile.
    """

    queries: int
    keys: int

    @classmethod
    def full(cls, sizes: ProblemSizes, rows: int, columns: int) -> "TileVisits":
        return cls(_tiles(sizes.t, columns) * sizes.s, _tiles(sizes.s, rows) * sizes.t)

    @classmethod
    def causal(cls, length: int, tile: int) -> "TileVisits":
        """Square tiles that divide a sequence with itself: n (n + 1) / 2 of them, n = length / tile."""
        if length % tile:
            raise ValueError(f"causal: expected a tile that divides length={length}, got {tile}")
        n = length // tile
        return cls(tile * n * (n + 1) // 2, tile * n * (n + 1) // 2)


def matmul(s: int, m: int, t: int, tile: int) -> Traffic:
    """``[s, m]`` times ``[m, t]``: 2 n**3 / tile reads when all three are n and the tile divides it."""
    return Traffic(_tiles(t, tile) * s * m + _tiles(s, tile) * m * t, s * t)


def three_pass(s: int, t: int) -> Traffic:
    """Four accesses an element, and the LSE."""
    return Traffic(3 * s * t, s * t + s)


def two_pass(s: int, t: int) -> Traffic:
    """Three accesses an element, and the LSE."""
    return Traffic(2 * s * t, s * t + s)


def one_pass(s: int, t: int, e: int) -> Traffic:
    """One access an element; the values, the output and the LSE."""
    return Traffic(s * t + t * e, s * e + s)


def standard_forward(sizes: ProblemSizes) -> Traffic:
    """Q K', the softmax, P V."""
    s, t, d, e = sizes
    return Traffic((s + t) * d + s * t + s * t + t * e, s * t + s * t + s * e, extra=2 * s * t)


def standard_backward(sizes: ProblemSizes) -> Traffic:
    """dV, dP, dS, dQ and dK: five passes over scores, and two written."""
    s, t, d, e = sizes
    read = (s * t + s * e) + (s + t) * e + 2 * s * t + (s * t + t * d) + (s * t + s * d)
    return Traffic(read, t * e + s * t + s * t + s * d + t * d, extra=2 * s * t)


def incremental_forward(sizes: ProblemSizes, visits: TileVisits, columns: int) -> Traffic:
    """Visits as of one tile of queries; each reads q, k, v, o, c, pi, writes o, c, pi, and writes and reads
    scores.
    """
    s, t, d, e = sizes
    scores = s * visits.keys
    read = visits.queries * (d + e + 2) + visits.keys * (d + e) + scores + s * (e + 1)
    return Traffic(read, (s + visits.queries) * (e + 2) + scores + s * e, extra=s * (min(columns, t) + 2))


def flash1_forward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Keys and values once; each visit reads q, o, c, pi and writes o, c, pi."""
    s, t, d, e = sizes
    return Traffic(t * (d + e) + visits.queries * (d + e + 2), (s + visits.queries) * (e + 2), extra=2 * s)


def flash1_backward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Keys and values once; each visit reads q, o, do, dq, c, pi and writes dq."""
    s, t, d, e = sizes
    return Traffic(t * (d + e) + visits.queries * (2 * d + 2 * e + 2), (s + visits.queries) * d + t * (d + e))


def flash2_forward(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """Queries once; each visit reads k and v; the output and one statistic are written once."""
    s, _, d, e = sizes
    return Traffic(s * d + visits.keys * (d + e), s * (e + 1), extra=s)


def flash2_backward_one_pass(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """u first; then keys and values once, and each visit reads q, do, dq, L, u and adds to dq."""
    s, t, d, e = sizes
    read = 2 * s * e + t * (d + e) + visits.queries * (2 * d + e + 2)
    return Traffic(read, s + (s + visits.queries) * d + t * (d + e), extra=s)


def flash2_backward_two_pass(sizes: ProblemSizes, visits: TileVisits) -> Traffic:
    """u first; then each owner reads its own once and visits the others, and every gradient is written
    once.
    """
    s, t, d, e = sizes
    keys = t * (d + e) + visits.queries * (d + e + 2)
    queries = s * (d + e + 2) + visits.keys * (d + e)
    return Traffic(2 * s * e + keys + queries, s + s * d + t * (d + e), extra=s)


def _tiles(total: int, size: int) -> int:
    return -(-total // size)
