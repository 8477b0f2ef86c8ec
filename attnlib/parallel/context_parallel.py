"""How a layer shares the tokens of its sequences with the ranks of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from .sharding import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMS = ("ring", "gather", "heads")


class Source(NamedTuple):
    """What keys and values are made of, where that is less to send than they are.

    ``tensors`` are this rank's tokens, ``[b, tokens here, ...]`` or packed ``[tokens here, ...]``. ``expand`` makes k
    and v of them, with these ``weights``, whose gradients are of all tokens that this rank reads.
    """

    tensors: tuple[Tensor, ...]
    expand: Callable[..., tuple[Tensor, Tensor]]
    weights: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class ContextParallel:
    """The ranks of a one-dimensional ``mesh`` that share every sequence: each has a part of its tokens.

    ``form`` is ``"ring"``, ``"gather"`` or ``"heads"``; None takes the one that is expected to be the fastest.
    ``zigzag`` is as in :func:`shard`.

    Raises:
        ValueError: an unknown form, or a mesh of more dimensions than one.
    """

    mesh: "DeviceMesh"
    form: str | None = None
    zigzag: bool = True

    def __post_init__(self) -> None:
        if self.form not in (None, *FORMS):
            raise ValueError(f"form: expected None or one of {', '.join(FORMS)}, got {self.form!r}")
        if self.mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, as mesh['cp'], got {self.mesh.ndim}")

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's tokens are in the whole sequence, ``[tokens here]``, of so many tokens here."""
        return shard(torch.arange(tokens * self.mesh.size(), device=device), self.mesh, dim=0, zigzag=self.zigzag)

    def attend(self, call: Call, name: str | None = None, source: Source | None = None) -> Tensor:
        """The output of this rank's tokens, ``call.q``, over all that its mask shows them of the whole sequence.

        ``call`` has this rank's tokens of q, k and v, ``[b, tokens here, h, d]`` or packed ``[tokens here, h, d]``, and
        the packing, the bounds and all else of the whole sequence; its origin may say which head is the first of this
        rank. With a ``source`` its k and v are None. ``name`` is of a backend.
        """
        raise NotImplementedError
