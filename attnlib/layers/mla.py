"""Multi-head latent attention with decoupled rope: one set of weights, an expanded and an absorbed form."""

import torch
from torch import Tensor, nn

from ..cache import KVLayout, KVView, LayerCache
from ..mask import Mask
from ..rope import Angles, Rope


class MultiHeadLatentAttention(nn.Module):
    """Attention over a cached latent (DeepSeek-V2, 2024, arXiv 2405.04434); parameters are DeepSeek-V3's in transformers.

    ``q_lora_rank=None`` projects q directly. A cache stores ``kv_lora_rank + qk_rope_head_dim`` values a token.
    ``form`` forces ``"expanded"`` (K and V per head) or ``"absorbed"`` (one KV head, the latent itself); ``"auto"`` follows a cost rule.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mask: Mask,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool = False,
        rope: Rope | None = None,
        norm_eps: float = 1e-6,
        softcap: float | None = None,
        sinks: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        form: str = "auto",
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
        """Initialise every parameter in place; works after ``to_empty``."""
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
        """As :meth:`GroupedQueryAttention.forward`."""
        raise NotImplementedError

    def append_context(self, context: Tensor, kv: LayerCache) -> None:
        """As :meth:`GroupedQueryAttention.append_context`."""
        raise NotImplementedError
