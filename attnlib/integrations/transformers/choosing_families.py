"""Model families with latent attention, and those whose layers choose the keys of each query."""

from dataclasses import replace

from ...models.families import NORMED, alike
from .family import Family
from .indexers import deepseek_indexer, minimax_indexer
from .mistral_large import (
    LearntRope,
    finish_mistral_large,
    mistral_large_indexer,
    mistral_large_options,
)
from .norms import OffsetRMSNorm

LATENT = alike(
    "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
)
LATENT += alike("o_proj")
DEEPSEEK = Family(
    is_latent=True,
    weights=LATENT,
    kv_heads=None,
    head_dim=None,
    output_bias=None,
    rope="rope_interleave",
    norm_eps=1e-6,
)
# The config converts these fields to indexer_types.
SHARES = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
# DeepSeek-V3.2: latent layers with an index branch, which chooses the keys of each query.
SPARSE = replace(
    DEEPSEEK,
    weights=(
        *LATENT,
        ("indexer.wq_b", ("indexer.q_proj",)),
        ("indexer.wk", ("indexer.k_proj",)),
        *alike("indexer.k_norm", "indexer.weights_proj"),
    ),
    rope="interleaved",
    kinds=("indexed_attention",),
    select=deepseek_indexer,
    reads=("index_n_heads", "index_head_dim", "index_topk"),
)
# The text model of MiniMax-M3: grouped layers, some of which choose blocks of keys.
MINIMAX_M3 = Family(
    weights=(*NORMED, *alike("indexer.q_proj", "indexer.k_proj", "indexer.q_norm", "indexer.k_norm")),
    norm=OffsetRMSNorm,
    bias=False,
    output_bias=False,
    rotates_part=True,
    kinds=("full_attention", "minimax_m3_sparse"),
    select=minimax_indexer,
    reads=(
        *("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"),
        "rotary_dim",  # which transformers ignores
    ),
)
# Mistral Large 4: layers of DeepSeek-V3.2 without a q latent, some of which read latents of earlier ones.
MISTRAL_LARGE = replace(
    SPARSE,
    weights=(
        *(names for names in SPARSE.weights if not names[0].startswith(("q_a_", "q_b_"))),
        *alike("indexer.q_input_norm"),
        ("indexer.softmax_scaling.scale", ("indexer.query_scale",)),
        ("indexer.softmax_scaling.bias", ("indexer.query_bias",)),
        ("softmax_scaling.scale", ("temperature.scale",)),
        ("softmax_scaling.bias", ("temperature.bias",)),
    ),
    rope_layers="no_rope_layers",
    rope_class=LearntRope,
    options=mistral_large_options,
    select=mistral_large_indexer,
    finish=finish_mistral_large,
    reads=(*SPARSE.reads, "indexer_types", *SHARES, "kv_source_layers"),
    returns=3,
)
