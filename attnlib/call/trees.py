"""Calls whose mask holds a tree of sequences: distances become depths, and packed tensors get offsets."""

from dataclasses import replace

from torch import Tensor

from ..masks.band import AnyMask
from ..masks.function import MaskFunction, TreeTensors, positions_missing
from ..masks.trees import check_nesting
from ..scores import Score, ScoreFunction
from ..tracing.depths import by_depth, counts_tokens, rebased
from ..tracing.trace import captured_of


def tree_of(mask: AnyMask | None) -> TreeTensors | None:
    """Return the tensors that describe the tree in a mask, by number; None if it holds no tree."""
    return mask.tree if isinstance(mask, MaskFunction) else None


def refuse_cache(mask: AnyMask | None) -> None:
    """Raise NotImplementedError if a mask for attention over a cache holds a tree."""
    if tree_of(mask) is not None:
        raise NotImplementedError(
            "mask: expected no tree of masks.until() over a cache; cache.fork(sequence) shares a prefix "
            "between sequences there"
        )


def over_tree(call):
    """Return a :class:`~attnlib.call.Call` over the same tree whose scores count distances in depths.

    ALiBi becomes a part of the score function, and tensors ``[t]`` of packed calls are read from the start of
    their sequence. Other calls are returned as they are. Attention over shards of a sequence must call this
    before it splits the call.

    Raises:
        NotImplementedError: the call is over a cache, or has dropout.
        ValueError: scores count distances, and the tree has no positions.
    """
    mask, tree = call.mask, tree_of(call.mask)
    if tree is None or tree.offsets is not None:
        return call
    if call.kv is not None:
        refuse_cache(mask)
    if call.dropout.p:
        raise NotImplementedError(
            "dropout_p: expected 0 with a tree of masks.until(), whose copies would share what is dropped, "
            f"got {call.dropout.p}"
        )
    ends, offsets = mask.tensors[tree.ends], None if call.packing is None else call.packing.cu_seqlens_k
    offsets = offsets if ends.dim() == 1 else None
    if offsets is not None and call.k is not None and ends.shape[0] < call.k.shape[0]:
        raise ValueError(
            f"mask: expected ends [t={call.k.shape[0]}] or [b, t] as the packed call has them, got "
            f"{tuple(ends.shape)}"
        )
    check_nesting(ends, offsets)
    positions = None if tree.positions is None else mask.tensors[tree.positions]
    score = _by_depth(call, positions, offsets)
    if offsets is None:
        return call._replace(score=score)
    of_tree = [n for n in (tree.ends, tree.positions) if n is not None]
    program, tensors = _rebased("mask", mask.program, mask.tensors, of_tree, offsets)
    # Tiles of block_mask() are for dense calls.
    mask = replace(mask.reading(tensors), program=program, tree=tree._replace(offsets=len(tensors) - 1))
    return call._replace(mask=mask, score=score)


def _by_depth(call, positions: Tensor | None, offsets: Tensor | None) -> Score:
    """Return the score options of a call, whose function counts depths and includes ALiBi."""
    origin = call.origin
    if type(call.score.function) not in (ScoreFunction, type(None)):  # the call's validation refuses it
        return call.score
    score = call.score.with_alibi_in_function(head=origin.head, sequence=origin.sequence)
    function = score.function
    if function is None or not counts_tokens(function.program):
        return score
    if positions is None:
        raise ValueError(positions_missing("a score function" if score is call.score else "ALiBi"))
    at, tensors = len(function.tensors), (*function.tensors, positions)
    program = by_depth(function.program, captured_of("score", tensors), at)
    if offsets is not None:
        program, tensors = _rebased("score", program, tensors, [at], offsets)
    names = (*function.names, "positions", "offsets")[: len(tensors)]
    return score._replace(function=ScoreFunction(program, tensors, names, function.dims))


def _rebased(name: str, program, tensors: tuple[Tensor, ...], of_tree: list[int], offsets: Tensor):
    """Return a program that reads packed tensors from the start of each sequence, and its tensors."""
    tensors = (*tensors, offsets)
    return rebased(program, captured_of(name, tensors), of_tree, len(tensors) - 1), tensors
