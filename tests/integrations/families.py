"""Small models of transformers' families, with random weights."""

from types import MappingProxyType

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
# What the config of each family says beside the sizes.
DECODERS = MappingProxyType(
    {
        "llama": {},
        "mistral": {"sliding_window": 7},
        "mixtral": EXPERTS,
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "qwen3_moe": EXPERTS | {"head_dim": 16},
        "gemma": {"head_dim": 16},
        "gemma2": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        "gemma3_text": {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
        "phi3": {"sliding_window": 7},
        "glm4": {"head_dim": 16},
        "cohere": {},
        "cohere2": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        "olmo2": {},
        "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        "granite": {"attention_multiplier": 0.3},
        "starcoder2": {"sliding_window": 7},
        "smollm3": {},
        "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 7},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "deepseek_v2": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
        "deepseek_v3": LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        "minicpm3": LATENT,
        "llama4_text": EXPERTS | {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 48},
        "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 7},
    }
)


def small(family: str) -> torch.nn.Module:
    """A causal language model of a family."""
    config = CONFIG_MAPPING[family](**SIZES | DECODERS[family])
    return AutoModelForCausalLM.from_config(config).float()
