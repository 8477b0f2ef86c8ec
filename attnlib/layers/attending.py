"""Attention as a layer asks for it: over tokens that are here, over those that ranks share, and over a
cache.
"""

from typing import NamedTuple

from torch import Tensor, nn

from ..call.call import Call, Dropout, Origin
from ..dispatch.run import ExplainOnly, attend
from ..kv import KVView
from ..masks.band import AnyMask
from ..masks.function import MaskFunction
from ..scores import Score, ScoreFunction
from ..tracing.program import Program, Value, constant
from .captured import own_functions
from .context_parallel import ContextParallel, KeyValueSource
from .inputs import Inputs
from .sharded_cache import with_heads
from .tensor_parallel import ShardedHeads, Share


class AttentionCall(NamedTuple):
    """What all attention of a layer takes in one call of the layer.

    ``head`` is the number of this rank's first one where somebody counts them, else 0: the fastest kernels
    take calls that begin at 0 alone.
    """

    mask: AnyMask
    score: Score
    head: int
    dropout_p: float
    backend: str | ExplainOnly | None
    context_parallel: ContextParallel | None
    share: Share
    total_heads: int
    kv_heads: int

    def over_tokens(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        given: Inputs,
        source: KeyValueSource | None = None,
    ) -> Tensor:
        """Attention to k and v of tokens that are ``given``, with all that ranks share; they may have a
        ``source``.
        """
        bounds, packing, dropout = (given.key_starts, given.key_ends), given.packing, Dropout(self.dropout_p)
        call = self._placed(Call(q, self.mask, self.score, k, v, None, *bounds, packing, dropout))
        if self.context_parallel is None:
            return attend(call, self.backend)[0]
        return self.context_parallel.attend(call, self.backend, source)

    def over_view(self, q: Tensor, view: KVView) -> Tensor:
        """Attention to what a cache stores."""
        sizes = {"heads": q.shape[-2], "total": self.total_heads, "kv_heads": self.kv_heads}
        view = with_heads(view, self.share, **sizes)
        return attend(self._placed(Call(q, self.mask, self.score, kv=view)), self.backend)[0]

    def check(self, q: Tensor, view: KVView) -> None:
        """Compare what functions of indices read with a step of this layer, whose heads are all here."""
        if self.head == 0:
            sizes = {"b": view.lengths.shape[0], "s": q.shape[-3], "h": q.shape[-2]}
            Call(q, self.mask, self.score, kv=view).check_functions(sizes)

    def _placed(self, call: Call) -> Call:
        return call if self.head == 0 else call._replace(origin=Origin(head=self.head))


def attention_call(layer: nn.Module, score: Score, given: Inputs, heads: int, share: Share) -> AttentionCall:
    """How a layer attends with ``heads`` of its heads here: ``score`` has all of its options but the
    function.

    Raises:
        ValueError: a function asks for the number of a head, which nobody knows of those that are here.
    """
    mask, function = own_functions(layer, given.mask, share)
    dropout_p = layer.dropout_p if layer.training and not given.is_stored else 0.0
    head = 0
    if heads != layer.num_heads:
        by_mask, by_score = _reads_head(mask), _reads_head(function)
        if isinstance(share, ShardedHeads) and (by_mask or by_score or dropout_p):
            head = share.first
        elif by_mask or by_score:
            raise ValueError(
                f"q_proj: expected all {layer.num_heads} heads, whose numbers the mask or the score asks "
                f"for, or to be sharded by parallelize_module, got {heads} heads"
            )
        if by_mask:
            mask.check({"h": layer.num_heads})
            mask = mask.reading(mask.tensors).of_part()  # what block_mask() knows is of all heads
        if by_score:
            function = (
                function.of_part()
            )  # whose tensors are of all heads, which the constructor has looked at
    score = share.local_score(score)
    score = score if function is None else score._replace(function=function)
    sizes = layer.num_heads, getattr(layer, "num_kv_heads", 1)  # latents are one KV head
    return AttentionCall(mask, score, head, dropout_p, layer.backend, layer.context_parallel, share, *sizes)


def _reads_head(function: AnyMask | ScoreFunction | None) -> bool:
    """Whether a function asks for the number of a head."""
    return isinstance(function, MaskFunction | ScoreFunction) and _program_reads_head(function.program.text)


@constant
def _program_reads_head(text: str) -> bool:
    program = Program(text)
    return "h" in program.read or program.parsed.result == Value("h")
