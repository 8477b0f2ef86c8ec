"""A piece of attention over a shared sequence: some of its queries and some of its keys, as a call that says
the same.

Queries and keys of a piece are neighbours in the whole sequence, or in the whole pack.
"""

from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from ..call.call import Call, Origin, Packing
from ..masks.band import FULL, Mask
from .sharding import TokenRange


def whole_of(call: Call) -> Call:
    """The call without what is known of its mask at the sizes of the whole.

    Raises:
        ValueError: a function reads FIRST_QUERY, which is another in every piece.
    """
    mask, functions = call.mask, call.functions
    programs = [] if functions is None else [functions.mask, functions.score]
    if any(program is not None and "first" in program.read for program in programs):
        raise ValueError(
            "FIRST_QUERY: expected functions without it where ranks share a sequence, since the first query "
            "of every piece is another; the whole's is 0"
        )
    return call if isinstance(mask, Mask) else call._replace(mask=mask.reading(mask.tensors))


def seen(call: Call, queries: TokenRange, keys: TokenRange) -> TokenRange:
    """The keys of these outside which the band of the mask hides all from these queries; empty if it hides
    all.
    """
    band = call.mask.band
    if call.packing is not None and band.prefix:  # each sequence has its own
        return keys
    start, end = band.keys(queries.start, queries.end, keys.end)
    start = max(start, keys.start)
    return TokenRange(start, max(start, end))


def piece_of(call: Call, q: Tensor, k: Tensor, v: Tensor, queries: TokenRange, keys: TokenRange) -> Call:
    """The call of these queries over these keys. ``call`` says all else, of the whole sequence."""
    piece = call._replace(q=q, k=k, v=v)
    if call.packing is None:
        piece = piece._replace(**_bounds(call, keys))
        origin = (
            Origin(queries.end - keys.end, 0)
            if _is_relative(call)
            else Origin(_first(queries, keys), keys.start)
        )
    else:
        piece, origin = _packed(piece, queries, keys)
    if _is_relative(call):
        if (
            call.mask.covers(queries.start, queries.end, keys.start, keys.end)
            and call.score.alibi_slopes is None
        ):
            return piece._replace(mask=FULL, origin=call.origin)
        if queries.end == keys.end:  # queries are the last of the keys, as in any call
            return piece._replace(origin=call.origin)
        if call.packing is None and call.score.alibi_slopes is None:
            return piece._replace(mask=call.mask.shift(queries.end - keys.end), origin=call.origin)
    return piece._replace(origin=origin._replace(head=call.origin.head, sequence=call.origin.sequence))


def _is_relative(call: Call) -> bool:
    """Whether nothing depends on more than how far a key is from its query."""
    is_band = isinstance(call.mask, Mask) and not call.mask.prefix
    return is_band and call.score.function is None and not call.dropout.p


def _first(queries: TokenRange, keys: TokenRange) -> int:
    """What to add to the index that a piece gives its queries, the last of its keys."""
    return queries.start - (keys.size - queries.size)


def _bounds(call: Call, keys: TokenRange) -> dict[str, Tensor | None]:
    """The bounds of visible keys, counted from the first of these."""
    bounds = {"key_starts": call.key_starts, "key_ends": call.key_ends}
    return {name: None if x is None else (x - keys.start).clamp(0, keys.size) for name, x in bounds.items()}


def _packed(piece: Call, queries: TokenRange, keys: TokenRange) -> tuple[Call, Origin]:
    """The piece of a pack, with the parts of all its sequences, most of them empty, and where these begin."""
    cu, limit = piece.packing.cu_seqlens_q, piece.packing.max_seqlen_q
    cu_q, cu_k = ((cu - x.start).clamp(0, x.size) for x in (queries, keys))
    limits = (None if limit is None else min(limit, x.size) for x in (queries, keys))
    # Of each sequence: where its part of a range begins and ends, counted within it.
    lengths = cu.diff()
    first_query, first_key = ((x.start - cu[:-1]).clamp(min=0).minimum(lengths) for x in (queries, keys))
    end_query, end_key = ((x.end - cu[:-1]).clamp(min=0).minimum(lengths) for x in (queries, keys))
    origin = (
        (end_query - end_key, 0)
        if _is_relative(piece)
        else (first_query - (cu_k.diff() - cu_q.diff()), first_key)
    )
    return piece._replace(packing=Packing(cu_q, cu_k, *limits)), Origin(*origin)


NOTHING = slice(0, 0)  # of keys


class Piece(NamedTuple):
    """A call, and which of the queries and keys of two ranks it has: slices along their tokens."""

    call: Call
    queries: slice
    keys: slice


def pieces_of(
    call: Call, q: Tensor, k: Tensor, v: Tensor, own: list[TokenRange], held: list[TokenRange]
) -> Iterator[Piece]:
    """The calls, as few as will do, of a rank's queries over the keys and values of a rank.

    ``own`` are the tokens of q, and ``held`` those of k and v. Pieces of the same queries have different
    keys.
    """
    dim, are_plain = q.dim() - 3, _is_plain(call)
    every = slice(0, k.shape[dim])
    if (
        are_plain and own == held and call.mask.is_causal_among(0, own[-1].end)
    ):  # whose order is that of the whole
        yield Piece(call._replace(q=q, k=k, v=v), every, every)
        return

    def part(x: Tensor, at: slice) -> Tensor:
        return x[(slice(None),) * dim + (at,)]

    columns = _slices(held)
    wholes = [_whole_keys(call, queries, held, columns) if are_plain else None for queries in own]
    for whole, same in groupby(zip(wholes, own, _slices(own), strict=True), itemgetter(0)):
        _, ranges, rows = zip(*same, strict=True)
        if whole is not None:
            at = slice(rows[0].start, rows[-1].stop)
            if whole != NOTHING:
                yield Piece(
                    call._replace(q=part(q, at), k=part(k, whole), v=part(v, whole), mask=FULL), at, whole
                )
            continue
        for queries, at in zip(ranges, rows, strict=True):
            for keys, column in zip(held, columns, strict=True):
                visible = seen(call, queries, keys)
                if visible.size:
                    first = column.start + visible.start - keys.start
                    own_keys = slice(first, first + visible.size)
                    tensors = part(q, at), part(k, own_keys), part(v, own_keys)
                    yield Piece(piece_of(call, *tensors, queries, visible), at, own_keys)


def _whole_keys(
    call: Call, queries: TokenRange, held: list[TokenRange], columns: list[slice]
) -> slice | None:
    """Where those keys of a rank are of which these queries see all; None where they see some, or some
    apart.
    """
    whole = [column for keys, column in zip(held, columns, strict=True) if call.mask.covers(*queries, *keys)]
    others = [keys for keys, column in zip(held, columns, strict=True) if column not in whole]
    if any(seen(call, queries, keys).size for keys in others):
        return None
    if any(first.stop != second.start for first, second in pairwise(whole)):
        return None
    return slice(whole[0].start, whole[-1].stop) if whole else NOTHING


def _is_plain(call: Call) -> bool:
    """Whether a dense call depends on nothing but which keys come before which queries."""
    others = (call.packing, call.key_starts, call.key_ends, call.score.alibi_slopes)
    return _is_relative(call) and all(x is None for x in others)


def _slices(ranges: list[TokenRange]) -> list[slice]:
    """Where tokens of these ranges are, one range after another."""
    ends = [*accumulate((x.size for x in ranges), initial=0)]
    return [slice(*pair) for pair in pairwise(ends)]
