"""Projections for latent attention (MLA) that reads normalized heads of q and k.

A norm of each head is not a linear map, but attention reads only its results: latents and queries are linear
functions of normalized keys and queries. So a latent layer can cache what it needs of the normalized keys,
and decode from the cache like any other.
"""

import torch
from torch import Tensor, nn


class NormedQueries(nn.Linear):
    """Queries ``[..., h * n]``: each head is normalized, and then mapped by its own rows of ``weight``.

    ``weight`` is ``[h * n, d]``; ``heads`` computes heads of d channels, and ``norm`` normalizes each.
    """

    def __init__(self, heads: nn.Linear, norm: nn.RMSNorm, rows: int):
        head_dim = norm.normalized_shape[0]
        super().__init__(head_dim, heads.out_features // head_dim * rows, bias=False)
        self.heads, self.norm = heads, norm

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.heads(x).unflatten(-1, (-1, self.in_features)))
        weight = self.weight.unflatten(0, (q.shape[-2], -1))
        return torch.einsum("...hd,hnd->...hn", q, weight).flatten(-2)


class NormedKeys(nn.Linear):
    """Latents and rotary keys ``[..., n]`` from the normalized keys of all heads, and from x.

    ``weight`` is ``[n, g * d + m]``; ``heads`` computes g heads of d channels, and ``norm`` normalizes each.
    """

    def __init__(self, heads: nn.Linear, norm: nn.RMSNorm, rows: int, *, bias: bool):
        super().__init__(heads.out_features + heads.in_features, rows, bias=bias)
        self.heads, self.norm = heads, norm

    def forward(self, x: Tensor) -> Tensor:
        k = self.norm(self.heads(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))).flatten(-2)
        return super().forward(torch.cat((k, x), -1))
