"""The grouped-query attention layer, with multi-head and multi-query attention as special cases."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..gate import Gate
from ..indexing import Chosen, IndexBranch, Indexer
from ..internal.signatures import kind
from ..kv import KVLayout, KVView
from ..masks.band import AnyMask
from ..rope.rope import Angles, Rope, rotate
from ..rope.scaling import QueryTemperature
from ..scores import Score, ScoreFunction
from .attending import attention_call
from .captured import CapturedTensors, captured_by_mask, captured_by_score
from .choices import index_layout, index_sizes
from .context_parallel import ContextParallel, check_context_parallel
from .inputs import Inputs, check_options, check_rope, check_stored, computed_dtype
from .parameters import (
    biased,
    check_counts,
    check_values,
    described,
    head_dims,
    not_none,
    published_slopes,
    reset_children,
)
from .positions import angles_of, positions_of, scale_and_gain, scaled_head
from .selecting import SelectingLayer
from .shared_keys import Keys, check_keys, refuse_own_keys
from .tensor_parallel import Share, plan_of, share_of, share_of_context

if TYPE_CHECKING:  # importing these modules takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


@kind
class GroupedQueryAttention(SelectingLayer):
    """Attention whose query heads share KV heads in groups (Ainslie et al., 2023, arXiv 2305.13245).

    Parameters have transformers' names: q_proj, k_proj, v_proj, o_proj, q_norm, k_norm, sinks; a gate
    adds g_proj. q_norm, k_norm and v_norm, the norm of values, may be replaced by any module that keeps the
    shape ``[..., h, d]``. v_norm is None unless ``values="keys"`` or you set it.

    Args:
        hidden_size: the width ``m`` of input and output.
        num_heads: the number of query heads ``h``.
        mask: the keys that each query sees. It is required, because attnlib never infers causality.
        num_kv_heads: the number of KV heads ``g``, a divisor of ``num_heads``. None means ``num_heads``.
        head_dim: channels of a query and key. None means ``hidden_size // num_heads``.
        v_head_dim: channels of a value. None means ``head_dim``.
        bias: True if the projections of q, k and v have a bias, or the names of the projections that have
            one, as in ``("q_proj", "v_proj")``.
        output_bias: True if the output projection has a bias. None means the same as ``bias``.
        rope: the rotary position embedding. None means no rotation.
        temperature: scales queries by their positions, after rope.
        qk_norm: apply an RMS norm to each head of q and k, before rope (as in Qwen 3).
        norm_after_rope: apply these norms after rope (as in HunYuan).
        norm_eps: the epsilon of these norms.
        gate: multiplies the output of attention before the output projection.
        own_keys: False for a layer that attends to the keys of another layer, given by ``keys=`` in each
            call. It has no k_proj, v_proj, k_norm and v_norm, and stores nothing in a cache but the index
            keys of ``select``.
        values: "keys" makes values of the output of k_proj, before k_norm and rope (as in Gemma 4): v_norm,
            an RMS norm without weights, of each head. There is no v_proj, and caches store keys and values.
            None means that v_proj makes the values.
        sinks: add a learned sink logit for each head (as in gpt-oss).
        softcap: ``c`` in ``c * tanh(score / c)``. None means no softcap.
        alibi: use ALiBi slopes (Press et al., 2021, arXiv 2108.12409) instead of rotary positions.
        scale: the factor of q·k. None means one over the square root of the channels of a key.
        score: a function of indices that changes the score, made by :func:`score_mod`. Its tensors become
            parameters and buffers of the layer.
        select: the index branch with which the layer chooses the keys of each query (sparse attention). Its
            weights are the submodule ``indexer``, and caches store its index keys.
        dropout_p: the probability of dropping an attention weight, in training only.
        context_parallel: shards sequences over ranks: x and the output have only this rank's tokens. It may
            also be set later, as an attribute.
        backend: selects the backend, as in :func:`attention`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: ``num_kv_heads`` does not divide ``num_heads`` or another size does not fit, a number is
            out of range, or the rope is wider than the head.
        TypeError: an argument has the wrong type, such as a mask that is not a Mask.

    >>> layer = GroupedQueryAttention(512, 8, num_kv_heads=2, mask=CAUSAL, rope=Rope(64))
    >>> layer(torch.randn(2, 9, 512)).shape
    torch.Size([2, 9, 512])
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    mask: AnyMask
    rope: Rope | None
    scale: float
    q_gain: float  # multiplies the rotated channels of q, for YaRN
    softcap: float | None
    temperature: QueryTemperature | None
    gate: Gate | None
    norm_after_rope: bool
    mask_tensors: CapturedTensors | None
    score: CapturedTensors | None
    select: Indexer | None
    indexer: IndexBranch | None
    dropout_p: float
    backend: str | None
    context_parallel: ContextParallel | None
    own_keys: bool
    values: str | None
    q_proj: nn.Linear
    k_proj: nn.Linear | None
    v_proj: nn.Linear | None
    o_proj: nn.Linear
    g_proj: nn.Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    v_norm: nn.Module | None
    sinks: nn.Parameter | None
    alibi_slopes: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mask: AnyMask,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        bias: bool | tuple[str, ...] = False,
        output_bias: bool | None = None,
        rope: Rope | None = None,
        temperature: QueryTemperature | None = None,
        qk_norm: bool = False,
        norm_after_rope: bool = False,
        norm_eps: float = 1e-6,
        gate: Gate | None = None,
        own_keys: bool = True,
        values: Literal["keys"] | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        alibi: bool = False,
        scale: float | None = None,
        score: ScoreFunction | None = None,
        select: Indexer | None = None,
        dropout_p: float = 0.0,
        context_parallel: ContextParallel | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads}
        check_counts(sizes | not_none(num_kv_heads=num_kv_heads))
        num_kv_heads = self._kv_heads(num_heads, num_kv_heads)
        head_dim, v_head_dim = head_dims(hidden_size, num_heads, head_dim, v_head_dim)
        has_bias = biased(bias, output_bias)
        numbers = {"norm_eps": norm_eps} | not_none(scale=scale, softcap=softcap)
        flags = {
            "qk_norm": qk_norm,
            "norm_after_rope": norm_after_rope,
            "own_keys": own_keys,
            "sinks": sinks,
            "alibi": alibi,
        }
        check_options(mask, rope, temperature, gate, dropout_p, dtype, numbers=numbers, flags=flags)
        check_rope(rope, head_dim, norm_after_rope)
        check_values(values, head_dim, v_head_dim)
        check_context_parallel(context_parallel)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.v_head_dim, self.mask, self.rope = head_dim, v_head_dim, mask, rope
        self.scale, self.q_gain = scale_and_gain(scale, rope, head_dim)
        self.softcap, self.temperature, self.dropout_p, self.gate = softcap, temperature, dropout_p, gate
        self.norm_after_rope, self.own_keys, self.values = norm_after_rope, own_keys, values
        self.backend, self.context_parallel = backend, context_parallel
        self.mask_tensors, self.score = captured_by_mask(mask, num_heads), captured_by_score(score, num_heads)
        linear = partial(nn.Linear, device=device, dtype=dtype)
        self.q_proj = linear(hidden_size, num_heads * head_dim, bias="q_proj" in has_bias)
        self.k_proj = self.v_proj = None
        if own_keys:
            self.k_proj = linear(hidden_size, num_kv_heads * head_dim, bias="k_proj" in has_bias)
        if own_keys and values is None:
            self.v_proj = linear(hidden_size, num_kv_heads * v_head_dim, bias="v_proj" in has_bias)
        self.o_proj = linear(num_heads * v_head_dim, hidden_size, bias="o_proj" in has_bias)
        self.g_proj = gate and linear(hidden_size, gate.rows(num_heads, v_head_dim), bias=gate.bias)
        norm = partial(nn.RMSNorm, head_dim, eps=norm_eps, device=device, dtype=dtype)
        self.q_norm, self.k_norm = norm() if qk_norm else None, norm() if qk_norm and own_keys else None
        self.v_norm = norm(elementwise_affine=False) if own_keys and values is not None else None
        self.sinks = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.register_buffer(
            "alibi_slopes",
            torch.empty(num_heads, device=device, dtype=torch.float32) if alibi else None,
            persistent=False,
        )
        self._add_index_branch(select, kv_heads=num_kv_heads, norm_eps=norm_eps, device=device, dtype=dtype)
        self._reset_own()

    @staticmethod
    def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
        return num_kv_heads

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of this layer's KV cache on this rank, with autocast's dtype within torch.autocast."""
        if not self.own_keys:
            return index_layout(self)
        weight, share = self.k_proj.weight, share_of(self.q_proj, self.num_heads)
        heads = share.stored_heads(weight.shape[0] // self.head_dim, self.num_kv_heads)
        kept = dict(zip(("window", "first_tokens"), self.mask.kept, strict=True)) | index_sizes(self.select)
        return KVLayout.grouped(heads, self.head_dim, self.v_head_dim, **kept, dtype=computed_dtype(weight))

    def kv_layout_as(self, dtype: torch.dtype) -> KVLayout:
        """Return :attr:`kv_layout` with another dtype, such as the one that torch.autocast will use."""
        return replace(self.kv_layout, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialize every parameter and buffer in place; works after ``to_empty``.

        Raises:
            TypeError: a replaced submodule has parameters but no ``reset_parameters``. Nothing is reset then.
        """
        reset_children(self)
        self._reset_own()

    def _reset_own(self) -> None:
        with torch.no_grad():
            if self.sinks is not None:
                self.sinks.zero_()
            if self.alibi_slopes is not None:
                self.alibi_slopes.copy_(torch.tensor(published_slopes(self.num_heads)))

    def _apply(self, fn, recurse=True):
        """Apply ``fn``, but keep the ALiBi slopes in fp32, and fill them again after ``to_empty``.

        bf16 would round the slopes unless the head count is a power of two. No state dict contains them, so
        they could not be loaded after ``to_empty``.
        """
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        if slopes is not None:
            known = torch.tensor(published_slopes(self.num_heads), device="cpu") if slopes.is_meta else slopes
            self.alibi_slopes = known.to(self.alibi_slopes.device, slopes.dtype)
        return self

    def forward(
        self,
        x: Tensor,
        *,
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
        """Attend with ``x`` ``[b, s, m]`` or packed ``[t, m]``, and return a tensor of the same shape.

        Packed x needs ``cu_seqlens`` or a packed cache step.

        - ``context`` is attended to in place of x (cross-attention). It is a tensor ``[b, t, m]``, packed
          ``[t, m]`` with ``cu_seqlens_context``, or the KVView of a stored context. Use a layer whose mask is
          FULL; other bands align the last query with the last key, as in flash-attn.
        - ``keys`` are those of another layer for the tokens of x: its ``key_value(x, angles)``, or in a cache
          step its ``view()``. Gradients flow to the other layer. The layer that owns keys takes them too, so
          that they are projected once.
        - ``kv`` is this layer's entry of a cache step. The tokens of x are appended to it. A layer without
          keys of its own takes it only if it has an index branch, beside ``keys``, and appends index keys.
        - ``attention_mask`` ``[b, t]`` is True for tokens and False for padding of a dense x, or of its
          context. ``key_starts`` and ``key_ends`` int32 ``[b]`` say the same if padding has no holes; with
          them, the host does not wait for the device.
        - ``positions`` are ``[b, s]`` or ``[t]``, and affect rope only. None means ``kv.positions`` in a
          cache step, the positions of a tree that the mask holds (see :func:`attnlib.masks.until`),
          positions from 0 in each sequence with ``cu_seqlens``, and ``arange(s)`` otherwise.
          With ``rope.axes``, they are ``[axes, b, s]`` or ``[axes, t]``, and a cache step needs them.
        - ``angles`` are precomputed, by ``rope.angles(positions)`` or :func:`attnlib.shared_angles`.
        - ``mask`` hides more pairs, in addition to the layer's own mask.
        - ``selected`` are the keys that each query may see, as :meth:`choose` of this or another layer
          returns them, or int32 lists ``[b, s, c, n]`` or packed ``[t, c, n]`` of keys, or of the blocks of
          the layer's own index branch. None means that a layer with ``select`` chooses, and any other is
          dense.

        With ``context_parallel``, x and ``positions`` have only this rank's tokens. All other arguments
        describe the whole sequences and are the same on every rank.

        Raises:
            ValueError: inputs contradict each other, or the mask hides a whole context from the first query.
        """
        ranks = self.context_parallel
        offsets, bounds = (cu_seqlens, cu_seqlens_context), (key_starts, key_ends, attention_mask)
        given = Inputs(context, keys, kv, positions, angles, *offsets, *bounds, mask, selected, ranks)
        given = self._validated(x, given)
        if keys is not None or not self.own_keys:
            widths = self.head_dim, self.v_head_dim
            check_keys(keys, x, widths, own_keys=self.own_keys, is_latent=False, first=self.q_proj)
        angles = angles_of(self.rope, x, given)
        given, index = self._selecting(x, given, angles)
        share, q = self._query(
            x, angles, None if self.temperature is None else positions_of(self.rope, x, given)
        )
        score = Score(self.scale, self.softcap, self.alibi_slopes, self.sinks)
        attention = attention_call(self, score, given, q.shape[-2], share)
        if given.view is not None:
            out = attention.over_view(q, given.view)
        elif kv is not None:
            # The cache rotates keys when it writes them, unless the layer normalizes keys after rotation.
            own, left = (angles, None) if self.norm_after_rope else (None, angles)
            out = attention.over_view(q, kv.append(*self.key_value(x, own, share), angles=left, index=index))
        else:
            k, v = keys or self.key_value(x if context is None else context, angles, share)
            out = attention.over_tokens(q, k, v, given)
        out = out if self.gate is None else self.gate.apply(out, self.g_proj(x))
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        return described(self, "num_heads", "num_kv_heads", "head_dim")

    def append_context(self, context: Tensor, kv: LayerCache) -> None:
        """Store the keys and values of ``context`` in a cache step; ``forward(context=view)`` reads them."""
        refuse_own_keys(self.own_keys)
        check_stored(context, kv, self.hidden_size, self.k_proj, self.rope)
        kv.append(*self.key_value(context))

    def parallel_plan(self, mesh: "DeviceMesh") -> "dict[str, ParallelStyle]":
        """Return the tensor-parallel plan of this layer for a one-dimensional mesh.

        Pass the plan to torch: ``parallelize_module(layer, mesh, layer.parallel_plan(mesh))``. The query
        heads are sharded. With fewer KV heads than ranks, every rank computes all KV heads, but reads only
        the ones that its query heads need.

        Raises:
            ValueError: the heads do not divide evenly among the ranks.
        """
        columns = ("q_proj",) if self.gate is None else ("q_proj", "g_proj")
        self._check_shardable()
        of_kv = tuple(name for name in ("k_proj", "v_proj") if getattr(self, name) is not None)
        return plan_of(mesh, self.num_heads, self.num_kv_heads, columns, of_kv)

    @property
    def query_projection(self) -> nn.Module:
        """The projection that computes the heads of q, q_proj."""
        return self.q_proj

    def query(self, x: Tensor, angles: Angles | None = None, positions: Tensor | None = None) -> Tensor:
        """Return normalized, rotated queries ``[..., h, d]``.

        A temperature needs integer ``positions`` ``[b, s]`` or ``[t]``, of axis 0 if the rope has several.
        """
        return self._query(x, angles, positions)[1]

    def _query(self, x: Tensor, angles: Angles | None, positions: Tensor | None) -> tuple[Share, Tensor]:
        """Return which query heads this rank has, and their queries."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        share = share_of(self.q_proj, self.num_heads, q.shape[-2])
        q = self._normed_and_rotated(self.q_norm, q, angles, share)
        q = q if angles is None else scaled_head(q, self.rope.dim, self.q_gain)
        return share, q if self.temperature is None else self.temperature.scaled(q, positions)

    def key_value(
        self, x: Tensor, angles: Angles | None = None, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys ``[..., g, d]`` and values ``[..., g, e]`` that the query heads in ``share`` read.

        None means the query heads of this rank.

        Keys for a cache need no ``angles``, since the cache rotates keys when it writes them. The exception
        is ``norm_after_rope``: then this method must rotate and normalize the keys.
        """
        refuse_own_keys(self.own_keys)
        share = share_of_context(self, x) if share is None else share
        v = k = share.local_kv(self, "k_proj", self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        if self.v_proj is not None:
            v = share.local_kv(self, "v_proj", self.v_proj(x).unflatten(-1, (-1, self.v_head_dim)))
        v = v if self.v_norm is None else share.normed(self.v_norm, v)
        return self._normed_and_rotated(self.k_norm, k, angles, share), v

    def _normed_and_rotated(
        self, norm: nn.Module | None, x: Tensor, angles: Angles | None, share: Share
    ) -> Tensor:
        """Return heads ``[..., h, d]`` normalized and rotated, in the order that ``norm_after_rope`` sets."""
        if norm is not None and not self.norm_after_rope:
            x = share.normed(norm, x)
        x = x if angles is None else rotate(x, angles)
        return share.normed(norm, x) if norm is not None and self.norm_after_rope else x


class MultiHeadAttention(GroupedQueryAttention):
    """Grouped-query attention with one KV head for each query head (Vaswani et al., 2017).

    Takes the arguments of :class:`attnlib.GroupedQueryAttention`, of which ``num_kv_heads`` may be left out.
    """

    @staticmethod
    def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
        if num_kv_heads not in (None, num_heads):
            raise ValueError(
                f"num_kv_heads: expected num_heads={num_heads}, got {num_kv_heads}; use GroupedQueryAttention"
            )
        return num_heads


class MultiQueryAttention(GroupedQueryAttention):
    """Grouped-query attention with a single KV head (Shazeer, 2019, arXiv 1911.02150).

    Takes the arguments of :class:`attnlib.GroupedQueryAttention`, of which ``num_kv_heads`` may be left out.
    """

    @staticmethod
    def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
        if num_kv_heads not in (None, 1):
            raise ValueError(f"num_kv_heads: expected 1, got {num_kv_heads}; use GroupedQueryAttention")
        return 1
