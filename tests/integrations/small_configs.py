"""Small configs of any class of transformers, by the names of their fields."""

from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

SMALL = {
    1: "topk_group n_shared_experts first_k_dense_replace",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers layers depth "
    "num_encoder_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_experts_per_tok moe_topk "
    "num_local_layers vision_layers text_layers encoder_num_hidden_layers decoder_num_hidden_layers "
    "num_key_value_heads num_kv_heads n_group num_shared_experts resampler_depth num_codebooks",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_local_experts n_routed_experts num_experts moe_num_experts encoder_num_attention_heads "
    "decoder_num_attention_heads index_n_heads index_topk attention_num_heads vision_heads "
    "speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads linear_num_value_heads "
    "linear_num_key_heads num_swa_attention_heads",
    7: "sliding_window sliding_window_size",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim index_head_dim global_head_dim swa_head_dim "
    "dim_head attention_head_dim",
    12: "v_head_dim",
    16: "kv_lora_rank o_lora_rank hidden_size_per_layer_input mamba_d_state linear_key_head_dim linear_value_head_dim "
    "state_size ssm_state_size qk_head_dim",
    24: "q_lora_rank",
    32: "hidden_size d_model n_embd dim embed_dim model_dim hidden_dim embedding_size decoder_dim n_embed "
    "embedding_dim thinker_hidden_size backbone_hidden_size moe_intermediate_size expert_ffn_hidden_size "
    "shared_expert_intermediate_size word_embed_proj_dim projection_dim lru_width out_hidden_size output_dim "
    "text_hidden_size",
    48: "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_dim "
    "speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim dense_intermediate_size "
    "intermediate_size_mlp shared_intermediate_size moe_shared_expert_intermediate_size dim_ff ff_dim",
    64: "max_position_embeddings n_positions max_target_positions n_ctx max_source_positions max_sequence_length "
    "image_size context_length model_max_length t2u_max_position_embeddings max_seq_len",
    128: "vocab_size vocab_size_per_layer_input text_vocab_size",
}
FIELDS = MappingProxyType({name: size for size, names in SMALL.items() for name in names.split()})
SPECIAL = MappingProxyType({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1})
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
# What a class asks for beyond sizes: kinds of layers that it needs, and sizes that have to fit each other.
BOTH_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
HEADS = {"head_dim": 8, "num_key_value_heads": 2}
DECODES = {"is_decoder": True}
EXTRA = MappingProxyType(
    {
        "BailingHybridConfig": BOTH_KINDS,
        "BertConfig": DECODES,
        "CamembertConfig": DECODES,
        "CodeGenConfig": {"rotary_dim": 4},
        "Data2VecTextConfig": DECODES,
        "DeepseekV2Config": {"topk_group": 1, "n_group": 2},
        "DeepseekV4Config": {
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
        "Dots3NoteConfig": {"num_key_value_heads": 4},
        "Dots3NoteTextConfig": {"num_key_value_heads": 4},
        "ElectraConfig": DECODES,
        "ErnieConfig": DECODES,
        "GPTJConfig": {"rotary_dim": 4},
        "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
        "HunYuanDenseV1Config": HEADS,
        "HunYuanMoEV1Config": HEADS,
        "HunYuanVLTextConfig": HEADS,
        "KimiLinearConfig": BOTH_KINDS,
        "MinistralConfig": HEADS,
        "NemotronConfig": HEADS,
        "OlmoHybridConfig": BOTH_KINDS,
        "PegasusXConfig": {"block_size": 8, "num_global_tokens": 4},
        "Qwen3NextConfig": BOTH_KINDS,
        "Qwen3_5MoeTextConfig": BOTH_KINDS,
        "Qwen3_5TextConfig": BOTH_KINDS,
        "RoCBertConfig": DECODES,
        "RobertaConfig": DECODES,
        "T5Config": {"decoder_start_token_id": 0},
        "XLMRobertaConfig": DECODES,
        "XLMRobertaXLConfig": DECODES,
        "XmodConfig": {"default_language": "en_XX"},
        "ZayaConfig": {"num_experts_per_tok": 1},
    }
)


def small_config(kind: type[PreTrainedConfig], level: int) -> PreTrainedConfig:
    """A config of this class and of those within it. From ``level`` 2 on any number beyond 64 is small; 3, beyond 4.

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
    return kind(**given | EXTRA.get(kind.__name__, {}))


def _small(name: str, value: Any, level: int, special: Any) -> Any:
    """The value of a field; None leaves it."""
    if name in SPECIAL and (value is None or isinstance(value, int | list)):
        return SPECIAL[name] if value is not None or name != "decoder_start_token_id" else None
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name.endswith(("_token_id", "_token_index", "_id")) and value > 100:
        return next(special)
    if name in FIELDS:
        return FIELDS[name]
    return 32 if level >= 2 and value > 64 else 4 if level == 3 and value > 4 else None


def _fit_layers(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """As many kinds of layers as there are layers, and each kind at least once."""
    kinds = {
        name: list(dict.fromkeys(value)) for name, value in fields.items()
        if isinstance(value, list) and value and name.endswith(("_types", "no_rope_layers"))
        and all(isinstance(x, str | int) for x in value)
    }  # fmt: skip
    depth = max([2, *map(len, kinds.values())])
    if depth > 2:
        given |= dict.fromkeys([name for name in DEPTHS if name in given], depth)
    if any(name in given for name in DEPTHS):
        given |= {name: (found * depth)[:depth] for name, found in kinds.items()}


def _fit_heads(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Latents have a key for each head; and the sections of a rope fill the head."""
    if "qk_rope_head_dim" in fields:
        given["num_key_value_heads"] = 4
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("mrope_section"):
        width = given.get("head_dim") or given.get("hidden_size", 32) // given.get("num_attention_heads", 4)
        half = int(width // 2 * rope.get("partial_rotary_factor", 1))
        given["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
