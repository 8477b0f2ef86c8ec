"""What a layer asks of ranks that share its tokens. :mod:`attnlib.parallel` has them, and layers may not
import it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..call.call import Call
from ..dispatch.run import ExplainOnly

if TYPE_CHECKING:  # importing it takes longer than importing this package
    from torch.distributed.device_mesh import DeviceMesh


class KeyValueSource(NamedTuple):
    """What keys and values are made of, where that is less to send than they are.

    ``tensors`` are of this rank's tokens, ``[b, tokens here, ...]`` or packed ``[tokens here, ...]``.
    ``expand`` makes k and v of those of any tokens, with these ``weights``.
    """

    tensors: tuple[Tensor, ...]
    expand: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...] = ()


@runtime_checkable
class ContextParallel(Protocol):
    """The ranks that share every sequence of a layer: :class:`attnlib.parallel.ContextParallel`, as a layer
    sees it.
    """

    @property
    def mesh(self) -> "DeviceMesh":
        """The ranks, in one dimension."""
        ...

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's tokens are in the whole sequence, ``[tokens here]``, if it has so many."""
        ...

    def attend(
        self, call: Call, name: str | ExplainOnly | None = None, source: KeyValueSource | None = None
    ) -> Tensor:
        """The output of this rank's queries over all that the mask shows them of the whole."""
        ...


def check_context_parallel(ranks: ContextParallel | None) -> None:
    """Raise TypeError for what is none."""
    if not (ranks is None or isinstance(ranks, ContextParallel)):
        got = type(ranks).__name__
        raise TypeError(f"context_parallel: expected an attnlib.parallel.ContextParallel or None, got {got}")
