"""The mask and score functions of one call: their traced programs, and the tensors that they read."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..internal.checks import are_checks_on
from ..kv import KVView
from ..masks.band import AnyMask
from ..masks.function import EVERYWHERE, MaskFunction, TreeTensors
from ..scores import ScoreFunction
from ..tracing.program import Program, constant_indices


class Programs(NamedTuple):
    """The traced programs of a call's functions, with dtype and dimension count of each tensor they read."""

    mask: Program | None
    score: Program | None
    tensors: tuple[tuple[torch.dtype, int], ...]

    @property
    def lines(self) -> list[str]:
        """The operations of both programs, a line of text for each."""
        return [line for x in (self.mask, self.score) if x is not None for line in str(x).splitlines()]


class Functions(NamedTuple):
    """The traced mask and score functions of a call, their tensors, and the mask's precomputed tiles."""

    mask: Program | None
    score: Program | None
    mask_tensors: tuple[Tensor, ...]
    score_tensors: tuple[Tensor, ...]
    mask_tiles: Tensor | None = None
    tree: TreeTensors | None = None  # if the mask hides nothing but what this tree and its window hide

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors that the functions read, by the names that error messages use."""
        both = (("mask_mod", self.mask_tensors), ("score_mod", self.score_tensors))
        return {f"tensor {n} of {name}": x for name, tensors in both for n, x in enumerate(tensors)}

    @property
    def programs(self) -> Programs:
        """The programs without the tensors, for the spec of a call."""
        kinds = tuple((x.dtype, x.dim()) for x in (*self.mask_tensors, *self.score_tensors))
        return Programs(self.mask, self.score, kinds)

    def check(self) -> None:
        """Raise ValueError if a tensor is empty, or too small for a constant index in its function."""
        for name, x in self.named.items():
            if 0 in x.shape:
                raise ValueError(f"{name}: expected an element in each dimension, got {tuple(x.shape)}")
        for program, tensors in ((self.mask, self.mask_tensors), (self.score, self.score_tensors)):
            for n, dim, at in () if program is None else constant_indices(program.text):
                if not -tensors[n].shape[dim] <= at < tensors[n].shape[dim]:
                    known = f"{tuple(tensors[n].shape)}, which the function reads at {at} in dimension {dim}"
                    raise ValueError(f"tensor {n} of a function: expected a larger one, got {known}")


def functions_of(mask: AnyMask, score: ScoreFunction | None) -> Functions | None:
    """Return the functions of a call, or None if it has neither a mask function nor a score function."""
    by_mask, by_score = type(mask) is MaskFunction, type(score) is ScoreFunction
    # Lists of selected keys are no function.
    by_mask = by_mask and (mask.selection is None or mask.program != EVERYWHERE)
    if not (by_mask or by_score):
        return None
    of_mask = (mask.program, mask.tensors) if by_mask else (None, ())
    of_score = (score.program, score.tensors) if by_score else (None, ())
    tiles, tree = (mask.tiles, mask.tree) if by_mask else (None, None)
    tree = tree if tree is not None and tree.is_alone else None
    return Functions(of_mask[0], of_score[0], of_mask[1], of_score[1], tiles, tree)


def check_functions(
    mask: AnyMask,
    score: ScoreFunction | None,
    sizes: Mapping[str, int],
    packed: Mapping[str, tuple[Tensor, int | None]] | None,
    view: KVView | None,
) -> None:
    """Check that the tensors that functions read fit a call with these ``sizes``.

    For packed calls, ``packed`` maps "s" (queries) and "t" (keys) to the offsets of the sequences and a bound
    on their lengths. For packed and cached sequences, the host knows only bounds on the lengths, unless
    ``ATTNLIB_CHECK=1`` lets it read them.

    Raises:
        ValueError: a tensor is too small; the message names the function and the expected size.
    """
    compared = [x for x in (mask, score) if isinstance(x, MaskFunction | ScoreFunction) and any(x.dims)]
    if not compared:
        return
    exact, least = {dim: sizes[dim] for dim in ("bh" if packed or view else "bhst")}, {}
    if packed is not None:
        least = {dim: _longest(*known) for dim, known in packed.items()}
    elif view is not None:
        exact |= {"s": sizes["s"]} if view.cu_seqlens_q is None else {}
        is_read = are_checks_on(view.lengths) and len(view.lengths)
        least["t"] = view.lengths.max().item() if is_read else exact.get("s", 0)
    least["T"] = exact.get("t", least.get("t", 0))
    for function in compared:
        function.check(exact, least)


def _longest(offsets: Tensor, limit: int | None) -> int:
    """Return a bound on the longest sequence: the given limit, or with ``ATTNLIB_CHECK=1`` its length.

    0 means that no bound is known.
    """
    if limit is None and are_checks_on(offsets) and len(offsets) > 1:
        return offsets.diff().max().item()
    return limit or 0
