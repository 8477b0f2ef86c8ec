"""The mask of a tree of sequences that share prefixes, such as many answers to one prompt."""

from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from ..internal.checks import are_checks_on, is_strided, refuse_tensor
from ..internal.signatures import kind
from .band import CAUSAL
from .function import MaskFunction, TreeTensors, function_of


@kind
def until(ends: Tensor, positions: Tensor | None = None) -> MaskFunction:
    """Return the mask of a tree of sequences: a token sees its ancestors in the tree and itself.

    :func:`attnlib.packing.tree` merges sequences into a tree, whose tokens are in depth-first order.
    ``ends[j]`` is the first row after the subtree of token ``j``. Query ``i`` sees key ``j`` if
    ``j <= i < ends[j]``, so causality is included. Padding has the end 0: it sees nothing and is not seen.

    ``ends`` int ``[b, t]`` has a tree for each sequence. In a packed call ``[t]`` works too, counted from the
    start of each sequence; in a dense call ``[t]`` is one tree for all sequences.

    ``positions`` int, in the shape of ``ends``, is the depth of each token: its position in an unshared copy.
    With it, everything that counts distances counts depths, as if the sequences were not shared: ALiBi, the
    functions and windows that are combined with the mask by ``&``, and the call's score function. There
    ``i`` and ``j`` are depths, except where ``i``, ``j`` or ``i - first`` directly index a captured tensor.
    Layers take the positions of their rope from it. Without it, these raise ValueError.

    The mask does not combine by ``|`` and ``~``. Calls with it have no dropout, and are not over a cache,
    which forks sequences instead. ``ATTNLIB_CHECK=1`` refuses ends that do not nest.

    Raises:
        TypeError: a tensor does not have integers.
        ValueError: the shapes or devices differ, or with ``ATTNLIB_CHECK=1`` the ends do not nest.

    >>> mask = until(torch.tensor([[4, 2, 4, 4]]), torch.tensor([[0, 1, 1, 2]]))
    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> mask.visible(torch.tensor(0), torch.tensor(0), i, j, torch.tensor(0)).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    tensors = [_integers(name, x) for name, x in (("ends", ends), ("positions", positions)) if x is not None]
    if ends.dim() not in (1, 2):
        raise ValueError(f"ends: expected [b, t] or packed [t], got {tuple(ends.shape)}")
    for x in tensors[1:]:
        if x.shape != ends.shape or x.device != ends.device:
            expected, got = (f"{tuple(y.shape)} on {y.device}" for y in (ends, x))
            raise ValueError(f"positions: expected {expected} like ends, got {got}")
    if ends.dim() == 2:
        check_nesting(tensors[0])

        def shows(b, h, i, j, ends, *positions):
            return (i < ends[b, j]) & (ends[b, i] > 0)

    else:

        def shows(b, h, i, j, ends, *positions):
            return (i < ends[j]) & (ends[i] > 0)

    dims = ("bT" if ends.dim() == 2 else "T",) * len(tensors)
    tree = TreeTensors(0, None if positions is None else 1)
    return replace(function_of(CAUSAL, shows, tensors), dims=dims, tree=tree)


def check_nesting(ends: Tensor, offsets: Tensor | None = None) -> None:
    """With ``ATTNLIB_CHECK=1``, raise ValueError unless the subtrees that end at ``ends`` nest.

    ``ends`` is ``[b, t]`` or ``[t]``; ``offsets`` has the starts of packed sequences in ``[t]``.
    """
    if not are_checks_on(ends):
        return
    edges = [0, ends.shape[-1]] if offsets is None else offsets.tolist()
    rows = ends.tolist() if ends.dim() == 2 else [ends[start:end].tolist() for start, end in pairwise(edges)]
    for number, row in enumerate(rows):
        around = [len(row)]  # the ends of the subtrees that contain the token, the largest first
        for j, end in enumerate(row):
            while j >= around[-1] and len(around) > 1:
                around.pop()
            if end != 0 and not j < end <= around[-1]:
                raise ValueError(
                    f"ends: expected 0 or an end from {j + 1} to {around[-1]}, where the subtree around "
                    f"token {j} of sequence {number} ends, got {end}; packing.tree() makes ends"
                )
            if end:
                around.append(end)


def _integers(name: str, x: Tensor) -> Tensor:
    """Return a tensor of integers as int32, which kernels read."""
    if not is_strided(x):
        refuse_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype.itemsize == 1:
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    return x.int()
