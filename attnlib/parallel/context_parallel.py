"""Attention over a sequence that ranks share, in the form that is asked for or should be the fastest."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.call import Call
from ..dispatch.run import ExplainOnly
from ..internal.meshes import check_mesh
from ..internal.signatures import kind
from ..masks.function import MaskFunction
from ..scores import ScoreFunction
from .costs import NVLINK, costs_of
from .gather import gather
from .heads import heads
from .ring import ring
from .sharding import Sharing, shard
from .source import KeyValueSource, source_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORMS = MappingProxyType({"ring": ring, "gather": gather, "heads": heads})


@kind
@dataclass(frozen=True)
class ContextParallel:
    """The ranks of a ``mesh`` that share every sequence: each has a part of its tokens, as :func:`shard`
    deals them.

    ``form`` is ``"ring"``, ``"gather"`` or ``"heads"``; None takes what should be the fastest, where a rank
    receives ``bandwidth`` bytes a second. ``zigzag`` is as in :func:`shard`.

    Raises:
        TypeError: ``mesh`` is no DeviceMesh.
        ValueError: an unknown form, a mesh of more than one dimension, or no bandwidth.
    """

    mesh: "DeviceMesh"
    form: str | None = None
    zigzag: bool = True
    bandwidth: float = NVLINK

    def __post_init__(self) -> None:
        if self.form not in (None, *FORMS):
            raise ValueError(f"form: expected None or one of {', '.join(FORMS)}, got {self.form!r}")
        check_mesh(self.mesh, "cp")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth: expected bytes a second above 0, got {self.bandwidth}")

    def positions(self, tokens: int, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's tokens are in the whole sequence, ``[tokens here]``, if it has so many."""
        whole = torch.arange(tokens * self.mesh.size(), device=device)
        return shard(whole, self.mesh, dim=0, zigzag=self.zigzag)

    def attend(
        self, call: Call, name: str | ExplainOnly | None = None, source: KeyValueSource | None = None
    ) -> Tensor:
        """The output of this rank's queries ``call.q`` over all that the mask shows them of the whole
        sequence.

        ``call`` has this rank's tokens of q, k and v, ``[b, tokens here, h, d]`` or packed ``[tokens here, h,
        d]``, and the packing, the bounds and all else of the whole sequence; its origin may say which head is
        the first here. With a ``source`` its k and v are None. ``name`` is of a backend. Ranks that drop
        without a seed draw one of torch's, which has to be in the same state on all of them.

        Raises:
            ValueError: what ranks have are no shards of one sequence, or ranks cannot share the heads.
        """
        source = source_of(call.k, call.v) if source is None else source
        sharing = Sharing(self.mesh, self.zigzag)
        _check(call, sharing, source)
        call = _compared(call, call.q.shape[-3] * sharing.ranks)
        costs = costs_of(call, sharing, source, form=self.form, bandwidth=self.bandwidth)
        call = call._replace(dropout=call.dropout.seeded(call.q.device))
        if not isinstance(name, ExplainOnly):
            return FORMS[costs.form](call, sharing, name, source)
        first = len(name.explanations)
        out = FORMS[costs.form](call, sharing, name, source)
        name.explanations[first] = name.explanations[first]._replace(ranks=str(costs))
        return out


def _compared(call: Call, tokens: int) -> Call:
    """Return the call, after comparing what functions read with the whole sequence, of which ranks run
    parts.
    """
    call.check_functions({"b": call.sequences, "h": call.q.shape[-2], "s": tokens, "t": tokens})
    mask, function = call.mask, call.score.function
    score = (
        call.score._replace(function=function.of_part()) if type(function) is ScoreFunction else call.score
    )
    return call._replace(mask=mask.of_part() if isinstance(mask, MaskFunction) else mask, score=score)


def _check(call: Call, sharing: Sharing, source: KeyValueSource) -> None:
    """Raise ValueError where these are no shards of one sequence."""
    tokens, dim = call.q.shape[-3], call.q.dim() - 3
    for name, x in zip("kv", source.tensors, strict=False):
        if x.shape[dim] != tokens:
            raise ValueError(
                f"{name}: expected {tokens} tokens here, as q has, got {x.shape[dim]}; shard both alike"
            )
    if sharing.zigzag and tokens % 2:
        raise ValueError(
            f"q: expected two equal chunks of tokens, got {tokens} tokens; see shard() and zigzag="
        )
