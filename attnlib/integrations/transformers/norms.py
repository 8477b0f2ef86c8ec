"""Norms that some model families apply to queries and keys ``[..., h, d]``; they keep the shape."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Factory = torch.device | str | torch.dtype | None  # type of the arguments device= and dtype=


class OffsetRMSNorm(nn.Module):
    """RMS norm of each head, scaled by ``1 + weight`` (Gemma).

    The sum ``1 + weight`` is computed in fp32, because bf16 would round it.
    """

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(dim, **factory))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), x.shape[-1:], 1 + self.weight.to(wide), self.eps).to(x.dtype)


class WideRMSNorm(nn.RMSNorm):
    """RMS norm over all heads together, as if they were one vector (OLMo 2)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(heads * dim, eps=eps, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class HeadLayerNorm(nn.Module):
    """Layer norm of each head, with a separate scale per head and no bias (Cohere)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads, dim, **factory))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (F.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps) * self.weight.to(wide)).to(x.dtype)


class PlainRMSNorm(nn.RMSNorm):
    """RMS norm of each head, without a scale (Llama 4)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(dim, eps=eps, elementwise_affine=False, **factory)


class HeadRMSNorm(nn.RMSNorm):
    """RMS norm of each head, with one scale for all heads (Qwen 3)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(dim, eps=eps, **factory)


class BiasedLayerNorm(nn.LayerNorm):
    """Layer norm of each head, with one scale and one bias for all heads (Phi)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(dim, eps=eps, **factory)
