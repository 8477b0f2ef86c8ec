"""Small models of transformers' families, with random weights."""

from collections.abc import Iterable
from inspect import signature
from itertools import product
from types import MappingProxyType

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaModel,
    Mistral4ForCausalLM,
    PreTrainedConfig,
)

# The argument of models and of generate, and the field of outputs, since transformers 5.24 and before.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
# An index branch chooses six keys, fewer than most tests have. With fewer heads, scores of 0 would be equal.
INDEXED = {
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
# Layers that choose three blocks of four keys, one of which is the block of the query, and a dense one.
BLOCKED = {
    "num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse", "full_attention"], "head_dim": 16,
    "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2,
    "dense_intermediate_size": 32, "shared_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 16,
    "index_block_size": 4, "index_topk_blocks": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip
GROWING = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}  # queries, every four tokens
LINEAR = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0, 1.1], "long_factor": [1.0, 4.0],
    "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
}
# A layer of linear attention, whose state transformers keeps, and one of full attention.
HYBRID = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
ROPES = {  # of layers with and without a window
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
# A layer of linear attention, which also embeds n-grams, and two that choose three blocks of two keys.
QWEN4 = EXPERTS | {
    **HYBRID, "num_hidden_layers": 3, "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 8,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": 6, "indexer_compress_ratio": 2,
    "rope_parameters": MROPE | {"partial_rotary_factor": 0.5},
}  # fmt: skip
# What the config of each family says beside the sizes, so that all that sets the family apart is at work.
# fmt: off
DECODERS = MappingProxyType(
    {
        "llama": {"rope_parameters": LLAMA3},
        "mistral": {"sliding_window": 7},
        "mixtral": EXPERTS | {"sliding_window": 7},
        "ministral3": {"rope_parameters": YARN | GROWING, "sliding_window": 7},
        "qwen2": WINDOWS,
        "qwen3": WINDOWS | {"head_dim": 16},
        "qwen3_moe": EXPERTS | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7},
        "gemma": {"head_dim": 16},
        "gemma2": {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 5.0,
        },
        "gemma3_text": {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "sliding_window_pattern": 2,
        },
        "phi3": {"sliding_window": 7, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        "glm4": {"head_dim": 16},
        "cohere": {"use_qk_norm": True},
        "cohere2": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        "olmo2": {},
        "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        "granite": {"attention_multiplier": 0.3},
        "granitemoe": EXPERTS | {"attention_multiplier": 0.3},
        "olmo": {},
        "starcoder2": {"sliding_window": 7},
        "smollm3": WINDOWS | {"no_rope_layers": [1, 0]},
        "gpt_oss": EXPERTS | {"head_dim": 16, "sliding_window": 7},
        "gpt_neox": {"hidden_size": 64, "num_key_value_heads": None},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None},
        "gpt2": {
            "scale_attn_by_inverse_layer_idx": True,
            "num_key_value_heads": None,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
        "deepseek_v2": LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
        "deepseek_v3": LATENT
        | {"rope_parameters": YARN, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2},
        "minicpm3": LATENT,
        "mistral4": LATENT
        | {"rope_parameters": YARN | GROWING, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "llama4_text": EXPERTS
        | {
            "head_dim": 16,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
        },
        "glm4_moe": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
        },
        "glm4_moe_lite": LATENT
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "hunyuan_v1_dense": {"head_dim": 16},
        "qwen2_moe": EXPERTS
        | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 7},
    }
)
# Families whose tests run by default only in part: logits, and one generate.
RECENT = MappingProxyType(
    {
        "gemma3n_text": SHARED,
        "gemma4_text": SHARED
        | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "gemma4_unified_text": SHARED | {"global_head_dim": 8},
        "ernie4_5": {"head_dim": 16, "use_bias": True},
        "ernie4_5_moe": {"use_bias": True, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
        "arcee": {},
        "jais2": {},
        "seed_oss": {"head_dim": 16, "attention_out_bias": True},
        "helium": {"head_dim": 8},
        "apertus": {"rope_parameters": LLAMA3},
        "minimax_m2": EXPERTS | {"head_dim": 16, "rotary_dim": 8},
        "flex_olmo": EXPERTS,
        "olmoe": EXPERTS,
        "dots1": WINDOWS
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
        },
        "glm": {"head_dim": 16},
        "nemotron": {"head_dim": 16},
        "phi": {"qk_layernorm": True},
        "phimoe": EXPERTS | {"sliding_window": 7},
        "persimmon": {"num_key_value_heads": None},
        "stablelm": {"use_qkv_bias": True, "hidden_size": 64},
        "vaultgemma": {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 5.0,
        },
        "hyperclovax": {"attention_multiplier": 0.3},
        "granitemoeshared": EXPERTS | {"attention_multiplier": 0.3},
        "mellum": EXPERTS
        | WINDOWS
        | {
            "head_dim": 16,
            "rope_parameters": {"sliding_attention": DEFAULT, "full_attention": LLAMA3},
        },
        "ministral": WINDOWS | {"head_dim": 8},
        "cwm": WINDOWS | {"head_dim": 16},
        "solar_open": {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "hy_v3": EXPERTS | {"head_dim": 16},
        "exaone4": WINDOWS,
        "exaone_moe": EXPERTS | WINDOWS,
        "cohere2_moe": EXPERTS
        | {
            "head_dim": 16,
            "logit_scale": 1.0,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
        "mimo_v2_flash": WINDOWS
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {"sliding_attention": HALF, "full_attention": HALF | {"rope_theta": 100.0}},
        },
        "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
        "deepseek_v32": LATENT | INDEXED | {"n_group": 2, "topk_group": 1},
        "glm_moe_dsa": LATENT
        | INDEXED
        | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
        "minimax_m3_vl_text": BLOCKED | {"index_block_size": 32},  # alone, so that padding may be anywhere
        # Layers 2 and 3 read the latents of layers 0 and 1, and layer 2 the choice of layer 1, too.
        "mistral_large4_text": {name: x for name, x in LATENT.items() if name != "q_lora_rank"}
        | INDEXED
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
            "indexer_types": ["full", "full", "shared", "full"],
            "first_k_dense_replace": 4,
            "rms_norm_eps": 0.01,  # of latents, not of the index branch
            "rope_parameters": YARN,
        },
        "youtu": LATENT | {"pad_token_id": None},  # loading a folder clears the embedding of padding
        "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]},
        "granitemoehybrid": EXPERTS
        | LINEAR
        | MAMBA
        | {"attention_multiplier": 0.3, "position_embedding_type": "rope", "shared_intermediate_size": 32},
        "olmo_hybrid": LINEAR | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
        "bamba": MAMBA | {"attn_layer_indices": [1]},
        "minimax": EXPERTS
        | {"block_size": 8, "sliding_window": 7, "layer_types": ["full_attention", "linear_attention"]},
        "nemotron_h": {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "num_hidden_layers": None,
            "attention_bias": False,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 4,
        },
        "lfm2_moe": EXPERTS
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]},
        "qwen3_next": EXPERTS | HYBRID | {"shared_expert_intermediate_size": 32},
        "afmoe": EXPERTS | WINDOWS | {"head_dim": 16},
        "laguna": EXPERTS
        | WINDOWS
        | {"head_dim": 16, "num_attention_heads_per_layer": [6, 4], "rope_parameters": ROPES}
        | {"shared_expert_intermediate_size": 32, "mlp_layer_types": ["dense"] * 2},
        "step3p5": WINDOWS
        | {"head_dim": 16, "num_sliding_attention_heads": 6, "query_pre_attn_scalar": 9}
        | {"rope_parameters": ROPES, "mlp_layer_types": ["dense"] * 2},
        "qwen3_5_text": HYBRID | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
        "qwen3_5_moe_text": EXPERTS
        | HYBRID
        | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}, "shared_expert_intermediate_size": 32},
        "qwen4_exp_text": QWEN4,
        "qwen2_vl_text": WINDOWS | {"rope_parameters": MROPE},
        "qwen2_5_vl_text": WINDOWS | {"rope_parameters": MROPE},
        "qwen3_vl_text": {"head_dim": 8, "rope_parameters": MROPE},
        "qwen3_vl_moe_text": EXPERTS | {"head_dim": 8, "rope_parameters": MROPE},
        "glm4v_text": {"hidden_size": 64, "rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
        "glm4v_moe_text": {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5},
        },
        "ernie4_5_vl_moe_text": {
            "use_bias": True,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [32, 32],
            "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]},
        },
    }
)
# fmt: on
EYES = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "image_size": 16,
}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2}
# The vision-language model that each text model without one of its own belongs to.
SEEING = MappingProxyType(
    {
        "step3p5": "step3p7",
        "mistral_large4_text": "mistral_large4",
        "qwen3_5_text": "qwen3_5",
        "qwen4_exp_text": "qwen4_exp",
        **{
            name: name.removesuffix("_text")
            for name in RECENT
            if name.endswith(("_vl_text", "_vl_moe_text", "glm4v_text", "glm4v_moe_text"))
        },
    }
)
TOKENS = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
TOKENS |= {"image_start_token_id": 58, "image_end_token_id": 57}


