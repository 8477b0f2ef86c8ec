"""The index branches of layers in model families, as their configs describe them."""

from dataclasses import replace
from typing import Any

from ...indexing import Indexer
from ...rope.rope import Rope


def deepseek_indexer(config: Any, index: int, rope: Rope) -> Indexer:
    """Return the index branch of a DeepSeek-V3.2 layer. It rotates halves, and the layer rotates pairs."""
    return Indexer(
        heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        top=config.index_topk,
        source="latent",
        rope=replace(rope, interleaved=False),
    )


def minimax_indexer(config: Any, index: int, rope: Rope) -> Indexer | None:
    """Return the index branch of a MiniMax-M3 layer, or None if the layer is dense."""
    if config.layer_types[index] != "minimax_m3_sparse":
        return None
    return Indexer(
        heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        top=config.index_topk_blocks,
        norms="rms",
        activation=None,
        weighted=False,
        scale=1.0,
        per="group",
        rope=rope,
        block_size=config.index_block_size,
        pool="max",
        local=config.index_local_blocks,
    )


def glm_indexer(config: Any, index: int, rope: Rope) -> Indexer | None:
    """Return the index branch of a GLM-5 layer, or None if the layer reads the choice of an earlier one."""
    return replace(deepseek_indexer(config, index, rope), rope=rope) if has_indexer(config, index) else None


def has_indexer(config: Any, index: int) -> bool:
    """True if a layer has an index branch; False if it reads the choice of an earlier layer.

    Raises:
        NotImplementedError: the first layer has no branch, or a type is unknown.
    """
    kinds = config.indexer_types
    if kinds[0] != "full" or kinds[index] not in ("full", "shared"):
        raise NotImplementedError(
            f"indexer_types: expected 'full' or 'shared', and 'full' for the first layer, got {kinds}"
        )
    return kinds[index] == "full"


def qwen_indexer(config: Any, index: int, rope: Rope) -> Indexer:
    """Return the index branch of a Qwen 4 layer, which scores the means of blocks of keys."""
    return Indexer(
        heads=config.indexer_n_heads,
        head_dim=config.indexer_head_dim,
        top=config.indexer_budget // config.indexer_compress_ratio,
        norms="rms",
        weighted=False,
        rope=replace(rope, axes=None),  # a layer by itself counts tokens from the start of storage
        block_size=config.indexer_compress_ratio,
        pool="mean",
        norm_after_pool=True,
        tail=True,
    )
