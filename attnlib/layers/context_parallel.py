"""The interface that layers use for context parallelism; :mod:`attnlib.parallel` implements it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..call.call import Call
from ..dispatch.run import Runner

if TYPE_CHECKING:  # importing torch.distributed takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh


class KeyValueSource(NamedTuple):
    """Small tensors that ranks send each other in place of K and V; each rank computes K and V from them.

    ``tensors`` have this rank's tokens, ``[b, local tokens, ...]`` or packed ``[local tokens, ...]``.
    ``expand`` computes k and v from such tensors of any rank; ``weights`` are the parameters it uses.
    """

    tensors: tuple[Tensor, ...]
    expand: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...] = ()


@runtime_checkable
class ContextParallel(Protocol):
    """The ranks that shard every sequence of a layer; see :class:`attnlib.parallel.ContextParallel`."""

    @property
    def mesh(self) -> "DeviceMesh":
        """The one-dimensional mesh of the ranks."""
        ...

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's ``tokens`` tokens in the whole sequence, ``[tokens]``."""
        ...

    def attend(self, call: Call, name: Runner = None, source: KeyValueSource | None = None) -> Tensor:
        """Return attention of this rank's queries over the visible keys of all ranks."""
        ...


def check_context_parallel(ranks: ContextParallel | None) -> None:
    """Raise TypeError unless ``ranks`` is None or a ContextParallel."""
    if not (ranks is None or isinstance(ranks, ContextParallel)):
        got = type(ranks).__name__
        raise TypeError(f"context_parallel: expected an attnlib.parallel.ContextParallel or None, got {got}")
