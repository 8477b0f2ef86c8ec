"""Scores by function: what a plain function makes of the score of a query and a key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .program import Program
from .trace import FirstQuery, applied, filled, traced


@dataclass(frozen=True, slots=True, eq=False)
class ScoreFunction:
    """What a function of indices makes of scores; :func:`score_mod` makes it.

    ``program`` is what the function does, ``tensors`` what it reads, in whose floats a gradient flows.
    """

    program: Program
    tensors: tuple[Tensor, ...]
    function: Callable
    arguments: tuple[Tensor | FirstQuery, ...]

    def reading(self, tensors: Sequence[Tensor]) -> "ScoreFunction":
        """The same function of other tensors, of the same dtypes and ranks."""
        return replace(self, tensors=tuple(tensors), arguments=filled(self.arguments, tensors))

    def definition(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """The new score of query ``i`` of head ``h`` in sequence ``b`` and key ``j``, for tensors that broadcast.

        ``first`` is the storage index of the first query of each sequence.
        """
        return torch.as_tensor(applied(self.function, self.arguments, first, score, b, h, i, j), device=score.device)


def score_mod(function: Callable, *arguments: Tensor | FirstQuery) -> ScoreFunction:
    """Scores by a function of indices: ``function(score, b, h, i, j, *arguments)`` gives the new one.

    It runs after scale, softcap and ALiBi and before the mask, in fp32. A gradient flows through it, into float tensors
    among the arguments too. For the rest see :func:`attnlib.mask_mod`.

    Raises:
        TraceError: what the function does cannot run in a kernel; the message names the line.

    >>> bias = torch.zeros(8, 257)
    >>> near = score_mod(lambda score, b, h, i, j, bias: score + bias[h, (i - j).clamp(-128, 128) + 128], bias)
    """
    program = traced("score", function, arguments)
    return ScoreFunction(program, tuple(x for x in arguments if isinstance(x, Tensor)), function, arguments)
