"""Small configs of any class of transformers, by the names of their fields."""

from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

SMALL = {
    1: "topk_group n_shared_experts first_k_dense_replace attn_layer_offset",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "layers depth num_encoder_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers "
    "num_experts_per_tok moe_topk num_local_layers vision_layers text_layers encoder_num_hidden_layers "
    "decoder_num_hidden_layers num_key_value_heads num_kv_heads n_group num_shared_experts "
    "resampler_depth num_codebooks moe_k num_experts_per_token num_expert_group attn_layer_period",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads num_local_experts n_routed_experts num_experts moe_num_experts "
    "encoder_num_attention_heads decoder_num_attention_heads index_n_heads index_topk "
    "attention_num_heads vision_heads speech_encoder_attention_heads t2u_encoder_attention_heads "
    "t2u_decoder_attention_heads linear_num_value_heads linear_num_key_heads linear_num_heads "
    "num_swa_attention_heads",
    7: "sliding_window sliding_window_size",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim index_head_dim global_head_dim "
    "swa_head_dim dim_head attention_head_dim",
    12: "v_head_dim",
    16: "kv_lora_rank o_lora_rank hidden_size_per_layer_input mamba_d_state linear_key_head_dim "
    "linear_value_head_dim linear_head_dim state_size ssm_state_size qk_head_dim",
    24: "q_lora_rank",
    32: "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim embedding_size decoder_dim n_embed "
    "embedding_dim thinker_hidden_size backbone_hidden_size moe_intermediate_size "
    "expert_ffn_hidden_size shared_expert_intermediate_size word_embed_proj_dim projection_dim "
    "lru_width out_hidden_size output_dim text_hidden_size adapter_in_dim adapter_out_dim "
    "adapter_input_size",
    48: "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_dim "
    "speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim dense_intermediate_size "
    "intermediate_size_mlp shared_intermediate_size moe_shared_expert_intermediate_size dim_ff ff_dim",
    64: "max_position_embeddings n_positions max_target_positions n_ctx max_source_positions "
    "max_sequence_length image_size context_length model_max_length t2u_max_position_embeddings "
    "max_seq_len",
    128: "vocab_size vocab_size_per_layer_input text_vocab_size",
}
FIELDS = MappingProxyType({name: size for size, names in SMALL.items() for name in names.split()})
SPECIAL = MappingProxyType(
    {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
)
# What a class with experts leaves open, and fails without.
OPEN = MappingProxyType({"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2})
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
# What a class asks for beyond sizes: kinds of layers that it needs, and sizes that have to fit each other.
BOTH_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
HEADS = {"head_dim": 8, "num_key_value_heads": 2}
WINDOWED = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
ERNIE_VL = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}, "moe_intermediate_size": [32, 16]}
LATENT_WINDOWS = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 12,
}
GRANITE_VISION = {
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[0, 0]],
    "spatial_target_layers": [0, 1, 0, 1],
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
}
FLORENCE = {
    "depths": (1, 1),
    "patch_size": (7, 3),
    "patch_stride": (4, 2),
    "patch_padding": (3, 1),
    "patch_prenorm": (False, True),
    "embed_dim": (16, 32),
    "num_heads": (2, 4),
    "num_groups": (2, 4),
}
VISION_START = {"vision_start_token_id": 118}
DECODES = {"is_decoder": True, "add_cross_attention": True}
EXTRA = MappingProxyType(
    {
        "BailingHybridConfig": BOTH_KINDS,
        "BambaConfig": {"attn_layer_indices": [1]},
        "BertConfig": DECODES,
        "Blip2Config": {"num_query_tokens": 4, "image_token_index": 119},
        "CamembertConfig": DECODES,
        "ChameleonConfig": {"vocabulary_map": {"<image>": 119, "IMGIMGAAZ": 118}},
        "CodeGenConfig": {"rotary_dim": 4},
        "CohereCompassTextConfig": {
            "layer_types": WINDOWED,
            "rope_parameters": dict.fromkeys(WINDOWED, ROPE),
        },
        "CsmDepthDecoderConfig": {"num_codebooks": 32, "pad_token_id": 127},
        "Data2VecTextConfig": DECODES,
        "DbrxAttentionConfig": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
        "DeepseekV2Config": {"topk_group": 1, "n_group": 2},
        "DeepseekV4Config": {
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
        "Dots3NoteConfig": {"num_key_value_heads": 4},
        "Dots3NoteTextConfig": LATENT_WINDOWS,
        "ElectraConfig": DECODES,
        "Emu3Config": {
            "vocabulary_map": {"<image>": 119, "<|extra_200|>": 118, "<|visual token 000000|>": 117}
        },
        "EncodecConfig": {"sampling_rate": 32_000, "codebook_size": 128, "target_bandwidths": [2.0]},
        "Ernie4_5_VLMoeTextConfig": ERNIE_VL,
        "Ernie4_5_VL_MoeTextConfig": ERNIE_VL,
        "ErnieConfig": DECODES,
        "Florence2VisionConfig": FLORENCE,
        "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
        "GPTJConfig": {"rotary_dim": 4},
        "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
        "Gemma3nTextConfig": {
            "num_hidden_layers": 4,
            "layer_types": WINDOWED * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": 48,
        },
        "Glm5NextTextConfig": {
            "layer_types": INDEXED["layer_types"],
            "index_kpool": 4,
            "qk_rope_head_dim": 0,
        },
        "Granite4VisionConfig": GRANITE_VISION,
        "GraniteMoeHybridConfig": BOTH_KINDS,
        "HunYuanDenseV1Config": HEADS,
        "HunYuanMoEV1Config": HEADS,
        "HunYuanVLTextConfig": HEADS,
        "InstructBlipConfig": {"num_query_tokens": 4, "image_token_index": 119},
        "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_index": 119},
        "KimiLinearConfig": BOTH_KINDS,
        "Kosmos2Config": {"latent_query_num": 4},
        "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "Mamba2Config": {"head_dim": 16, "n_groups": 1},
        "MinistralConfig": HEADS,
        "Mistral4Config": {"head_dim": 16},
        "Molmo2AdapterConfig": {"vision_feature_layer": [-1, -2]},
        "MoonshineStreamingConfig": {"num_key_value_heads": 4},
        "MuseSparkAudioConfig": {
            "num_hidden_layers": 4,
            "hidden_sizes": (32, 32, 32, 32),
            "depths": (1, 1, 1, 1),
        },
        "NemotronConfig": HEADS,
        "OlmoHybridConfig": BOTH_KINDS,
        "PaddleOCRTextConfig": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        "PegasusXConfig": {"block_size": 8, "num_global_tokens": 4},
        "Qwen2_5OmniThinkerConfig": VISION_START,
        "Qwen3NextConfig": BOTH_KINDS,
        "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
        "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 32},
        "Qwen3OmniMoeThinkerConfig": VISION_START,
        "Qwen3_5MoeTextConfig": BOTH_KINDS,
        "Qwen3_5TextConfig": BOTH_KINDS,
        "Qwen4ExpTextConfig": INDEXED,
        "RoCBertConfig": DECODES,
        "RobertaConfig": DECODES,
        "Step3p7TextConfig": {"sliding_window": 7},
        "T5Config": {"decoder_start_token_id": 0},
        "UdopConfig": {"decoder_start_token_id": 0},
        "UnlimitedOcrTextConfig": {"num_key_value_heads": 4},
        "XLMRobertaConfig": DECODES,
        "XLMRobertaXLConfig": DECODES,
        "XmodConfig": {"default_language": "en_XX"},
        "Zamba2Config": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8},
        "ZambaConfig": {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
        "ZayaConfig": {"num_experts_per_tok": 1},
    }
)


