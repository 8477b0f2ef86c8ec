"""Pieces of attention over a sharded sequence: attention calls on some of its queries and some of its keys.

A piece treats each pair of a query and a key exactly as attention over the whole sequence would. The queries
of a piece are contiguous in the whole sequence (or pack of sequences), and so are its keys.
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
    """Return the call without the precomputed tiles of its mask, which only fit the whole sequence.

    Raises:
        ValueError: a function reads QUERY_OFFSET, which differs from piece to piece.
    """
    mask, functions = call.mask, call.functions
    programs = [] if functions is None else [functions.mask, functions.score]
    if any(program is not None and "first" in program.read for program in programs):
        raise ValueError(
            "QUERY_OFFSET: expected functions without it where ranks share a sequence, since the first query "
            "of every piece is another; the whole's is 0"
        )
    return call if isinstance(mask, Mask) else call._replace(mask=mask.reading(mask.tensors))


def seen(call: Call, queries: TokenRange, keys: TokenRange) -> TokenRange:
    """Return the part of ``keys`` that the band of the mask shows to ``queries``; it may be empty."""
    band = call.mask.band
    if call.packing is not None and band.prefix:  # each packed sequence has its own prefix
        return keys
    start, end = band.keys(queries.start, queries.end, keys.end)
    start = max(start, keys.start)
    return TokenRange(start, max(start, end))


def piece_of(call: Call, q: Tensor, k: Tensor, v: Tensor, queries: TokenRange, keys: TokenRange) -> Call:
    """Return a call of some queries over some keys; ``call`` describes attention over the whole sequence."""
    piece = call._replace(q=q, k=k, v=v)
    if call.packing is None:
        piece = piece._replace(**_bounds(call, keys))
        # A call aligns its last query with its last key; the origin restores their true distance.
        first_query = queries.start - (keys.size - queries.size)
        origin = Origin(queries.end - keys.end, 0) if _is_relative(call) else Origin(first_query, keys.start)
    else:
        piece, origin = _packed(piece, queries, keys)
    if _is_relative(call):
        if (
            call.mask.covers(queries.start, queries.end, keys.start, keys.end)
            and call.score.alibi_slopes is None
        ):
            return piece._replace(mask=FULL, origin=call.origin)
        if queries.end == keys.end:  # the last query belongs to the last key, as in the whole call
            return piece._replace(origin=call.origin)
        if call.packing is None and call.score.alibi_slopes is None:
            return piece._replace(mask=call.mask.shift(queries.end - keys.end), origin=call.origin)
    return piece._replace(origin=origin._replace(head=call.origin.head, sequence=call.origin.sequence))


def _is_relative(call: Call) -> bool:
    """True if mask, score and dropout use token indices only for the distance between query and key."""
    is_band = isinstance(call.mask, Mask) and not call.mask.prefix
    return is_band and call.score.function is None and not call.dropout.p


def _bounds(call: Call, keys: TokenRange) -> dict[str, Tensor | None]:
    """Return the call's bounds of visible keys, counted from the first key of the range ``keys``."""
    bounds = {"key_starts": call.key_starts, "key_ends": call.key_ends}
    return {name: None if x is None else (x - keys.start).clamp(0, keys.size) for name, x in bounds.items()}


def _packed(piece: Call, queries: TokenRange, keys: TokenRange) -> tuple[Call, Origin]:
    """Return a piece of a packed call, and its origin (the index offsets of its part of each sequence).

    A piece contains a part of every sequence; most of these parts are empty.
    """
    cu, limit = piece.packing.cu_seqlens_q, piece.packing.max_seqlen_q
    cu_q, cu_k = ((cu - x.start).clamp(0, x.size) for x in (queries, keys))
    limits = (None if limit is None else min(limit, x.size) for x in (queries, keys))
    # Compute where each sequence's part of the range starts and ends, counted from the sequence's start.
    lengths = cu.diff()
    first_query, first_key = ((x.start - cu[:-1]).clamp(min=0).minimum(lengths) for x in (queries, keys))
    end_query, end_key = ((x.end - cu[:-1]).clamp(min=0).minimum(lengths) for x in (queries, keys))
    origin = (
        (end_query - end_key, 0)
        if _is_relative(piece)
        else (first_query - (cu_k.diff() - cu_q.diff()), first_key)
    )
    return piece._replace(packing=Packing(cu_q, cu_k, *limits)), Origin(*origin)


NOTHING = slice(0, 0)


class Piece(NamedTuple):
    """An attention call, and the slices of this rank's queries and of one rank's keys that it covers."""

    call: Call
    queries: slice
    keys: slice


def pieces_of(
    call: Call, q: Tensor, k: Tensor, v: Tensor, own: list[TokenRange], held: list[TokenRange]
) -> Iterator[Piece]:
    """Yield the fewest calls that compute attention of one rank's queries over one rank's keys and values.

    ``own`` lists the token ranges that q holds, and ``held`` those that k and v hold. No two pieces cover the
    same pair of query and key.
    """
    dim, are_plain = q.dim() - 3, _is_plain(call)
    every = slice(0, k.shape[dim])
    if (
        are_plain and own == held and call.mask.is_causal_among(0, own[-1].end)
    ):  # tokens are in their original order, so one causal call is enough
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
    """Return the slice of a rank's keys that these queries see entirely, if they see no other keys.

    The result is None if a token range in ``held`` is only partly visible, or if the visible ranges are not
    adjacent.
    """
    whole = [column for keys, column in zip(held, columns, strict=True) if call.mask.covers(*queries, *keys)]
    others = [keys for keys, column in zip(held, columns, strict=True) if column not in whole]
    if any(seen(call, queries, keys).size for keys in others):
        return None
    if any(first.stop != second.start for first, second in pairwise(whole)):
        return None
    return slice(whole[0].start, whole[-1].stop) if whole else NOTHING


def _is_plain(call: Call) -> bool:
    """True if a dense call has a band mask without a prefix, and no bounds, slopes, functions or dropout."""
    others = (call.packing, call.key_starts, call.key_ends, call.score.alibi_slopes)
    return _is_relative(call) and all(x is None for x in others)


def _slices(ranges: list[TokenRange]) -> list[slice]:
    """Return the slice that each token range takes in a tensor that stores the ranges one after another."""
    ends = [*accumulate((x.size for x in ranges), initial=0)]
    return [slice(*pair) for pair in pairwise(ends)]
