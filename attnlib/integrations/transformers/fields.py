"""The config fields that attnlib knows; any other field is refused, because it might change attention."""

from typing import Any

from .families import Family

# In every model family, these fields configure something other than attention.
ELSEWHERE = frozenset({
    "activation_dropout", "activation_function", "activation_sparsity_pattern", "altup_active_idx",
    "altup_coef_clip", "altup_correct_scale", "altup_num_inputs", "apply_spec_augment", "architectures",
    "attnlib_layers", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "classifier_proj_size", "cls_token_id", "cross_attention_hidden_size", "d_ff",
    "decoder_ffn_dim", "decoder_layerdrop", "decoder_layers", "decoder_sparse_step",
    "decoder_start_token_id", "dense_act_fn", "dim_model_base", "do_layer_norm_before", "dropout",
    "dtype", "embd_pdrop", "embedding_dim", "embedding_dropout", "embedding_multiplier", "enable_moe_block",
    "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers", "eod_token_id", "eos_token_id",
    "feed_forward_proj", "ffn_dim", "final_logit_softcapping", "first_k_dense_replace",
    "gradient_checkpointing", "hidden_act", "hidden_activation", "hidden_dropout", "hidden_dropout_prob",
    "hidden_size_per_layer_input", "id2label", "init_std", "initializer_factor", "initializer_range",
    "interleave_moe_layer_step", "intermediate_size", "intermediate_size_mlp", "is_encoder_decoder",
    "is_gated_act", "is_llama_config", "label2id", "laurel_rank", "layer_norm_elementwise_affine",
    "layer_norm_eps", "layer_norm_epsilon", "layerdrop", "logit_scale", "logits_scaling",
    "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length",
    "mask_time_min_masks", "mask_time_prob", "mask_token_id", "max_position_embeddings",
    "max_source_positions", "max_target_positions", "max_window_layers", "median_filter_width",
    "mlp_bias", "mlp_layer_types", "mlp_only_layers", "model_max_length", "model_type",
    "moe_intermediate_size", "moe_layers", "n_embd", "n_group", "n_head", "n_inner", "n_layer",
    "n_positions", "n_routed_experts", "n_shared_experts", "name_or_path", "no_rope_layer_interval",
    "norm_epsilon", "norm_topk_prob", "num_decoder_layers", "num_experts", "num_experts_per_tok",
    "num_hidden_layers", "num_layers", "num_local_experts", "num_mel_bins", "num_nextn_predict_layers",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "relative_attention_max_distance", "relative_attention_num_buckets", "resid_pdrop",
    "residual_multiplier", "return_dict", "rms_norm_eps", "routed_scaling_factor", "router_aux_loss_coef",
    "router_jitter_noise", "scale_decoder_outputs", "scale_depth", "scale_emb", "scale_embedding",
    "sep_token_id", "shared_expert_intermediate_size", "sliding_window_pattern", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "suppress_tokens", "swiglu_alpha", "swiglu_limit", "tie_word_embeddings", "tokenizer_class",
    "top_k_experts", "topk_group", "topk_method", "transformers.js_config", "transformers_version",
    "type_vocab_size", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
    "use_double_wide_mlp", "use_parallel_residual", "use_sliding_window", "use_weighted_layer_sum",
    "vocab_size", "vocab_size_per_layer_input", "word_embed_proj_dim",
})  # fmt: skip
ROPE = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "max_position_embeddings", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "short_factor",
    "truncate", "type",
})  # fmt: skip
READ = frozenset(
    {"layer_types", "rope_parameters", "original_max_position_embeddings", "num_key_value_heads"}
)
SIZES = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)  # only MLA layers have these sizes
DERIVED = frozenset({"qk_head_dim", "head_dim"})  # computed from the sizes above


def check_fields(family: Family, config: Any) -> None:
    """Raise NotImplementedError for a config field that is unknown or has an unsupported value."""
    for name, expected in family.fixed:
        value = getattr(config, name, expected)
        if (tuple(value) if isinstance(value, list) else value) not in (expected, None):
            raise NotImplementedError(f"{name}: expected {expected!r}, got {value!r}")
    for name in family.unused:
        if (value := getattr(config, name, None)) is not None:
            raise NotImplementedError(
                f"{name}: expected None, got {value!r}; {config.model_type} ignores it in transformers, so "
                f"config.{name} = None gives the same results"
            )
    known = ELSEWHERE | _read(family)
    for name, value in config.to_dict().items():
        if value is not None and name not in known and not name.startswith("_"):
            raise NotImplementedError(
                f"config: {name}={value!r} is unknown for {config.model_type} and may change its attention"
            )


def _read(family: Family) -> frozenset[str]:
    """Return the config fields that define the family's attention."""
    named = (getattr(family, name) for name in type(family).__dataclass_fields__)
    read = (
        frozenset(value for value in named if isinstance(value, str))
        | READ
        | {name for name, _ in family.fixed}
        | {*family.unused}
    )
    read |= SIZES | DERIVED if family.is_latent else set()
    read |= {"partial_rotary_factor"} if family.rotates_part else set()
    return read | ({"sliding_window"} if family.window is not None else set()) | set(family.reads)


def check_rope(family: Family, fields: dict[str, Any]) -> None:
    """Raise NotImplementedError for an unknown rope parameter."""
    for name, value in fields.items():
        if value is not None and name not in ROPE and name not in family.reads:
            raise NotImplementedError(f"rope_parameters: {name}={value!r} is unknown and may change the rope")
