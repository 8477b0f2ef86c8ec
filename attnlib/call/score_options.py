"""Move softcap and ALiBi from the score function of a call to the options of the call."""

from torch import Tensor

from ..masks.band import AnyMask
from .call import Call
from .trees import tree_of


def with_score_options(call: Call) -> Call:
    """Return an equal call, in which softcap and ALiBi of its score function are options of the call.

    The call need not be valid. Attention over shards of a sequence must call this before it splits the call.
    """
    found = call.score.contained
    if found is None:
        return call
    slopes, mask = None, call.mask
    is_alibi = found.slopes is not None and isinstance(mask, AnyMask)
    if is_alibi and (mask.band.hides_all_after or not found.only_behind):
        slopes = _slopes(call, call.score.function.tensors[found.slopes])
    if found.cap is slopes is None:
        return call
    return call._replace(score=call.score.with_contained(slopes))


def _slopes(call: Call, slopes: Tensor) -> Tensor | None:
    """Return the slopes of the call's heads and sequences, or None if they stay in the function.

    They stay if the tensor has too few of them, since a function then reads the last one again. With a tree
    in the mask they stay because distances are not ``|i - j|``.
    """
    q, packing, origin = call.q, call.packing, call.origin
    is_valid = isinstance(q, Tensor) and not q.is_nested and q.dim() > 2 and q.device == slopes.device
    if packing is not None:
        offsets = packing.cu_seqlens_q
        is_valid = is_valid and isinstance(offsets, Tensor) and offsets.dim() == 1
    if not is_valid or tree_of(call.mask) is not None:
        return None
    wanted = [(-1, origin.head, q.shape[-2])]
    if slopes.dim() == 2:
        wanted.append((0, origin.sequence, call.sequences))
    for dim, first, count in wanted:
        if not isinstance(first, int) or slopes.shape[dim] < first + count:
            return None
        if slopes.shape[dim] != count:
            slopes = slopes.narrow(dim, first, count)
    return slopes
