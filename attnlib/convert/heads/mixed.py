"""A projection that learns to merge heads: each of its heads is a weighted sum of old heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...internal.signatures import kind


@kind
class MixedLinear(nn.Module):
    """A k_proj or v_proj of ``g`` heads, each a learned weighted sum of ``f`` old heads.

    Every old head has one weight for keys and one for values, as in WGQA (Chinnakonduru and Mohapatra, 2024,
    arXiv 2407.10855). The parameters are the old heads, ``heads`` ``[g, f, d, m]`` and ``head_bias``
    ``[g, f, d]`` or None, and their weights ``mix`` ``[g, f]``. ``weight`` and ``bias`` are properties that
    compute the equivalent linear layer; :meth:`folded` returns them as fixed tensors.
    """

    def __init__(self, heads: Tensor, head_bias: Tensor | None, mix: Tensor):
        super().__init__()
        self.heads: nn.Parameter = nn.Parameter(heads)
        self.head_bias: nn.Parameter | None = None if head_bias is None else nn.Parameter(head_bias)
        self.mix: nn.Parameter = nn.Parameter(mix)

    @property
    def weight(self) -> Tensor:
        return torch.einsum("gf,gfdm->gdm", self.mix, self.heads).flatten(0, 1)

    @property
    def bias(self) -> Tensor | None:
        return (
            None if self.head_bias is None else torch.einsum("gf,gfd->gd", self.mix, self.head_bias).flatten()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def folded(self) -> dict[str, Tensor]:
        """Return the detached ``weight``, and ``bias`` if there is one, of the equivalent linear layer."""
        mix, heads = self.mix.detach().double(), self.heads.detach().double()
        weights = {"weight": torch.einsum("gf,gfdm->gdm", mix, heads).flatten(0, 1)}
        if self.head_bias is not None:
            weights["bias"] = torch.einsum("gf,gfd->gd", mix, self.head_bias.detach().double()).flatten()
        return {name: value.to(self.heads.dtype) for name, value in weights.items()}
