"""Context-parallel attention by ring, gathering or heads: the requested form, or the fastest by estimate."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.call import Call
from ..call.score_options import with_score_options
from ..call.selection import refuse_selection
from ..call.trees import over_tree
from ..dispatch.run import ExplainOnly, Runner
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
    """The ranks of a ``mesh`` that share every sequence; :func:`shard` gives each rank its tokens.

    ``form`` is ``"ring"``, ``"gather"`` or ``"heads"``. None selects the form with the shortest estimated
    time, if each rank receives ``bandwidth`` bytes per second. ``zigzag`` is as in :func:`shard`.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: the form is unknown, the mesh has several dimensions, or the bandwidth is not above 0.
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
        """Return the positions of this rank's tokens in the whole sequence, ``[tokens]``.

        ``tokens`` is the number of tokens on each rank.
        """
        whole = torch.arange(tokens * self.mesh.size(), device=device)
        return shard(whole, self.mesh, dim=0, zigzag=self.zigzag)

    def attend(self, call: Call, name: Runner = None, source: KeyValueSource | None = None) -> Tensor:
        """Return the output of this rank's queries ``call.q`` over all visible keys of the whole sequence.

        ``call`` holds this rank's tokens of q, k and v, ``[b, tokens here, h, d]`` or packed
        ``[tokens here, h, d]``. Its packing, bounds and other options describe the whole sequence; its origin
        may give the number of this rank's first head. If a ``source`` supplies keys and values, k and v of
        the call are None. ``name`` is the name of a backend. For dropout without a seed, every rank draws one
        from torch's generator, which must be in the same state on all ranks.

        Raises:
            ValueError: the tensors are not shards of one sequence, or the ranks cannot share the heads.
        """
        source = source_of(call.k, call.v) if source is None else source
        sharing = Sharing(self.mesh, self.zigzag)
        _check(call, sharing, source)
        call = over_tree(with_score_options(_validated(call, call.q.shape[-3] * sharing.ranks)))
        costs = costs_of(call, sharing, source, form=self.form, bandwidth=self.bandwidth)
        call = call._replace(dropout=call.dropout.seeded(call.q.device))
        if not isinstance(name, ExplainOnly):
            return FORMS[costs.form](call, sharing, name, source)
        first = len(name.explanations)
        out = FORMS[costs.form](call, sharing, name, source)
        name.explanations[first] = name.explanations[first]._replace(ranks=str(costs))
        return out


def _validated(call: Call, tokens: int) -> Call:
    """Check mask and score tensors against the whole sequence; return a call that skips this check."""
    call.check_functions({"b": call.sequences, "h": call.q.shape[-2], "s": tokens, "t": tokens})
    mask, function = call.mask, call.score.function
    score = (
        call.score._replace(function=function.of_part()) if type(function) is ScoreFunction else call.score
    )
    return call._replace(mask=mask.of_part() if isinstance(mask, MaskFunction) else mask, score=score)


def _check(call: Call, sharing: Sharing, source: KeyValueSource) -> None:
    """Raise an error if the tensors are not shards of one sequence, or the mask selects keys by lists."""
    refuse_selection(
        call.mask, "with context parallelism", "gather the sequence on each rank, or shard heads or sequences"
    )
    tokens, dim = call.q.shape[-3], call.q.dim() - 3
    for name, x in zip("kv", source.tensors, strict=False):
        if x.shape[dim] != tokens:
            raise ValueError(
                f"{name}: expected {tokens} tokens here, as q has, got {x.shape[dim]}; shard both the same"
            )
    if sharing.zigzag and tokens % 2:
        raise ValueError(
            f"q: expected two equal chunks of tokens, got {tokens} tokens; see shard() and zigzag="
        )
