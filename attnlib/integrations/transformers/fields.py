"""The config fields that attnlib knows; any other field is refused, because it might change attention."""

from typing import Any

from .family import Family

# In every model family, these fields configure something other than attention.
ELSEWHERE = frozenset({
    "activation_dropout", "activation_function", "activation_sparsity_pattern", "altup_active_idx",
    "altup_coef_clip", "altup_correct_scale", "altup_num_inputs", "apply_spec_augment", "architectures",
    "attnlib_layers", "begin_suppress_tokens", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier",
    "block_multiple_of", "block_size", "bos_token_id", "chunk_size", "chunk_size_feed_forward",
    "classifier_dropout", "classifier_proj_size", "cls_token_id", "conv_L_cache", "conv_bias",
    "conv_kernel", "cross_attention_hidden_size", "d_ff", "decoder_ffn_dim", "decoder_layerdrop",
    "decoder_layers", "decoder_sparse_step", "decoder_start_token_id", "deepstack_visual_indexes",
    "dense_act_fn", "dense_intermediate_size", "depth", "dim_model_base", "do_layer_norm_before",
    "dropout", "dtype", "embd_pdrop",
    "embedding_dim", "embedding_dropout", "embedding_initializer_range", "embedding_multiplier",
    "enable_moe_block", "enable_moe_fp32_combine", "encoder_ffn_dim", "encoder_layerdrop", "encoder_layers",
    "eod_token_id", "eos_token_id", "expand", "expert_layer_offset", "expert_layer_period",
    "expert_selection_fn", "feed_forward_proj", "ffn_dim", "final_logit_softcapping",
    "first_k_dense_replace", "full_attn_alpha_factor", "full_attn_beta_factor",
    "global_attn_every_n_layers", "gradient_checkpointing", "hidden_act", "hidden_activation",
    "hc_count", "hc_lowrank", "heads_per_ngram",
    "hidden_dropout", "hidden_dropout_prob", "hidden_size_per_layer_input", "id2label", "image_size",
    "in_channels", "init_std", "initializer_factor", "initializer_range", "input_jitter_noise",
    "interleave_moe_layer_step", "intermediate_size", "intermediate_size_mlp", "is_encoder_decoder",
    "is_gated_act", "is_llama_config", "label2id", "laurel_rank", "layer_norm_elementwise_affine",
    "layer_norm_eps", "layer_norm_epsilon", "layerdrop", "linear_a_log_max", "linear_a_log_min",
    "linear_allow_neg_eigval", "linear_attn_alpha_factor", "linear_attn_beta_factor",
    "linear_conv_kernel_dim", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
    "lm_head_bias", "logit_scale", "logits_scaling", "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv",
    "make_ngram_vocab_size_divisible_by",
    "mamba_d_head", "mamba_d_state", "mamba_dt_rank", "mamba_expand", "mamba_head_dim", "mamba_hidden_act",
    "mamba_n_groups", "mamba_n_heads", "mamba_num_heads", "mamba_proj_bias", "mamba_ssm_cache_dtype",
    "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length",
    "mask_time_min_masks", "mask_time_prob", "mask_token_id", "max_position_embeddings",
    "max_source_positions", "max_target_positions", "max_window_layers", "median_filter_width",
    "mlp_alpha_factor", "mlp_beta_factor", "mlp_bias", "mlp_hidden_act", "mlp_layer_types",
    "mlp_only_layers", "mlp_ratio", "model_max_length", "model_type", "moe_apply_router_weight_on_input",
    "moe_intermediate_size", "moe_k", "moe_latent_size", "moe_layer_end_index", "moe_layer_interval",
    "moe_layer_start_index", "moe_layers", "moe_norm_min", "moe_num_experts", "moe_num_shared_experts",
    "moe_routed_scaling_factor", "moe_router_logit_softcapping", "moe_router_scaling_factor",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "moe_topk", "mtp_layer_types",
    "mtp_layers_block_type", "mtp_mlp_layer_types", "mup_enabled", "n_embd", "n_group", "n_groups",
    "n_head", "n_inner", "n_layer", "n_positions", "n_routed_experts", "n_shared_experts", "name_or_path",
    "ngram_size", "ngram_vocab_size_base", "number_of_conv_states", "output_gate_type",
    "no_rope_layer_interval", "norm_epsilon", "norm_topk_prob", "num_decoder_layers", "num_dense_layers",
    "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_layers", "num_local_experts",
    "num_logits_to_keep", "num_mel_bins", "num_nextn_predict_layers", "num_position_embeddings",
    "num_shared_experts", "out_hidden_size", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "patch_size", "prefix_dense_intermediate_size",
    "ple_conv_kernel_size", "ple_embed_dim", "ple_layer_ids",
    "pretraining_tp", "problem_type", "relative_attention_max_distance", "relative_attention_num_buckets",
    "rescale_prenorm_residual", "resid_pdrop", "residual_in_fp32", "residual_multiplier", "return_dict",
    "rms_norm_eps", "route_scale", "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise",
    "router_scaling_factor", "scale_decoder_outputs", "scale_depth", "scale_emb", "scale_embedding",
    "sep_token_id", "share_expert_dim", "shared_expert_combination_strategy",
    "seed", "split_ngram_parts",
    "shared_expert_intermediate_size", "shared_intermediate_size", "sliding_window_pattern",
    "spatial_merge_size", "ssm_state_size", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "suppress_tokens", "swiglu_alpha",
    "swiglu_limit", "swiglu_limits", "swiglu_limits_shared", "temporal_merge_size", "temporal_patch_size",
    "tie_word_embeddings", "time_step_floor", "time_step_limit", "time_step_max", "time_step_min",
    "tokenizer_class", "tokens_per_second", "top_k_experts", "topk_group", "topk_method",
    "transformers.js_config", "transformers_version", "type_vocab_size", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_associative_scan", "use_cache", "use_conv_bias", "use_double_wide_mlp",
    "use_expert_bias", "use_mamba_kernels", "use_mambapy", "use_parallel_residual", "use_post_norm",
    "use_sliding_window", "use_weighted_layer_sum", "vocab_size", "vocab_size_per_layer_input",
    "word_embed_proj_dim", "z_loss_coefficient",
})  # fmt: skip
ROPE = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor",
    "low_freq_factor", "max_position_embeddings", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "short_factor",
    "truncate", "type",
})  # fmt: skip
READ = frozenset(
    {
        "layer_types",
        "layers_block_type",
        "rope_parameters",
        "original_max_position_embeddings",
        "num_key_value_heads",
    }
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
    """Raise NotImplementedError for a rope parameter that is unknown or has an unsupported value."""
    known = ROPE | {*family.reads} | ({"mrope_section", "mrope_interleaved"} if family.axes else set())
    is_interleaved = fields.get("mrope_interleaved")
    if is_interleaved is not None and family.axes and is_interleaved != (family.axes == "interleaved"):
        raise NotImplementedError(
            f"rope_parameters: mrope_interleaved: expected {not is_interleaved}, got {is_interleaved}; "
            "transformers ignores it"
        )
    for name, value in fields.items():
        if value is not None and name not in known:
            raise NotImplementedError(f"rope_parameters: {name}={value!r} is unknown and may change the rope")