def small_config(kind: type[PreTrainedConfig], level: int) -> PreTrainedConfig:
    """A config of this class and of those within it. From ``level`` 2 on any number beyond 64 is small; 3,
    beyond 4.

    Whatever a class says against the sizes is raised.
    """
    try:
        fields = dict(vars(kind()))
    except (TypeError, ValueError):  # it has no defaults
        fields = {}
    given: dict[str, Any] = {}
    for name, sub in getattr(kind, "sub_configs", {}).items():
        inner = type(fields[name]) if isinstance(fields.get(name), PreTrainedConfig) else sub
        if inner.__name__ != "AutoConfig" and not (fields and fields.get(name) is None):
            small = small_config(inner, level)
            given[name] = small.to_dict() | {"model_type": small.model_type}
    special = iter(range(120, 60, -1))
    for name, value in fields.items():
        if name not in given and not name.startswith("_"):
            made = _small(name, value, level, special)
            given |= {} if made is None else {name: made}
    _fit_layers(given, fields)
    _fit_heads(given, fields)
    _fit_sections(given, fields, kind)
    return kind(**given | EXTRA.get(kind.__name__, {}))


def _small(name: str, value: Any, level: int, special: Any) -> Any:
    """The value of a field; None leaves it."""
    if name in SPECIAL and (value is None or isinstance(value, int | list)):
        return SPECIAL[name] if value is not None or name != "decoder_start_token_id" else None
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if not isinstance(value, int) or isinstance(value, bool):
        return OPEN.get(name) if value is None else None
    if name.endswith(("_token_id", "_token_index", "_id")) and value > 100:
        return next(special)
    if name in FIELDS:
        return FIELDS[name]
    return 32 if level >= 2 and value > 64 else 4 if level == 3 and value > 4 else None


def _fit_layers(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """As many kinds of layers as there are layers, and each kind at least once."""
    kinds = {
        name: list(dict.fromkeys(value)) for name, value in fields.items()
        if isinstance(value, list) and value and name.endswith(("_types", "_block_type", "no_rope_layers"))
        and all(isinstance(x, str | int) for x in value)
    }  # fmt: skip
    depth = max([2, *map(len, kinds.values())])
    if depth > 2:
        given |= dict.fromkeys([name for name in DEPTHS if name in given], depth)
    if any(name in given for name in DEPTHS):
        given |= {name: (found * depth)[:depth] for name, found in kinds.items()}


def _fit_heads(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Give latents a key for each head."""
    if "qk_rope_head_dim" in fields:
        given["num_key_value_heads"] = 4


def _fit_sections(given: dict[str, Any], fields: dict[str, Any], kind: type[PreTrainedConfig]) -> None:
    """Fill the half of a head with the sections of a rope, also where the model has a default of its own for
    them.
    """
    rope = fields.get("rope_parameters")
    known = "mrope_section" in (getattr(kind, "ignore_keys_at_rope_validation", None) or ())
    if isinstance(rope, dict) and (known or rope.get("mrope_section")):
        width = given.get("head_dim") or given.get("hidden_size", 32) // given.get("num_attention_heads", 4)
        half = int(width // 2 * rope.get("partial_rotary_factor", 1))
        given["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