def recent(*others: Iterable) -> list:
    """Parameters of tests that only ``-m slow`` runs: recent families, or all pairs with ``others``."""
    cases = [case if others else case[0] for case in product(RECENT, *others)]
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def small(family: str, **fields: object) -> torch.nn.Module:
    """A causal language model of a family, whose every weight shows in its logits."""
    make = CONFIG_MAPPING[family]
    biased = {"attention_bias": True} if hasattr(make(), "attention_bias") else {}
    config = make(**SIZES | biased | (DECODERS | RECENT)[family] | fields)
    if family in SEEING:
        return lively(seeing(SEEING[family], config).float())
    model = Mistral4ForCausalLM(config) if family == "mistral4" else AutoModelForCausalLM.from_config(config)
    return lively(model.float())


def seeing(family: str, text: PreTrainedConfig) -> torch.nn.Module:
    """A vision-language model with this text model and a small vision encoder."""
    make = CONFIG_MAPPING[family]
    sees = make.sub_configs["vision_config"]
    eyes, sees = (EYES | PIXTRAL, CONFIG_MAPPING["pixtral"]) if sees is AutoConfig else (EYES, sees)
    known = sees().to_dict()
    vision = {name: x for name, x in eyes.items() if name in known}
    vision |= {"out_hidden_size": text.hidden_size} if "out_hidden_size" in known else {}
    config = make(**TOKENS, text_config=text.to_dict(), vision_config=vision)
    return AutoModelForImageTextToText.from_config(config)


@torch.no_grad()
def lively(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights of such sizes that attention is no mean, and gains, biases and sinks that
    differ.
    """
    for name, x in model.named_parameters():
        if not x.is_floating_point():
            continue
        if x.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(x, std=1.2 * x.shape[-1] ** -0.5)
        else:
            torch.nn.init.uniform_(x, 0.3, 1.2)
    return model
