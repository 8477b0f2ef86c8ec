"""Layers that choose the keys of each query by an index branch, and the loss that trains the branch."""

from typing import Self

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..call.call import Call
from ..dispatch.run import Interceptor, attend
from ..indexing import Chosen, IndexBranch, Indexer, MainAttention, index_loss
from ..internal.checks import came
from ..internal.signatures import kind
from ..masks.band import AnyMask
from ..rope.rope import Angles, Rope
from .choices import (
    check_index_cache,
    check_select,
    chosen_by,
    given_choice,
    index_keys_of,
    index_tensors_of,
)
from .inputs import Inputs, check
from .inspected import InspectedLayer, copied
from .padding import without_padding
from .positions import angles_of, with_depths
from .tensor_parallel import share_of


@kind
class SelectingLayer(InspectedLayer):
    """The base of attention layers that may have an index branch: ``indexer``, described by ``select``."""

    hidden_size: int
    num_heads: int
    mask: AnyMask
    rope: Rope | None
    dropout_p: float
    own_keys: bool
    select: Indexer | None
    indexer: IndexBranch | None

    @property
    def query_projection(self) -> nn.Module:
        """The projection that computes the heads of q."""
        raise NotImplementedError

    @property
    def first_projection(self) -> nn.Module:
        """The first module that the layer calls on x."""
        return self.query_projection

    def _add_index_branch(
        self,
        select: Indexer | None,
        *,
        kv_heads: int | None = None,
        q_lora_rank: int | None = None,
        **options: object,
    ) -> None:
        """Validate ``select``, and make the index branch with these ``options``, if there is one."""
        check_select(self, select, kv_heads=kv_heads, q_lora_rank=q_lora_rank)
        self.select, self.indexer = select, None
        if select is not None:
            rank = q_lora_rank if select.source == "latent" else None
            self.indexer = IndexBranch(select, self.hidden_size, q_lora_rank=rank, **options)

    def choose(
        self,
        x: Tensor,
        *,
        kv: LayerCache | None = None,
        positions: Tensor | None = None,
        angles: Angles | None = None,
        cu_seqlens: Tensor | None = None,
        key_starts: Tensor | None = None,
        key_ends: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Chosen:
        """Return the keys that the index branch chooses for each token of x, for ``selected=``.

        The arguments are those of the layer's forward, which makes the same choice if it gets none. Nothing
        is appended to the cache, though index keys of the step may be written already. All keys are chosen,
        and attention is dense, while no sequence can have more than ``top * block_size`` tokens by the sizes
        that the host knows: the tokens of x, and with ``kv`` also ``kv.history``. Compiled code and CUDA
        graphs count the capacity of the cache instead, because later steps replay their decision.

        Raises:
            ValueError: the layer has no index branch, or an argument does not fit.
            NotImplementedError: ranks share the tokens, or a packed step is compiled or captured.
        """
        if self.indexer is None:
            raise ValueError(
                "select: expected a layer with an index branch, got select=None; make it with "
                "select=Indexer(...)"
            )
        offsets, bounds = (cu_seqlens, None), (key_starts, key_ends, attention_mask)
        ranks = self.context_parallel
        given = Inputs(None, None, kv, positions, angles, *offsets, *bounds, context_parallel=ranks)
        with torch.no_grad():
            given = self._validated(x, given)
            return chosen_by(self, x, given, angles_of(self.rope, x, given))[0]

    def index_loss(
        self,
        x: Tensor,
        *,
        selected: Chosen | Tensor | None = None,
        keys: tuple[Tensor, Tensor | None] | None = None,
        positions: Tensor | None = None,
        angles: Angles | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the loss that trains the index branch to follow the layer's attention on x.

        The loss is the divergence of the index scores' softmax from the attention probabilities, which are
        averaged over the heads that share a list: ``KL(p || softmax(I))``, the mean over queries. The sum of
        the losses of all layers has gradients for index branches alone. Without ``selected``, attention is
        dense, and the loss is over all visible keys: this is the warm-up. With what :meth:`choose` returns,
        attention and the loss are over the chosen keys. All other arguments are those of the layer's forward.

        Under tensor parallelism, probabilities are averaged over the heads of all ranks.

        Raises:
            ValueError: the layer has no index branch, or ``selected`` has other lists than it chooses.
            NotImplementedError: the layer has ALiBi or a score function, or shards sequences over ranks.
        """
        if self.indexer is None:
            raise ValueError("select: expected a layer with an index branch, got select=None")
        if self.context_parallel is not None:
            raise NotImplementedError("context_parallel: expected None for index_loss(), got sharded tokens")
        chosen = Chosen(None) if selected is None else given_choice(selected, self.select)
        if chosen.indices is not None and chosen.block_size != self.select.block_size:
            raise ValueError(
                f"selected: expected lists of this layer's blocks, block_size={self.select.block_size}, got "
                f"block_size={chosen.block_size}; pass what its choose() returns"
            )
        if keys is not None and not isinstance(keys, tuple):
            raise TypeError(f"keys: expected tensors of x's tokens for index_loss(), got {came(keys)}")
        if isinstance(angles, Angles):
            angles = Angles(angles.cos.detach(), angles.sin.detach(), angles.interleaved)
        of_x = {"positions": positions, "angles": angles, "cu_seqlens": cu_seqlens}
        main = self._main_attention(x, chosen, of_x | {"keys": keys})
        given = self._validated(x, Inputs(**of_x))
        tensors = index_tensors_of(self, x, given, angles_of(self.rope, x, given))
        return index_loss(
            tensors,
            main,
            self.select,
            chosen=chosen.indices,
            finish=self.indexer.finish,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
        )

    @torch.no_grad()
    def _main_attention(self, x: Tensor, chosen: Chosen, inputs: dict[str, object]) -> MainAttention:
        """Return the attention of x over the chosen keys: what the index branch learns from."""
        layer = copied(self)
        layer.backend, layer.dropout_p = TakenCall(self.backend), 0.0
        layer.forward(x, selected=chosen, **inputs)  # without hooks, as of FSDP, which are index_loss's
        call, lse = layer.backend.call, layer.backend.lse
        share, group = share_of(self.query_projection, self.num_heads, call.q.shape[-2]), None
        if share.shares:
            group = share.mesh.get_group(share.shares.index(True))
        return MainAttention(call.q, call.k, lse, call.score.without_sinks(), group)

    def _check_shardable(self) -> None:
        """Raise ValueError if the index branch has lists of KV heads, which ranks cannot share."""
        if self.select is not None and self.select.per == "group":
            raise ValueError(
                "select: expected per='all' for tensor parallelism, in which each rank has the whole index "
                "branch, got per='group'"
            )

    def _validated(self, x: Tensor, given: Inputs) -> Inputs:
        """Validate the arguments of forward, and return them with bounds of padding and depths."""
        given = without_padding(x, given)
        check(x, self.hidden_size, given, rope=self.rope, mask=self.mask, projection=self.first_projection)
        check_index_cache(self, given)
        return with_depths(self, x, given)

    def _selecting(
        self, x: Tensor, given: Inputs, angles: Angles | None, latent: Tensor | None = None
    ) -> tuple[Inputs, Tensor | None]:
        """Return the inputs with the mask of the selected keys, and the index keys to append to a cache.

        A layer without keys of its own appends them here. ``latent`` is the q latent, if the layer has
        computed it already.
        """
        if given.selected is self.indexer is None:
            return given, None
        index_keys = None
        with torch.no_grad():
            if given.selected is None:
                chosen, index_keys = chosen_by(self, x, given, angles, latent)
            else:
                chosen = given_choice(given.selected, self.select)
            if self.indexer is not None and given.kv is not None and index_keys is None:
                index_keys = index_keys_of(self, x, given, angles)
            index_keys = None if given.kv is None or index_keys is None else index_keys[..., None, :]
            if index_keys is not None and not self.own_keys:
                given.kv.append(None, index=index_keys)
        if chosen.indices is not None:
            mask = chosen.mask if given.mask is None else given.mask & chosen.mask
            given = given._replace(mask=mask)
        return given, index_keys


class TakenCall(Interceptor):
    """An interceptor that keeps the attention call that it answers, and its LSE."""

    call: Call
    lse: Tensor

    def __init__(self, name: str | Interceptor | None):
        self.name = name.name if isinstance(name, Interceptor) else name

    def from_head(self, first: int) -> Self:
        return self

    def answer(self, call: Call) -> tuple[Tensor, Tensor]:
        out, self.lse = attend(call._replace(lse=True), self.name)
        self.call = call
        return out, self.lse
