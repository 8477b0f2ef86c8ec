"""The attention calls of a layer, over its input, over sequences sharded across ranks, and over a cache."""

from typing import NamedTuple

from torch import Tensor, nn

from ..call.call import Call, Dropout, Origin
from ..dispatch.run import Interceptor, Runner, attend
from ..kv import KVView
from ..masks.band import AnyMask
from ..masks.function import MaskFunction
from ..scores import Score, ScoreFunction
from ..tracing.program import Program, Value, constant
from .captured import own_functions
from .context_parallel import ContextParallel, KeyValueSource
from .inputs import Inputs
from .sharded_cache import with_heads
from .tensor_parallel import Share


class AttentionCall(NamedTuple):
    """The arguments that all attention calls within one forward of a layer have in common.

    ``head`` is the index of this rank's first query head if the mask, the score or dropout depends on head
    indices. Otherwise it is 0, since the fastest kernels require calls that begin at head 0.
    """

    mask: AnyMask
    score: Score
    head: int
    dropout_p: float
    backend: Runner
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
        """Attend over ``k`` and ``v``; with context parallelism, over the tokens of all ranks.

        ``given`` has the key bounds, and the offsets of packed sequences. If there is a ``source``, ranks
        send each other its tensors in place of k and v.
        """
        bounds, packing, dropout = (given.key_starts, given.key_ends), given.packing, Dropout(self.dropout_p)
        call = self._placed(Call(q, self.mask, self.score, k, v, None, *bounds, packing, dropout))
        if self.context_parallel is None:
            return attend(call, self.backend)[0]
        return self.context_parallel.attend(call, self.backend, source)

    def over_view(self, q: Tensor, view: KVView) -> Tensor:
        """Attend over the tokens in a cache."""
        view = with_heads(view, self.share, q.shape[-2], total=self.total_heads, kv_heads=self.kv_heads)
        return attend(self._placed(Call(q, self.mask, self.score, kv=view)), self.backend)[0]

    def check(self, q: Tensor, view: KVView) -> None:
        """Validate the tensors that mask and score functions read, for a cache step and all heads."""
        if self.head == 0:
            sizes = {"b": view.lengths.shape[0], "s": q.shape[-3], "h": q.shape[-2]}
            Call(q, self.mask, self.score, kv=view).check_functions(sizes)

    def _placed(self, call: Call) -> Call:
        return call if self.head == 0 else call._replace(origin=Origin(head=self.head))


def attention_call(layer: nn.Module, score: Score, given: Inputs, heads: int, share: Share) -> AttentionCall:
    """Return the common arguments for attention in a layer with ``heads`` query heads on this rank.

    ``score`` has the layer's score options; the layer's score function is added here.

    Raises:
        ValueError: a function reads head indices, and heads were sharded without ``parallelize_module``.
    """
    mask, function = own_functions(layer, given.mask, share)
    dropout_p = layer.dropout_p if layer.training and not given.is_stored else 0.0
    head = 0
    if heads != layer.num_heads:
        by_mask, by_score = _reads_head(mask), _reads_head(function)
        if share.shares and (by_mask or by_score or dropout_p):
            head = share.first
        elif by_mask or by_score:
            raise ValueError(
                f"q_proj: expected all {layer.num_heads} heads, or heads sharded by parallelize_module, as "
                f"the mask or the score reads head indices, got {heads} heads"
            )
        if by_mask:
            mask.check({"h": layer.num_heads})
            mask = mask.reading(mask.tensors).of_part()  # drop tiles, which cover all heads
        if by_score:
            function = function.of_part()  # its tensors cover the heads of all ranks
    kv_heads = getattr(layer, "num_kv_heads", 1)  # MLA has one KV head, the latent
    mask, score = share.local_mask(mask, kv_heads), share.local_score(score)
    score = score if function is None else score._replace(function=function)
    sizes, backend = (layer.num_heads, kv_heads), runner_of(layer, share)
    return AttentionCall(mask, score, head, dropout_p, backend, layer.context_parallel, share, *sizes)


def runner_of(layer: nn.Module, share: Share) -> Runner:
    """Return the backend of a layer; an interceptor counts heads from this rank's first one."""
    backend = layer.backend
    is_part = isinstance(backend, Interceptor) and bool(share.shares)
    return backend.from_head(share.first) if is_part else backend


def _reads_head(function: AnyMask | ScoreFunction | None) -> bool:
    """True if a mask or score is a function that reads the head index."""
    return isinstance(function, MaskFunction | ScoreFunction) and _program_reads_head(function.program.text)


@constant
def _program_reads_head(text: str) -> bool:
    program = Program(text)
    return "h" in program.read or program.parsed.result == Value("h")
