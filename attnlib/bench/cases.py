"""The attention calls that the GPU benchmark times, and the FLOPs of each."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import CAUSAL, FULL, Mask, sliding


class Case(NamedTuple):
    """An attention call to time: batch, query heads, KV heads, tokens, key channels and value channels.

    With ``lengths``, the call has packed sequences of these lengths, a batch of one, and ``tokens`` in all.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    value_dim: int
    mask: Mask
    lengths: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def flops(self, what: str) -> float:
        """Return the FLOPs of a pass such as "forward"; sliding windows are not taken into account.

        A causal mask halves the number, as in the FlashAttention papers.
        """
        pairs = self.heads * sum(n * n for n in self.lengths or (self.tokens,) * self.batch)
        forward, backward = 2 * (self.dim + self.value_dim), 2 * (3 * self.dim + 2 * self.value_dim)
        products = {"backward": backward, "both": forward + backward}.get(what, forward)
        return pairs * products / (1 if self.mask == FULL else 2)

    def tensors(self, device: str) -> list[Tensor]:
        """Return random q, k, v and output gradient, with tokens before heads.

        Packed cases have no batch dimension.
        """
        sizes = (
            (self.heads, self.dim),
            (self.kv_heads, self.dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        )
        rows = (self.tokens,) if self.lengths else (self.batch, self.tokens)
        return [torch.randn(*rows, *size, device=device, dtype=self.dtype) for size in sizes]


def plain(tokens: int, heads: int, dim: int, mask: Mask = CAUSAL, *, batch: int = 1) -> Case:
    """Return a case of multi-head attention, named after its number of tokens."""
    name = f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
    return Case(name, batch, heads, heads, tokens, dim, dim, mask)


TRAINING = (
    Case("d128 full 8k", 2, 16, 16, 8192, 128, 128, FULL),
    Case("d128 causal 8k", 2, 16, 16, 8192, 128, 128, CAUSAL),
    Case("d64 full 8k", 2, 32, 32, 8192, 64, 64, FULL),
    Case("d64 causal 8k", 2, 32, 32, 8192, 64, 64, CAUSAL),
    Case("d256 causal 8k", 2, 8, 8, 8192, 256, 256, CAUSAL),
    Case("GQA 32/8 d128 causal 4k", 4, 32, 8, 4096, 128, 128, CAUSAL),
    Case("d128 causal 1k", 16, 16, 16, 1024, 128, 128, CAUSAL),
    Case("d128 causal 32k", 1, 16, 16, 32768, 128, 128, CAUSAL),
    Case("MLA 192/128 causal 8k", 2, 16, 16, 8192, 192, 128, CAUSAL),
)

WIDE = (
    Case("d512 causal", 2, 8, 4, 8192, 512, 512, CAUSAL),
    Case("d512 full", 2, 8, 4, 8192, 512, 512, FULL),
    Case("d320 causal", 2, 8, 4, 8192, 320, 320, CAUSAL),
)

LENGTHS = tuple(512 << doublings for doublings in range(8))  # 512 to 64k tokens
GROWING = tuple(plain(tokens, 48, 64) for tokens in LENGTHS)
LONG = tuple(plain(tokens, 16, 128) for tokens in (8192, 16384, 32768, 65536))
MEMORY = tuple(plain(tokens, 16, 128) for tokens in LENGTHS[1:])

# Together these sequences have as many tokens as 8 x 2048, and 2 % more query-key pairs.
RAGGED = (3300, 2800, 2333, 1800, 1559, 1201, 1177, 1024, 601, 300, 150, 80, 40, 17, 1, 1)


def packed(*lengths: int, name: str = "") -> Case:
    """Return a case with packed sequences of these lengths: causal, with 16 heads of 128 channels."""
    name = name or f"{len(lengths)} x {lengths[0]}"
    return Case(name, 1, 16, 16, sum(lengths), 128, 128, CAUSAL, lengths)


# Each packed case is compared with a dense batch of equally many tokens.
VARLEN = (
    (packed(*(1024,) * 16), plain(1024, 16, 128, batch=16)),
    (packed(*(4096,) * 4), plain(4096, 16, 128, batch=4)),
    (packed(*RAGGED, name="ragged, 1 to 3300"), plain(2048, 16, 128, batch=8)),
)
WINDOW = (plain(16384, 16, 128, sliding(1024)), plain(16384, 16, 128))
GROUPED = (
    Case("GQA 32/8", 4, 32, 8, 4096, 128, 128, CAUSAL),
    Case("MHA 32/32", 4, 32, 32, 4096, 128, 128, CAUSAL),
)
SMALL = Case("[1, 128, 8, 64]", 1, 8, 8, 128, 64, 64, CAUSAL)
