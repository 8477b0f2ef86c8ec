"""The names of arguments in other libraries, and the argument of attnlib to use instead of each."""

from types import MappingProxyType

PADDING = "key_starts= and key_ends=, as attnlib.packing.bounds_of({}) finds them"
BOOLS = "a bool one [b|1, h|1, s, t] is mask=attnlib.masks.mask_tensor(shown)"
ADDED = "one that is added to scores is score=attnlib.scores.bias_tensor(bias)"
MADE = "the layer takes {} when it is made"

# Words, and remedies: each is for callables that have all of the arguments named before it, and the first
# that fits is said. Only forward() of a layer has cu_seqlens_context, only attention functions have q, only
# layers hidden_size.
ROWS = (
    # masks and scores
    (
        "is_causal causal",

        ("cu_seqlens_context", MADE.format("mask=CAUSAL or mask=FULL") + "; mask= of a call hides more than that"),
        ("mask", "say mask=CAUSAL, or mask=FULL"), ("is_causal", "say is_causal="), ("causal", "say causal="),
    ),
    (
        "window_size sliding_window window local_window_size attention_window",
        ("window", "say window=, which counts the query's own key"),
        ("window_size", "say window_size=, of keys before and behind the query"),
        ("cu_seqlens_context", MADE.format("mask=sliding(n)") + "; mask= of a call hides more than that"),
        ("mask", "say mask=sliding(n), which counts the query's own key"),
        ("left", "say left=, or call sliding(n), which counts the query's own key"),
        ("layouts", "layouts say it, as layer.kv_layout of a layer with mask=sliding(n)"),
    ),
    (
        "attention_mask attn_mask attn_bias bias mask",
        ("attention_mask", "say attention_mask="),
        ("attn_mask", "say attn_mask="),
        ("cu_seqlens_context", f"of padding say {PADDING.format('attention_mask')}; {BOOLS}, True where a key is seen; "
                    f"{MADE.format('score=')}, for what is added to scores"),
        ("key_starts", f"{BOOLS}, {ADDED}, and of padding say {PADDING.format('attention_mask')}"),
        ("score", f"{BOOLS}, {ADDED}"),
        ("mask", BOOLS),
    ),
    (
        "key_padding_mask padding_mask memory_key_padding_mask encoder_attention_mask",
        (
            "attention_mask",
            "say attention_mask=, not 0 where there are tokens; that of nn.MultiheadAttention is True where "
            "there are none: bounds_of(~key_padding_mask)",
        ),
        ("key_starts", f"say {PADDING.format('mask')}, of a mask that is not 0 where there are tokens; that of "
                       "nn.MultiheadAttention is True where there are none: bounds_of(~key_padding_mask)"),
        ("cu_seqlens_q", "leave it out: packed sequences have no padding"),
        ("q kv", "leave it out: a cache knows where its sequences begin and end"),
    ),
    ("block_mask", ("mask", "say mask=mask_mod(function, *tensors)")),
    ("score_mod", ("score", "say score=score_mod(function, *tensors)"), ("cu_seqlens_context", MADE.format("score="))),
    (
        "softmax_scale sm_scale scaling scale",
        ("scale", "say scale="),
        ("softmax_scale", "say softmax_scale="),
        ("factor", "say factor="),
        ("cu_seqlens_context", MADE.format("scale=")),
    ),
    (
        "logit_softcapping attn_logit_softcapping logits_soft_cap attn_softcap soft_cap softcap",
        ("softcap", "say softcap="),
        ("cu_seqlens_context", MADE.format("softcap=")),
    ),
    (
        "dropout attention_dropout attn_dropout dropout_prob dropout_rate dropout_p",
        ("dropout_p", "say dropout_p="),
        ("cu_seqlens_context", MADE.format("dropout_p=") + ", and drops in training alone"),
    ),
    (
        "enable_gqa",
        ("k", "leave it out: k says how many KV heads there are"),
        ("num_kv_heads", "say num_kv_heads="),
        ("q kv", "leave it out: the cache says how many KV heads there are"),
    ),
    (
        "need_weights average_attn_weights output_attentions return_weights return_attn_probs",
        ("mask", "there are none: no tile of them is kept"),
        ("query", "there are none: no tile of them is kept"),
    ),
    (
        "return_lse return_softmax_lse",
        ("return_attn_probs", "say return_attn_probs="),
        ("q", "call the function whose name ends in _with_lse"),
        ("cu_seqlens_context", "a layer gives none; attention_with_lse does"),
    ),
    ("s_aux learnable_sink sink", ("hidden_size sinks", "say sinks=True, a logit without a value for each head"),
     ("sinks", "say sinks=, a logit without a value for each head")),
    ("deterministic", ("mask", "leave it out: torch.use_deterministic_algorithms(True) asks for it")),
    (
        "generator rng_state",
        ("dropout_seed", "say dropout_seed=, int64 [1]; without one, torch's own generator draws it"),
        ("dropout_p hidden_size", "leave it out: torch's own generator draws the seeds, after torch.manual_seed(n)"),
    ),
    ("qv", ("q", "not supported")),
    # tokens
    (
        "query queries hidden_states input inputs q",
        ("query", "say query="),
        ("cu_seqlens_context", "it is x, which comes first"),
        ("q", "it is q, which comes first"),
    ),
    ("key keys k", ("key", "say key="), ("k", "say k="),
     ("cu_seqlens_context", "say context=, of which keys and values are made, where it is not x")),
    ("value values v", ("value", "say value="), ("v", "say v="),
     ("cu_seqlens_context", "say context=, of which keys and values are made, where it is not x")),
    (
        "encoder_hidden_states key_value_states memory cross_attention_states",
        ("context", "say context="),
    ),
    (
        "position_ids pos_ids input_pos pos",
        ("positions", "say positions="),
        ("x angles", "say angles=rope.angles(position_ids)"),
        ("q", "rotate q and k before: attnlib.rotate(q, rope.angles(position_ids))"),
    ),
    (
        "cos sin rotary_cos rotary_sin",
        ("rotary_cos", "say rotary_cos= and rotary_sin="),
        ("cos", "say cos= and sin="),
        ("x angles", "say angles=, as rope.angles(positions) makes them"),
        ("q kv", "rotate q before: attnlib.rotate(q, rope.angles(positions)); append(k, v, angles=) rotates keys"),
        ("q", "rotate q and k before: attnlib.rotate(q, rope.angles(positions))"),
    ),
    ("start_pos seqlen_offset seq_len", ("kv positions", "say positions=, or kv= for a cache")),
    ("cache_position", ("kv positions", "leave it out: a layer of cache.step() knows them; else say positions=")),
    (
        "position_embeddings freqs_cis rotary_pos_emb rotary_emb",
        ("kv positions", "say positions=, which takes Angles, as of rope.angles(position_ids)"),
        ("hidden_size rope", "say rope=Rope(dim)"),
    ),
    (
        "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_lens_q cu_seq_lens_k cu_seq_lens",
        ("cu_seqlens_q", "say cu_seqlens_q= and cu_seqlens_k="),
        ("cu_seqlens", "say cu_seqlens="),
        ("key_starts", "call varlen_attention for packed sequences"),
    ),
    (
        "max_seqlen max_seqlen_q max_seqlen_k max_length_q max_length_k max_q max_k",
        ("max_seqlen_q", "say max_seqlen_q= and max_seqlen_k="),
        ("max_length", "say max_length="),
        ("cu_seqlens", "leave it out: it is found where it is needed"),
    ),
    # sizes and parts of layers
    ("embed_dim d_model n_embd model_dim dim", ("hidden_size", "it is hidden_size, which comes first")),
    (
        "n_heads nhead heads num_attention_heads n_head num_heads",
        ("num_heads", "say num_heads="),
        ("heads", "say heads="),
        ("layouts", "layouts say it, as layer.kv_layout of each layer"),
    ),
    (
        "n_kv_heads kv_heads num_key_value_heads num_kv_heads num_heads_k num_heads_kv n_head_kv",
        ("kv_lora_rank", "leave it out: all heads share one latent"),
        ("num_kv_heads", "say num_kv_heads="),
        ("heads", "say heads="),
        ("k", "leave it out: k says how many there are"),
        ("layouts", "layouts say it, as layer.kv_layout of each layer"),
    ),
    (
        "rotary_dim rotary_emb_dim",
        ("qk_rope_head_dim", "say qk_rope_head_dim="),
        ("hidden_size rope", "say rope=Rope(dim), whose dim is the channels that rotate"),
        ("dim", "say dim="),
    ),
    (
        "head_dim head_size d_head dim_head qk_head_dim",
        ("qk_nope_head_dim", "say qk_nope_head_dim= and qk_rope_head_dim=, which add up to it"),
        ("head_dim", "say head_dim="),
        ("dim", "say dim="),
        ("layouts", "layouts say it, as layer.kv_layout of each layer"),
    ),
    ("num_layers num_hidden_layers n_layers n_layer", ("layouts", "give a layout for each layer")),
    ("kdim vdim", ("hidden_size", "leave it out: a context is as wide as x")),
    ("batch_first", ("hidden_size", "leave it out: x is [b, s, m]")),
    ("add_bias_kv add_zero_attn", ("sinks", "say sinks=True, a logit without a value for each head")),
    ("attention_bias use_bias qkv_bias qkv_proj_bias", ("bias", "say bias=")),
    ("out_bias out_proj_bias proj_bias", ("output_bias", "say output_bias="), ("bias", "say bias=")),
    ("rms_norm_eps layer_norm_eps eps", ("norm_eps", "say norm_eps=")),
    ("use_qk_norm", ("qk_norm", "say qk_norm=")),
    ("use_alibi", ("alibi", "say alibi=")),
    ("attn_implementation implementation use_flash use_flash_attn", ("backend", "say backend=, which None chooses")),
    ("layer_idx layer_index", ("hidden_size", "leave it out: a cache hands each layer its own part")),
    ("device_mesh tp_mesh", ("mesh", "say mesh="),
     ("hidden_size", "leave it out: parallelize_module(layer, mesh, layer.parallel_plan(mesh)) shards a layer")),
    ("subfolder", ("folder", "leave it out: folder is the path of the inner folder")),
    ("B", ("b h s t", "say b=")),
    ("H", ("b h s t", "say h=")),
    ("Q_LEN", ("b h s t", "say s=")),
    ("KV_LEN", ("b h s t", "say t=")),
    # rope and its rules
    ("base rope_base rope_theta", ("theta", "say theta="), ("hidden_size rope", "say rope=Rope(dim, theta=...)")),
    ("rope_scaling rope_parameters", ("scaling", "say scaling=, one of attnlib's rules, as Llama3(...) or YaRN(...)"),
     ("hidden_size rope", "say rope=Rope(dim, scaling=...)")),
    (
        "interleave rope_interleave rope_interleaved rotary_interleaved traditional is_neox_style is_neox",
        ("interleaved", "say interleaved=, True for pairs of channels (2c, 2c + 1)"),
        ("hidden_size rope", "say rope=Rope(dim, interleaved=...)"),
    ),
    (
        "original_max_position_embeddings original_max_seq_len old_context_len",
        ("original_max_position", "say original_max_position="),
    ),
    (
        "max_position_embeddings max_position max_seq_len max_seq_length max_cache_len max_model_len max_len",
        ("original_max_position", "say original_max_position="),
        ("max_length", "say max_length="),
        ("theta", "leave it out: angles are computed at any position"),
        ("hidden_size", "leave it out: angles are computed at any position"),
    ),
    ("scaling_factor scale_factor rope_factor", ("factor", "say factor=")),
    ("attn_factor", ("attention_factor", "say attention_factor=")),
    (
        "partial_rotary_factor rotary_percent rotary_pct",
        ("share", "say share="),
        ("theta", "say dim=, the channels that rotate"),
        ("hidden_size rope", "say rope=Rope(dim), whose dim is the channels that rotate"),
    ),
    ("device", ("theta", "leave it out: angles lie where their positions do")),
    # caches
    (
        "past_key_value past_key_values cache kv_cache layer_past inference_params use_cache",
        ("kv positions", "say kv= a layer of cache.step()"),
        ("q kv", "say kv=, the KVView that append() or view() of a cache returned"),
        ("q", "call cached_attention, which reads a cache"),
    ),
    (
        "dtype torch_dtype cache_dtype kv_cache_dtype kv_dtype",

        ("storage_dtype", "layouts have it, as layer.kv_layout_as(dtype); storage_dtype= is for int8 and fp8 alone"),
        ("dtype", "say dtype="),
        ("layouts", "layouts have it, as layer.kv_layout or layer.kv_layout_as(dtype)"),
    ),
    ("store quantization quantize quant_dtype storage_dtype", ("storage_dtype", "say storage_dtype="),
     ("store", "say store=")),
    ("block_size page_block_size", ("page_size", "say page_size=")),
    ("num_pages num_blocks n_pages max_num_pages num_gpu_blocks", ("pages", "say pages=")),
    (
        "max_batch_size batch_size batch max_batch max_num_seqs num_sequences",
        ("max_sequences", "say max_sequences="),
        ("batch", "say batch="),
    ),
    ("block_table block_tables page_table", ("block_table", "say block_table="), ("table", "say table="),
     ("q kv", "say kv=, the KVView that append() or view() of a cache returned"),
     ("q", "call cached_attention, which reads the pages of a cache")),
    ("k_cache v_cache", ("k_cache", "say k_cache= and v_cache="),
     ("q kv", "say kv=, the KVView that append() or view() of a cache returned"),
     ("q", "call cached_attention, which reads a cache")),
    ("cache_leftpad", ("q kv", "leave it out: admit(left_padding=) of a cache says it")),
    ("seqused_q seqused_k", ("seqused_k", "say seqused_k="), ("cache_seqlens", "say cache_seqlens="),
     ("q kv", "say kv=, the KVView that append() or view() of a cache returned"),
     ("q mask", "say mask=attnlib.masks.used(queries, keys), which is causal")),
    ("cache_seqlens seq_lens kv_lens", ("cache_seqlens", "say cache_seqlens="), ("lengths", "say lengths="),
     ("q kv", "say kv=, the KVView that append() or view() of a cache returned")),
)  # fmt: skip
REMEDIES = MappingProxyType({word: row[1:] for row in ROWS for word in row[0].split()})


def remedy_of(argument: str, names: list[str]) -> str | None:
    """Return how a function of arguments ``names`` is told what others call ``argument``; None if no row says
    it.

    >>> remedy_of("base", ["dim", "theta"]), remedy_of("base", ["q", "k"])
    ('say theta=', None)
    """
    found = (remedy for needed, remedy in REMEDIES.get(argument, ()) if {*needed.split()} <= {*names})
    return next(found, None)
