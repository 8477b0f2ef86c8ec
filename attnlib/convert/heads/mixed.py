"""A projection whose merge is still being learnt: every head is a weighted sum of several."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...internal.signatures import kind


@kind
class MixedLinear(nn.Module):
    """k_proj or v_proj of ``g`` heads, each the sum of ``f`` old ones times ``mix`` (Chinnakonduru and
    Mohapatra, 2024, arXiv 2407.10855, WGQA: their weights per head, one for keys and one for values).

    ``heads`` ``[g, f, d, m]``, ``head_bias`` ``[g, f, d]`` or None, ``mix`` ``[g, f]`` are parameters.
    ``weight`` and ``bias`` are those of the linear layer that it is at the moment and that :meth:`folded`
    makes.
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
        """``weight``, and ``bias`` if there is one, summed in fp64 and detached."""
        mix, heads = self.mix.detach().double(), self.heads.detach().double()
        weights = {"weight": torch.einsum("gf,gfdm->gdm", mix, heads).flatten(0, 1)}
        if self.head_bias is not None:
            weights["bias"] = torch.einsum("gf,gfd->gd", mix, self.head_bias.detach().double()).flatten()
        return {name: value.to(self.heads.dtype) for name, value in weights.items()}
