"""A decoder language model composed from attnlib's layers.

Every other example builds on this file; ``decoding.py`` generates with it. Any block can use any
attention layer: ``attention(i)`` makes the layer of block ``i``.

>>> rope = Rope(32)
>>> model = Decoder(256, 128, 2, attention=lambda i: MultiQueryAttention(128, 4, mask=CAUSAL, rope=rope))
>>> model(torch.randint(256, (2, 9))).shape
torch.Size([2, 9, 256])
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from attnlib import Angles, KVLayout, LayerCache, MaskFunction, shared_angles


class SwiGLU(nn.Module):
    """The gated MLP ``down(silu(gate(x)) * up(x))`` (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, mlp_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, attention: nn.Module, hidden_size: int, mlp_size: int, norm_eps: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.mlp = SwiGLU(hidden_size, mlp_size)

    def forward(
        self,
        x: Tensor,
        *,
        kv: LayerCache | None,
        angles: Angles | None,
        cu_seqlens: Tensor | None,
        mask: MaskFunction | None = None,
    ) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, kv=kv, angles=angles, cu_seqlens=cu_seqlens, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A pre-norm decoder language model whose i-th block attends with ``attention(i)``.

    ``mlp_size`` defaults to ``8 / 3`` of the hidden size, rounded up to a multiple of 32. ``tie_embeddings``
    shares the embedding with the output projection.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        *,
        attention: Callable[[int], nn.Module],
        mlp_size: int | None = None,
        tie_embeddings: bool = True,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        mlp_size = mlp_size or -(-8 * hidden_size // 96) * 32
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            Block(attention(i), hidden_size, mlp_size, norm_eps) for i in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        if tie_embeddings:
            self.lm_head.weight = self.embed.weight

    def replace_attention(self, layers: Sequence[nn.Module]) -> None:
        """Replace the attention of every block: block ``i`` gets ``layers[i]``."""
        for block, layer in zip(self.blocks, layers, strict=True):
            block.attention = layer

    def kv_layouts(self) -> list[KVLayout]:
        """Return the cache layout of every layer, the argument from which a KVCache is made."""
        return [block.attention.kv_layout for block in self.blocks]

    def forward(
        self,
        tokens: Tensor,
        *,
        caches: Sequence[LayerCache] | None = None,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rows: Tensor | None = None,
        mask: MaskFunction | None = None,
    ) -> Tensor:
        """Return the logits ``[..., vocab]`` after each of ``tokens`` ``[b, s]``, or packed ``[t]``.

        Packed tokens need ``cu_seqlens``, or ``caches`` in a packed step. ``positions`` (``[b, s]`` or
        ``[t]``) default to the cache's positions, or without a cache to each token's index in its sequence.
        With ``rows`` ``[n]``, return logits ``[n, vocab]`` after these packed tokens only. ``mask`` restricts
        the mask of every layer.
        """
        x, layers = self.embed(tokens), [block.attention for block in self.blocks]
        first = None if caches is None else caches[0]
        angles = shared_angles(layers, x, kv=first, positions=positions, cu_seqlens=cu_seqlens, mask=mask)
        for i, block in enumerate(self.blocks):
            kv = None if caches is None else caches[i]
            x = block(x, kv=kv, angles=angles[i], cu_seqlens=cu_seqlens, mask=mask)
        x = x if rows is None else x[rows]
        return self.lm_head(self.norm(x))
