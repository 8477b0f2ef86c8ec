"""Norms of queries and keys that some families have, each from heads ``[..., h, d]`` to the same."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Factory = torch.device | str | torch.dtype | None  # device= and dtype=


class OffsetRMSNorm(nn.Module):
    """RMS norm of each head whose gain is ``1 + weight`` (Gemma), added in fp32: in bf16 the sum would be
    rounded.
    """

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(dim, **factory))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A gain of 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), x.shape[-1:], 1 + self.weight.to(wide), self.eps).to(x.dtype)


class WideRMSNorm(nn.RMSNorm):
    """RMS norm of all heads together, as of one vector (OLMo 2)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(heads * dim, eps=eps, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)


class HeadLayerNorm(nn.Module):
    """Layer norm of each head with gains of its own and without a bias (Cohere)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(heads, dim, **factory))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A gain of 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (F.layer_norm(x.to(wide), x.shape[-1:], eps=self.eps) * self.weight.to(wide)).to(x.dtype)


class PlainRMSNorm(nn.RMSNorm):
    """RMS norm of each head without a gain (Llama 4)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(dim, eps=eps, elementwise_affine=False, **factory)


class HeadRMSNorm(nn.RMSNorm):
    """RMS norm of each head (Qwen 3)."""

    def __init__(self, heads: int, dim: int, eps: float, **factory: Factory):
        super().__init__(dim, eps=eps, **factory)
