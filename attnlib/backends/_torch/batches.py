"""How a dense or packed call falls into batches, whose sequences have equal lengths."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

from ...call import Dropout, Origin, Score
from ...mask import Mask
from ..operators import Arguments, CachedArguments

Index = tuple[slice | None, ...]


class Keys(NamedTuple):
    """The keys ``[start, stop)`` of a batch, and their values; no others are read.

    ``read(sequences, start, stop)`` gives k ``[n, t, g, d]`` and v ``[n, t, g, e]`` of ``n`` sequences of the batch. It
    takes ranges that cross no multiple of ``page_size``, and all keys where they are there ``at_once``: in one piece,
    or few enough for a tile. ``index`` is where the sequences are in the call's k and v.
    """

    read: Callable[[slice, int, int], tuple[Tensor, Tensor]]
    start: int
    stop: int
    heads: int
    value_dim: int
    page_size: int
    at_once: bool = True
    index: Index = ()


class Batch(NamedTuple):
    """Neighbouring sequences of equal lengths, which are solved together; the first is the call's ``sequence``.

    ``q`` ``[b, s, h, d]`` is at ``index`` in the call's, all of it where there is no index; its row 0 is query
    ``first``. The mask and ``first`` count from the first key that there is. Dropout adds ``origin.key`` to keys and
    queries, and the origin's head and sequence.
    """

    q: Tensor
    keys: Keys
    index: Index
    sequence: int
    first: int
    mask: Mask
    score: Score
    dropout: Dropout
    origin: Origin


def batches(a: Arguments) -> Iterator[Batch]:
    """The batches of a call on tensors, in order: neighbours with equal bounds, or one packed sequence."""
    dropout = Dropout(a.dropout_p, None if a.dropout_seed is None else a.dropout_seed.cpu())
    if a.cu_seqlens_q is not None:
        rows, tokens = a.packing.read(queries=a.q.shape[0], keys=a.k.shape[0])
        each = zip(pairwise(rows), pairwise(tokens), origins(a.origin, len(rows) - 1), strict=True)
        for n, ((r0, r1), (k0, k1), origin) in enumerate(each):
            keys = _keys(a, (None, slice(k0, k1)), 0, k1 - k0)
            yield batch_of(a, (None, slice(r0, r1)), keys, n, k1 - k0, origin, dropout)
        return
    b, t = a.q.shape[0], a.k.shape[1]
    if b and a.key_starts is a.key_ends is a.origin is None:
        yield batch_of(a, (), _keys(a, (), 0, t), 0, t, Origin(), dropout)
        return
    starts = [0] * b if a.key_starts is None else a.key_starts.clamp(0, t).tolist()
    stops = [t] * b if a.key_ends is None else a.key_ends.clamp(0, t).tolist()
    each = list(zip(starts, stops, origins(a.origin, b), strict=True))
    for n, m in neighbours(each):
        start, stop, origin = each[n]
        index = (slice(n, m),)
        yield batch_of(a, index, _keys(a, index, min(start, stop), stop), n, t, origin, dropout)


def _keys(a: Arguments, index: Index, start: int, stop: int) -> Keys:
    k, v = at(a.k, index), at(a.v, index)

    def read(sequences: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if stop - start == k.shape[1] and sequences.stop - sequences.start == k.shape[0]:
            return k, v
        return k[sequences, start:stop], v[sequences, start:stop]

    return Keys(read, start, stop, k.shape[2], v.shape[3], page_size=max(1, stop), index=index)


def batch_of(
    a: Arguments | CachedArguments,
    index: Index,
    keys: Keys,
    sequence: int,
    total: int,
    origin: Origin,
    dropout: Dropout,
) -> Batch:
    """The batch of the queries at ``index``, which are the last ones of ``total`` keys unless the origin moves them."""
    q = at(a.q, index)
    first = total - q.shape[1] + origin.query - origin.key
    return Batch(q, keys, index, sequence, first, a.mask.counted_from(origin.key), a.score, dropout, origin)


def at(x: Tensor, index: Index) -> Tensor:
    """``x[index]``; without an index ``x`` itself, which takes no time."""
    return x[index] if index else x


def origins(table: Tensor | None, sequences: int) -> list[Origin]:
    """Where each sequence of a call begins in the whole, in ints; int32 ``[b, 4]`` says so of all."""
    return [Origin()] * sequences if table is None else [Origin(*row) for row in table.tolist()]


def neighbours(facts: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """The runs ``[n, m)`` of neighbours whose facts are equal."""
    n = 0
    for _, run in groupby(facts):
        m = n + len(list(run))
        yield n, m
        n = m
