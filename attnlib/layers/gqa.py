"""Grouped-query attention as a layer; multi-head and multi-query attention are its corner cases."""

import torch
from torch import Tensor, nn

from ..cache import KVLayout, KVView, LayerCache
from ..mask import Mask
from ..rope import Angles, Rope


class GroupedQueryAttention(nn.Module):
    """Attention whose query heads share KV heads in groups (Ainslie et al., 2023, arXiv 2305.13245).

    ``num_heads`` query heads read ``num_kv_heads`` KV heads. ``mask`` is required: causality is never inferred.
    Parameters are named as in transformers: q_proj, k_proj, v_proj, o_proj, and with ``qk_norm`` q_norm and k_norm
    (per head, before rope, as in Qwen 3), and with ``sinks`` sinks (as in gpt-oss). ``bias`` is for q, k and v, ``output_bias``
    for o (None: as ``bias``). ``alibi`` uses the slopes of Press et al., 2021 (arXiv 2108.12409).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mask: Mask,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        rope: Rope | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        sinks: bool = False,
        softcap: float | None = None,
        alibi: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        raise NotImplementedError

    @property
    def kv_layout(self) -> KVLayout:
        """What this layer stores per token in a cache."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer in place; works after ``to_empty``."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | KVView | None = None,
        kv: LayerCache | None = None,
        positions: Tensor | Angles | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """``x`` ``[b, s, m]``, or packed ``[t, m]`` with ``cu_seqlens`` or a packed cache step, to the same shape.

        ``context`` is what to attend to instead of x (cross-attention): a tensor ``[b, t, m]`` or a KVView of stored context.
        ``positions`` (``[b, s]``, ``[t]`` or computed Angles) affect rope only; None means ``kv.positions`` in a cached step,
        restarting at 0 with ``cu_seqlens``, else ``arange(s)``.
        """
        raise NotImplementedError

    def append_context(self, context: Tensor, kv: LayerCache) -> None:
        """Project and store ``context`` inside a step of its own cache, for ``forward(context=view)`` later."""
        raise NotImplementedError


class MultiHeadAttention(GroupedQueryAttention):
    """Grouped-query attention in which every query head has a KV head of its own."""


class MultiQueryAttention(GroupedQueryAttention):
    """Grouped-query attention with a single KV head (Shazeer, 2019, arXiv 1911.02150)."""
