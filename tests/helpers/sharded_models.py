"""A model of every kind of layer, each run again in the backward, to be shared out over ranks."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnlib import (
    CAUSAL,
    CHECKPOINT_SAVE_OPS,
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Rope,
    scores,
    sliding,
)

HIDDEN = 64
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, list(CHECKPOINT_SAVE_OPS))}


class Block(nn.Module):
    """A layer beside its input, run again in the backward; what ``options`` keep is not."""

    def __init__(self, layer: nn.Module, options: dict):
        super().__init__()
        self.norm, self.layer, self.options = nn.RMSNorm(HIDDEN), layer, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.once, x, use_reentrant=False, **self.options)

    def once(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


def model(device: str = "cpu") -> nn.Sequential:
    """The same weights in every process; on the meta device none, but what functions captured has its
    values.
    """
    torch.manual_seed(0)
    trained, fixed = (scores.distance_bias(x) for x in (nn.Parameter(torch.randn(4, 6)), torch.randn(4, 6)))
    with torch.device(device):
        layers = (
            GroupedQueryAttention(
                HIDDEN, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(16), qk_norm=True, sinks=True
            ),
            GroupedQueryAttention(
                HIDDEN, 4, num_kv_heads=1, mask=sliding(5), alibi=True, bias=True, softcap=9.0
            ),
            GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, score=trained),
            GroupedQueryAttention(HIDDEN, 4, mask=CAUSAL, score=fixed),
            MultiHeadLatentAttention(
                HIDDEN, 4, mask=CAUSAL, q_lora_rank=None, rope=Rope(16, interleaved=True), **LATENT
            ),
        )
        return nn.Sequential(*(Block(x, SELECTIVE if n == 1 else {}) for n, x in enumerate(layers)))


def sharded(blocks: nn.Sequential, mesh, **options) -> nn.Sequential:
    """The blocks and what is around them, each under FSDP2."""
    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(blocks, mesh=mesh, **options)
