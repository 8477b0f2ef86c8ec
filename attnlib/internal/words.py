"""Argument names of other libraries, and the attnlib argument to use instead of each."""

from types import MappingProxyType

PADDING = "key_starts= and key_ends= from attnlib.packing.bounds_of({})"
BOOLS = "for a bool mask [b|1, h|1, s, t] use mask=attnlib.masks.mask_tensor(shown)"
ADDED = "for one that is added to scores use score=attnlib.scores.bias_tensor(bias)"
MADE = "pass {} to the constructor of the layer"
UNSTORED = "attention never stores its weights; weights() of a layer or attention_weights() recomputes them"

# Each row lists argument names of other libraries, then pairs: required arguments, and a remedy. A remedy
# applies to callables that take all of its required arguments; the first remedy that applies is used. Some
# required arguments tell callables apart: only forward() of a layer takes cu_seqlens_context, only attention
# functions take q, and only constructors of layers take hidden_size.
ROWS = (
    # arguments for masks and scores
    (
        "is_causal causal",
        (
            "cu_seqlens_context",
            MADE.format("mask=CAUSAL or mask=FULL") + "; mask= of a call can only hide more",
        ),
        ("mask", "use mask=CAUSAL, or mask=FULL"),
        ("is_causal", "use is_causal="),
        ("causal", "use causal="),
    ),
    (
        "window_size sliding_window window local_window_size attention_window",
        ("window", "use window=, which counts the query's own key"),
        ("window_size", "use window_size=, the keys before and after the query"),
        ("cu_seqlens_context", MADE.format("mask=sliding(n)") + "; mask= of a call can only hide more"),
        ("mask", "use mask=sliding(n), which counts the query's own key"),
        ("left", "use left=, or call sliding(n), which counts the query's own key"),
        ("layouts", "layouts hold it, as does layer.kv_layout of a layer with mask=sliding(n)"),
    ),
    (
        "attention_mask attn_mask attn_bias bias mask",
        (
            "cu_seqlens_context",
            f"for padding use attention_mask=, [b, t], True for tokens; {BOOLS}, True where a key is "
            f"visible; for one that is added to scores {MADE.format('score=')}",
        ),
        ("attention_mask", "use attention_mask="),
        ("attn_mask", "use attn_mask="),
        ("key_starts", f"{BOOLS}, {ADDED}, and for padding use {PADDING.format('attention_mask')}"),
        ("score", f"{BOOLS}, {ADDED}"),
        ("mask", BOOLS),
    ),
    (
        "key_padding_mask padding_mask memory_key_padding_mask encoder_attention_mask",
        (
            "cu_seqlens_context",
            "use attention_mask=, True for tokens; the mask of nn.MultiheadAttention is True for padding: "
            "attention_mask=~key_padding_mask",
        ),
        (
            "attention_mask",
            "use attention_mask=, nonzero where there are tokens; the mask of nn.MultiheadAttention is True "
            "where there are none: bounds_of(~key_padding_mask)",
        ),
        (
            "key_starts",
            f"use {PADDING.format('mask')}, with a mask that is nonzero where there are tokens; "
            "the mask of nn.MultiheadAttention is True where there are none: "
            "bounds_of(~key_padding_mask)",
        ),
        ("cu_seqlens_q", "leave it out: packed sequences have no padding"),
        ("q kv", "leave it out: a cache knows where its sequences begin and end"),
    ),
    ("block_mask", ("mask", "use mask=mask_mod(function, *tensors)")),
    (
        "score_mod",
        ("score", "use score=score_mod(function, *tensors)"),
        ("cu_seqlens_context", MADE.format("score=")),
    ),
    (
        "softmax_scale sm_scale scaling scale",
        ("scale", "use scale="),
        ("softmax_scale", "use softmax_scale="),
        ("factor", "use factor="),
        ("cu_seqlens_context", MADE.format("scale=")),
    ),
    (
        "logit_softcapping attn_logit_softcapping logits_soft_cap attn_softcap soft_cap softcap",
        ("softcap", "use softcap="),
        ("cu_seqlens_context", MADE.format("softcap=")),
    ),
    (
        "dropout attention_dropout attn_dropout dropout_prob dropout_rate dropout_p",
        ("dropout_p", "use dropout_p="),
        ("cu_seqlens_context", MADE.format("dropout_p=") + ", which only drops in training"),
    ),
    (
        "enable_gqa",
        ("k", "leave it out: the shape of k gives the number of KV heads"),
        ("num_kv_heads", "use num_kv_heads="),
        ("q kv", "leave it out: the cache knows the number of KV heads"),
    ),
    (
        "need_weights average_attn_weights output_attentions return_weights return_attn_probs",
        ("mask", f"there are none: {UNSTORED}"),
        ("query", f"there are none: {UNSTORED}"),
    ),
    (
        "return_lse return_softmax_lse",
        ("return_attn_probs", "use return_attn_probs="),
        ("q", "call the function whose name ends in _with_lse"),
        ("cu_seqlens_context", "layers return none; attention_with_lse does"),
    ),
    (
        "s_aux learnable_sink sink",
        ("hidden_size sinks", "use sinks=True, a logit without a value for each head"),
        ("sinks", "use sinks=, a logit without a value for each head"),
    ),
    ("deterministic", ("mask", "leave it out: torch.use_deterministic_algorithms(True) enables it")),
    (
        "generator rng_state",
        ("dropout_seed", "use dropout_seed=, int64 [1]; without one, torch's own generator draws it"),
        (
            "dropout_p hidden_size",
            "leave it out: torch's own generator draws the seeds, after torch.manual_seed(n)",
        ),
    ),
    ("qv", ("q", "not supported")),
    # arguments for the input tokens: tensors, positions, and offsets of packed sequences
    (
        "query queries hidden_states input inputs q",
        ("query", "use query="),
        ("cu_seqlens_context", "it is x, the first argument"),
        ("q", "it is q, the first argument"),
    ),
    (
        "key keys k",
        ("key", "use key="),
        ("k", "use k="),
        ("cu_seqlens_context", "use context=, the source of keys and values if it is not x"),
    ),
    (
        "value values v",
        ("value", "use value="),
        ("v", "use v="),
        ("cu_seqlens_context", "use context=, the source of keys and values if it is not x"),
    ),
    (
        "encoder_hidden_states key_value_states memory cross_attention_states",
        ("context", "use context="),
    ),
    (
        "position_ids pos_ids input_pos pos",
        ("positions", "use positions="),
        ("x angles", "use angles=rope.angles(position_ids)"),
        ("q", "rotate q and k first: attnlib.rotate(q, rope.angles(position_ids))"),
    ),
    (
        "cos sin rotary_cos rotary_sin",
        ("rotary_cos", "use rotary_cos= and rotary_sin="),
        ("cos", "use cos= and sin="),
        ("x angles", "use angles=, as from rope.angles(positions)"),
        (
            "q kv",
            "rotate q first: attnlib.rotate(q, rope.angles(positions)); append(k, v, angles=) rotates keys",
        ),
        ("q", "rotate q and k first: attnlib.rotate(q, rope.angles(positions))"),
    ),
    ("start_pos seqlen_offset seq_len", ("kv positions", "use positions=, or kv= for a cache")),
    (
        "cache_position",
        ("kv positions", "leave it out: a layer of cache.step() knows them; otherwise use positions="),
    ),
    (
        "position_embeddings freqs_cis rotary_pos_emb rotary_emb",
        ("kv angles", "use angles=, as from rope.angles(position_ids)"),
        ("hidden_size rope", "use rope=Rope(dim)"),
    ),
    (
        "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_lens_q cu_seq_lens_k cu_seq_lens",
        ("cu_seqlens_q", "use cu_seqlens_q= and cu_seqlens_k="),
        ("cu_seqlens", "use cu_seqlens="),
        ("key_starts", "call varlen_attention for packed sequences"),
    ),
    (
        "max_seqlen max_seqlen_q max_seqlen_k max_length_q max_length_k max_q max_k",
        ("max_seqlen_q", "use max_seqlen_q= and max_seqlen_k="),
        ("max_length", "use max_length="),
        ("cu_seqlens", "leave it out: it is computed if necessary"),
    ),
    # sizes of layers, and names of their parts
    ("embed_dim d_model n_embd model_dim dim", ("hidden_size", "it is hidden_size, the first argument")),
    (
        "n_heads nhead heads num_attention_heads n_head num_heads",
        ("num_heads", "use num_heads="),
        ("heads", "use heads="),
        ("layouts", "layouts hold it, as layer.kv_layout of each layer does"),
    ),
    (
        "n_kv_heads kv_heads num_key_value_heads num_kv_heads num_heads_k num_heads_kv n_head_kv",
        ("kv_lora_rank", "leave it out: all heads share one latent"),
        ("num_kv_heads", "use num_kv_heads="),
        ("heads", "use heads="),
        ("k", "leave it out: the shape of k gives the number"),
        ("layouts", "layouts hold it, as layer.kv_layout of each layer does"),
    ),
    (
        "rotary_dim rotary_emb_dim",
        ("qk_rope_head_dim", "use qk_rope_head_dim="),
        ("hidden_size rope", "use rope=Rope(dim), where dim is the number of channels that rotate"),
        ("dim", "use dim="),
    ),
    (
        "head_dim head_size d_head dim_head qk_head_dim",
        ("qk_nope_head_dim", "use qk_nope_head_dim= and qk_rope_head_dim=, which add up to it"),
        ("head_dim", "use head_dim="),
        ("dim", "use dim="),
        ("layouts", "layouts hold it, as layer.kv_layout of each layer does"),
    ),
    ("num_layers num_hidden_layers n_layers n_layer", ("layouts", "give a layout for each layer")),
    ("kdim vdim", ("hidden_size", "leave it out: a context is as wide as x")),
    ("batch_first", ("hidden_size", "leave it out: x is [b, s, m]")),
    ("add_bias_kv add_zero_attn", ("sinks", "use sinks=True, a logit without a value for each head")),
    ("attention_bias use_bias qkv_bias qkv_proj_bias", ("bias", "use bias=")),
    ("out_bias out_proj_bias proj_bias", ("output_bias", "use output_bias="), ("bias", "use bias=")),
    ("rms_norm_eps layer_norm_eps eps", ("norm_eps", "use norm_eps=")),
    ("use_qk_norm", ("qk_norm", "use qk_norm=")),
    ("use_alibi", ("alibi", "use alibi=")),
    (
        "attn_implementation implementation use_flash use_flash_attn",
        ("backend", "use backend=; None chooses one"),
    ),
    ("layer_idx layer_index", ("hidden_size", "leave it out: a cache gives each layer its own part")),
    (
        "device_mesh tp_mesh",
        ("mesh", "use mesh="),
        (
            "hidden_size",
            "leave it out: parallelize_module(layer, mesh, layer.parallel_plan(mesh)) shards a layer",
        ),
    ),
    ("subfolder", ("folder", "leave it out: folder is the path of the inner folder")),
    ("B", ("b h s t", "use b=")),
    ("H", ("b h s t", "use h=")),
    ("Q_LEN", ("b h s t", "use s=")),
    ("KV_LEN", ("b h s t", "use t=")),
    # rope and its scaling rules
    (
        "base rope_base rope_theta",
        ("theta", "use theta="),
        ("hidden_size rope", "use rope=Rope(dim, theta=...)"),
    ),
    (
        "rope_scaling rope_parameters",
        ("scaling", "use scaling=, one of attnlib's rules, as Llama3Scaling(...) or YaRNScaling(...)"),
        ("hidden_size rope", "use rope=Rope(dim, scaling=...)"),
    ),
    (
        "interleave rope_interleave rope_interleaved rotary_interleaved traditional is_neox_style is_neox",
        ("interleaved", "use interleaved=, True for pairs of channels (2c, 2c + 1)"),
        ("hidden_size rope", "use rope=Rope(dim, interleaved=...)"),
    ),
    (
        "mrope_section mrope_sections mrope_interleaved",
        ("axes", "use axes=Axes(mrope_section, order), where order is 'blocks' or 'interleaved'"),
        ("hidden_size rope", "use rope=Rope(dim, axes=...)"),
    ),
    (
        "image_grid_thw video_grid_thw grid_thw",
        ("grids", "use grids=, for images and videos in order, after patches are merged"),
    ),
    ("mm_token_type_ids", ("token_types", "use token_types=")),
    (
        "original_max_position_embeddings original_max_seq_len old_context_len",
        ("original_max_position", "use original_max_position="),
    ),
    (
        "max_position_embeddings max_position max_seq_len max_seq_length max_cache_len max_model_len max_len",
        ("original_max_position", "use original_max_position="),
        ("max_length", "use max_length="),
        ("theta", "leave it out: angles are computed at any position"),
        ("hidden_size", "leave it out: angles are computed at any position"),
    ),
    ("scaling_factor scale_factor rope_factor", ("factor", "use factor=")),
    ("attn_factor", ("attention_factor", "use attention_factor=")),
    (
        "partial_rotary_factor rotary_percent rotary_pct",
        ("share", "use share="),
        ("theta", "use dim=, the number of channels that rotate"),
        ("hidden_size rope", "use rope=Rope(dim), where dim is the number of channels that rotate"),
    ),
    ("device", ("theta", "leave it out: angles are on the device of their positions")),
    # arguments for caches
    (
        "past_key_value past_key_values cache kv_cache layer_past inference_params use_cache",
        ("kv positions", "use kv=, a layer of cache.step()"),
        ("q kv", "use kv=, the KVView that append() or view() of a cache returned"),
        ("q", "call cached_attention, which reads a cache"),
    ),
    (
        "dtype torch_dtype cache_dtype kv_cache_dtype kv_dtype",
        (
            "storage_dtype",
            "layouts hold it, as layer.kv_layout_as(dtype) does; storage_dtype= is only for int8 and fp8",
        ),
        ("dtype", "use dtype="),
        ("layouts", "layouts hold it, as layer.kv_layout or layer.kv_layout_as(dtype) does"),
    ),
    (
        "store quantization quantize quant_dtype storage_dtype",
        ("storage_dtype", "use storage_dtype="),
    ),
    ("keep_first sink_tokens num_sink_tokens", ("first_tokens", "use first_tokens=")),
    ("tail", ("rope_dim", "use rope_dim=")),
    ("k_tail", ("k_rope", "use k_rope=")),
    ("most max_num_batched_tokens chunk_size", ("max_step_tokens", "use max_step_tokens=")),
    ("block_size page_block_size", ("page_size", "use page_size=")),
    ("num_pages num_blocks n_pages max_num_pages num_gpu_blocks", ("pages", "use pages=")),
    (
        "max_batch_size batch_size batch max_batch max_num_seqs num_sequences",
        ("max_sequences", "use max_sequences="),
        ("batch", "use batch="),
    ),
    (
        "block_table block_tables page_table",
        ("block_table", "use block_table="),
        ("table", "use table="),
        ("q kv", "use kv=, the KVView that append() or view() of a cache returned"),
        ("q", "call cached_attention, which reads the pages of a cache"),
    ),
    (
        "k_cache v_cache",
        ("k_cache", "use k_cache= and v_cache="),
        ("q kv", "use kv=, the KVView that append() or view() of a cache returned"),
        ("q", "call cached_attention, which reads a cache"),
    ),
    ("cache_leftpad", ("q kv", "leave it out: pass left_padding= to admit() of a cache")),
    (
        "seqused_q seqused_k",
        ("seqused_k", "use seqused_k="),
        ("cache_seqlens", "use cache_seqlens="),
        ("q kv", "use kv=, the KVView that append() or view() of a cache returned"),
        ("q mask", "use mask=attnlib.masks.seqused(queries, keys), which is causal"),
    ),
    (
        "cache_seqlens seq_lens kv_lens",
        ("cache_seqlens", "use cache_seqlens="),
        ("lengths", "use lengths="),
        ("q kv", "use kv=, the KVView that append() or view() of a cache returned"),
    ),
    (
        "compute_dtype",
        (
            "q kv",
            "a cache made with storage_dtype=torch.float8_e4m3fn takes q in e4m3 with q_descale=; see "
            "quantize_fp8()",
        ),
    ),
)
REMEDIES = MappingProxyType({word: row[1:] for row in ROWS for word in row[0].split()})


def remedy_of(argument: str, names: list[str]) -> str | None:
    """Return the remedy for an ``argument`` of another library, if it fits a function that takes ``names``.

    >>> remedy_of("base", ["dim", "theta"]), remedy_of("base", ["q", "k"])
    ('use theta=', None)
    """
    found = (remedy for needed, remedy in REMEDIES.get(argument, ()) if {*needed.split()} <= {*names})
    return next(found, None)
