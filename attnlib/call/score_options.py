"""Move softcap and ALiBi from the score function of a call to the options of the call."""

from math import inf

import torch
from torch import Tensor

from ..internal.watched import is_transforming
from ..masks.band import AnyMask
from ..tracing.evaluation import evaluated
from ..tracing.program import Program, constant
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
        if isinstance(found.slopes, Program):
            slopes = _computed(call, found.slopes)
        else:
            slopes = _slopes(call, call.score.function.tensors[found.slopes])
    if found.cap is slopes is None:
        return call
    return call._replace(score=call.score.with_contained(slopes))


def _slopes(call: Call, slopes: Tensor) -> Tensor | None:
    """Return the slopes of the call's heads and sequences, or None if they stay in the function.

    They stay if the tensor has too few of them, since a function then reads the last one again. With a tree
    in the mask they stay because distances are not ``|i - j|``.
    """
    q, origin = call.q, call.origin
    if not _takes_slopes(call) or q.device != slopes.device:
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


def _takes_slopes(call: Call) -> bool:
    """True if the call is valid so far, and its distances are ``|i - j|``, which those of a tree are not."""
    q, packing = call.q, call.packing
    is_valid = isinstance(q, Tensor) and not q.is_nested and q.dim() > 2
    if packing is not None:
        offsets = packing.cu_seqlens_q
        is_valid = is_valid and isinstance(offsets, Tensor) and offsets.dim() == 1
    return is_valid and tree_of(call.mask) is None


def _computed(call: Call, program: Program) -> Tensor | None:
    """Return the slopes that a program computes for the call's heads, or None if they stay in the function.

    They stay if one is negative. They also stay if they are not known yet while a CUDA graph is captured, a
    transform such as vmap runs, or q is of a subclass such as a fake tensor.
    """
    q, first = call.q, call.origin.head
    if not _takes_slopes(call) or not isinstance(first, int):
        return None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wanted = program.text, first, q.shape[-2], dtype, q.device
    if torch.compiler.is_compiling():
        return _made(*wanted)
    if type(q) is not Tensor:
        return None
    computed = call.score.function.computed
    if wanted not in computed:
        if is_transforming() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        with torch.inference_mode(False):  # a later call may need gradients
            computed[wanted] = _made(*wanted)
    return computed[wanted]


def _made(text: str, first: int, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the slopes as a new tensor, or None if one is negative or not finite."""
    numbers = _numbers(text, first, heads)
    return torch.tensor(numbers, dtype=dtype, device=device) if all(0 <= x < inf for x in numbers) else None


@constant
def _numbers(text: str, first: int, heads: int) -> tuple[float, ...]:
    """Return the slopes of the heads from ``first`` on, by the program of this text."""
    heads = torch.arange(first, first + heads)
    slopes = evaluated(Program(text), {"h": heads}, (), torch.float64)
    return (*slopes.expand(len(heads)).tolist(),)
