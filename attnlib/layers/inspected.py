"""The methods of attention layers that show what attention looked at: probabilities and largest scores."""

from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..call.call import Call, Dropout
from ..call.statistic import Statistic
from ..dispatch.run import Interceptor, attend, zeros
from ..dispatch.statistics import compute
from ..indexing import Chosen
from ..internal.signatures import kind
from ..kv import KVView
from ..masks.band import AnyMask
from ..rope.rope import Angles
from ..weights import maxima_of, statistic_of
from .context_parallel import ContextParallel
from .inputs import Inputs
from .shared_keys import Keys

Layer = TypeVar("Layer", bound=nn.Module)


@kind
class InspectedLayer(nn.Module):
    """The base of attention layers, with their methods :meth:`weights` and :meth:`maxima`."""

    backend: str | None
    context_parallel: ContextParallel | None

    def weights(
        self,
        x: Tensor,
        *,
        over: str,
        rows: Tensor | None = None,
        at: Tensor | None = None,
        context: Tensor | KVView | None = None,
        kv: LayerCache | None = None,
        keys: Keys | None = None,
        positions: Tensor | None = None,
        angles: Angles | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_context: Tensor | None = None,
        key_starts: Tensor | None = None,
        key_ends: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mask: AnyMask | None = None,
        selected: Chosen | Tensor | None = None,
    ) -> Tensor:
        """Return the attention probabilities of a call of this layer: some rows, sums or means.

        ``over``, ``rows``, ``at`` and the result are those of :func:`attnlib.attention_weights`; all other
        arguments are those of the layer's forward. The probabilities are those before dropout. If the layer
        has sinks, rows sum to less than 1. Over a cache step, the tokens of x are written; calling the layer
        afterwards writes the same tokens again. Under tensor parallelism, the result has this rank's heads,
        and ``over="heads"`` is the mean over them.

        Raises:
            ValueError: an argument does not fit, or the layer has ``context_parallel``.

        >>> layer = GroupedQueryAttention(512, 8, num_kv_heads=2, mask=CAUSAL, rope=Rope(64))
        >>> x = torch.randn(2, 9, 512)
        >>> layer.weights(x, over="none", rows=torch.tensor([0, 8])).shape
        torch.Size([2, 8, 2, 9])
        """
        statistic = statistic_of(over, rows, at)
        offsets, bounds = (cu_seqlens, cu_seqlens_context), (key_starts, key_ends, attention_mask)
        given = Inputs(context, keys, kv, positions, angles, *offsets, *bounds, mask, selected)
        return self._taken(statistic, x, given)

    def maxima(
        self,
        x: Tensor,
        *,
        of: str = "scores",
        context: Tensor | KVView | None = None,
        kv: LayerCache | None = None,
        keys: Keys | None = None,
        positions: Tensor | None = None,
        angles: Angles | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_context: Tensor | None = None,
        key_starts: Tensor | None = None,
        key_ends: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mask: AnyMask | None = None,
        selected: Chosen | Tensor | None = None,
    ) -> Tensor:
        """Return the largest score of each query in a call, ``[b, h, s]``, or packed ``[h, s]``.

        ``of`` and the result are those of :func:`attnlib.attention_maxima`; all other arguments are those of
        the layer's forward. Cache steps and tensor parallelism are as in :meth:`weights`.

        Raises:
            ValueError: an argument does not fit, or the layer has ``context_parallel``.
        """
        statistic = maxima_of(of)
        offsets, bounds = (cu_seqlens, cu_seqlens_context), (key_starts, key_ends, attention_mask)
        given = Inputs(context, keys, kv, positions, angles, *offsets, *bounds, mask, selected)
        return self._taken(statistic, x, given)

    @torch.no_grad()
    def _taken(self, statistic: Statistic, x: Tensor, given: Inputs) -> Tensor:
        """Call a copy of this layer in which an interceptor answers the attention call."""
        if self.context_parallel is not None:
            raise ValueError(
                "context_parallel: expected None, as a rank has only some of the keys; set "
                "layer.context_parallel = None, and pass whole sequences"
            )
        layer = copied(self)
        layer.backend, layer.dropout_p = TakenStatistic(self.backend, statistic), 0.0
        if given.is_stored and hasattr(layer, "form"):
            layer.form = "absorbed"  # the expanded form makes several calls over a cache
        inputs = given._asdict()
        del inputs["context_parallel"]  # an option of the layer
        layer(x, **inputs)
        return layer.backend.result


def copied(layer: Layer) -> Layer:
    """Return a copy of a layer with the same modules and tensors; ``copy.copy`` fails under FSDP2."""
    other = object.__new__(type(layer))
    other.__setstate__(layer.__getstate__())
    return other


class TakenStatistic(Interceptor):
    """An interceptor that computes a statistic of the call that it answers.

    Without a ``statistic``, ``result`` has the probabilities of all queries.
    """

    result: Tensor

    def __init__(self, name: str | Interceptor | None = None, statistic: Statistic | None = None):
        self.name, self.statistic = name.name if isinstance(name, Interceptor) else name, statistic

    def from_head(self, first: int) -> Self:
        return self

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        statistic, plain = self.statistic, call._replace(dropout=Dropout())
        if statistic is None:
            statistic = Statistic("rows", rows=torch.arange(call.q.shape[-3], device=call.q.device))
        if statistic.kind in ("maxima", "products"):
            self.result = compute(plain, statistic, self.name)
            return zeros(call)
        out, lse = attend(call._replace(lse=True), self.name)
        self.result = compute(plain, statistic._replace(lse=lse.detach()), self.name)
        return out, lse


def refusing_gradients(weights: Tensor, out: Tensor) -> Tensor:
    """Return ``weights``, and raise if a gradient arrives at them; ``out`` is the output of the same call.

    Compiled code cannot raise, so there, and if ``out`` has no gradient, the weights are constants.
    """
    if out.requires_grad and not torch.compiler.is_compiling():

        def refuse(_: Tensor) -> None:
            raise NotImplementedError(
                "attention weights: expected no gradient, as they are recomputed without one, got some; "
                "detach the weights, or compute the loss without them"
            )

        weights.requires_grad_().register_hook(refuse)
    return weights
