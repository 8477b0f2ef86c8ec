"""A table of the transformers model families that attnlib supports, and how each differs from Llama."""

from dataclasses import replace
from types import MappingProxyType

from ...gate import Gate
from ...models.families import GROUPED, NORMED, alike
from .choosing_families import DEEPSEEK, MINIMAX_M3, MISTRAL_LARGE, SHARES, SPARSE
from .family import (
    Family,
    is_rotated_prefix,
    is_sliding,
    laguna_gate,
    llama4_temperature,
    mimo_options,
    mistral_temperature,
    stored,
)
from .indexers import glm_indexer, qwen_indexer
from .norms import BiasedLayerNorm, HeadLayerNorm, HeadRMSNorm, OffsetRMSNorm, PlainRMSNorm, WideRMSNorm

LLAMA = replace(stored("llama"), fixed=(("rope_interleaved", False),))
MISTRAL = MappingProxyType({"bias": False, "output_bias": False, "window": "sliding_window"})
QWEN2 = MappingProxyType({"bias": True, "output_bias": False, "window": "layer_types"})
NOT_BOTH_WAYS = (("use_bidirectional_attention", False),)
GEMMA2 = MappingProxyType(
    {
        "window": "layer_types",
        "scale": lambda config, _: config.query_pre_attn_scalar**-0.5,
        "reads": ("query_pre_attn_scalar",),
    }
)
GEMMA3N = Family(
    weights=NORMED,
    output_bias="attention_bias",
    norm=HeadRMSNorm,
    value_norm=True,
    shared="num_kv_shared_layers",
    window="layer_types",
    scale=lambda *_: 1.0,
)
# With "vision", only tokens of images see later ones, and the model makes their masks.
GEMMA4 = replace(
    GEMMA3N,
    values="attention_k_eq_v",
    reads=("per_layer_config",),
    fixed=(("use_bidirectional_attention", "vision"), ("skip", ())),
)
EMBEDDING_GEMMA2 = replace(
    GEMMA3N, is_causal=False, shared=None, reads=("per_layer_config",), fixed=(("skip", ()),)
)
GRANITE = MappingProxyType(
    {"scale": lambda config, _: config.attention_multiplier, "reads": ("attention_multiplier",)}
)
GATED = (*NORMED, *alike("g_proj"))
QWEN3_NEXT = MappingProxyType(
    {"norm": OffsetRMSNorm, "gate": lambda config: Gate("channel", bias=config.attention_bias)}
)
QWEN2_VL = MappingProxyType({**QWEN2, "axes": "blocks", "sections": (16, 24, 24)})
SEES = Family(
    path=r"blocks\.(\d+)\.attn",
    weights=(("qkv", ("q_proj", "k_proj", "v_proj")), ("proj", ("o_proj",))),
    heads="num_heads",
    kv_heads=None,
    head_dim=None,
    is_causal=False,
    is_packed=True,
    axes="ladders",
    bias=True,
    output_bias=True,
    dropout=None,
)
QWEN3_VL = MappingProxyType({"norm": HeadRMSNorm, "axes": "interleaved", "sections": (24, 20, 20)})
QWEN3_5 = MappingProxyType({**QWEN3_NEXT, "axes": "interleaved", "sections": (11, 11, 10)})
# Qwen 4: layers with an index branch, whose queries and keys come from one projection.
QWEN4 = replace(
    stored("qwen3_5_text"),
    **QWEN3_5,
    weights=(
        *stored("qwen3_5_text").weights,
        ("indexer.index_qk_proj", ("indexer.q_proj", "indexer.k_proj")),
        ("indexer.q_layernorm", ("indexer.q_norm",)),
        ("indexer.k_layernorm", ("indexer.k_norm",)),
    ),
    share=1.0,
    kinds=("indexed_attention",),
    select=qwen_indexer,
    reads=("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio"),
    fixed=(("indexer_kv_heads", 1),),
)
GLM4V = MappingProxyType({"output_bias": False, "axes": "blocks", "sections": (8, 12, 12)})
GLM4V_SEES = replace(SEES, bias="attention_bias", output_bias=False, dropout="attention_dropout")
ERNIE = MappingProxyType({"bias": "use_bias", "output_bias": "use_bias", "dropout": None})
EXAONE = MappingProxyType({"norm": HeadRMSNorm, "bias": False, "output_bias": False, "window": "layer_types"})
HUNYUAN = MappingProxyType({"norm": HeadRMSNorm, "norm_after_rope": True})
PHI = MappingProxyType(
    {
        "bias": True,
        "output_bias": True,
        "norm": BiasedLayerNorm,
        "norm_if": "qk_layernorm",
        "norm_eps": "layer_norm_eps",
    }
)
LFM2 = MappingProxyType(
    {
        "bias": False,
        "output_bias": False,
        "norm": HeadRMSNorm,
        "norm_eps": "norm_eps",
        "dropout": None,
        "reads": ("full_attn_idxs",),  # the config converts it to layer_types
    }
)
BERT = replace(
    stored("bert"),
    place="self",
    beside=("output.LayerNorm.",),
    is_causal=False,
    bias=True,
    output_bias=True,
    dropout="attention_probs_dropout_prob",
    fixed=(("is_decoder", False), ("add_cross_attention", False)),
)
WHISPER = Family(
    path=r"decoder\.layers\.(\d+)\.self_attn",
    weights=(*alike("q_proj", "k_proj", "v_proj"), ("out_proj", ("o_proj",))),
    width="d_model",
    heads="decoder_attention_heads",
    kv_heads=None,
    head_dim=None,
    bias=("q_proj", "v_proj", "o_proj"),
    output_bias=None,
    rope=None,
    reads=("encoder_attention_heads", "decoder_attention_heads"),
)
# Keys are (model_type, part). The part is "self" for a decoder, or if the model has only one stack of layers.
FAMILIES = MappingProxyType(
    {
        ("llama", "self"): LLAMA,
        ("arcee", "self"): stored("arcee"),
        ("jais2", "self"): stored("jais2"),
        ("apertus", "self"): replace(stored("apertus"), norm=HeadRMSNorm),
        ("hy_v3", "self"): replace(stored("hy_v3"), norm=HeadRMSNorm),
        ("seed_oss", "self"): replace(
            stored("seed_oss"), output_bias="attention_out_bias", residual_dropout="residual_dropout"
        ),
        ("ernie4_5", "self"): replace(stored("ernie4_5"), **ERNIE),
        ("ernie4_5_moe", "self"): replace(stored("ernie4_5_moe"), **ERNIE),
        ("mistral", "self"): replace(stored("mistral"), **MISTRAL),
        ("mixtral", "self"): replace(stored("mixtral"), **MISTRAL),
        ("ministral", "self"): replace(stored("ministral"), **MISTRAL | {"window": "layer_types"}),
        ("cwm", "self"): replace(stored("cwm"), **MISTRAL | {"window": "layer_types"}),
        ("phimoe", "self"): replace(stored("phimoe"), window="sliding_window"),
        ("ministral3", "self"): replace(
            stored("ministral3"), **MISTRAL, temperature=mistral_temperature, reads=("llama_4_scaling_beta",)
        ),
        ("qwen2", "self"): replace(stored("qwen2"), **QWEN2),
        ("qwen2_moe", "self"): replace(stored("qwen2_moe"), **QWEN2 | {"bias": "qkv_bias"}),
        ("qwen3", "self"): replace(stored("qwen3"), norm=HeadRMSNorm, window="layer_types"),
        ("qwen3_moe", "self"): replace(stored("qwen3_moe"), norm=HeadRMSNorm, window="sliding_window"),
        ("dots1", "self"): replace(stored("dots1"), norm=HeadRMSNorm, window="layer_types"),
        ("mellum", "self"): replace(stored("mellum"), norm=HeadRMSNorm, window="layer_types"),
        ("exaone4", "self"): replace(stored("exaone4"), **EXAONE),
        ("exaone_moe", "self"): replace(stored("exaone_moe"), **EXAONE),
        ("qwen3_next", "self"): replace(stored("qwen3_next"), **QWEN3_NEXT),
        ("qwen3_5_text", "self"): replace(stored("qwen3_5_text"), **QWEN3_5),
        ("qwen3_5_moe_text", "self"): replace(stored("qwen3_5_moe_text"), **QWEN3_5),
        ("qwen4_exp_text", "self"): QWEN4,
        ("qwen2_vl_text", "self"): replace(stored("qwen2_vl_text"), **QWEN2_VL),
        ("qwen2_5_vl_text", "self"): replace(stored("qwen2_5_vl_text"), **QWEN2_VL),
        ("qwen2_vl_vision", "self"): replace(SEES, width="embed_dim", reads=("hidden_size",)),
        # Offsets of packed windows, which these layers get, come from the model.
        ("qwen2_5_vl_vision", "self"): replace(SEES, reads=("window_size", "fullatt_block_indexes")),
        ("qwen3_vl_vision", "self"): SEES,
        ("qwen3_vl_moe_vision", "self"): SEES,
        ("qwen3_5_vision", "self"): SEES,
        ("qwen4_exp_vision", "self"): SEES,
        ("qwen3_5_moe_vision", "self"): SEES,
        ("glm4v_vision", "self"): GLM4V_SEES,
        ("glm4v_moe_vision", "self"): GLM4V_SEES,
        ("ernie4_5_vl_moe_vision", "self"): SEES,
        ("qwen3_vl_text", "self"): replace(stored("qwen3_vl_text"), **QWEN3_VL),
        ("qwen3_vl_moe_text", "self"): replace(stored("qwen3_vl_moe_text"), **QWEN3_VL),
        ("glm4v_text", "self"): replace(stored("glm4v_text"), **GLM4V, bias=True),
        ("glm4v_moe_text", "self"): replace(stored("glm4v_moe_text"), **GLM4V),
        ("ernie4_5_vl_moe_text", "self"): replace(
            stored("ernie4_5_vl_moe_text"), **ERNIE, axes="alternating", sections=(22, 22, 20)
        ),
        ("afmoe", "self"): replace(
            stored("afmoe"), norm=HeadRMSNorm, window="layer_types", gate=lambda _: Gate("channel")
        ),
        ("laguna", "self"): Family(
            weights=GATED,
            heads="num_attention_heads_per_layer",
            rotates_part=True,
            norm=HeadRMSNorm,
            window="layer_types",
            gate=laguna_gate,
            reads=("num_attention_heads", "gating"),
        ),
        # The text model of Step 3.7, whose layers with a window have another number of heads.
        ("step3p5", "self"): Family(
            weights=GATED,
            rotates_part=True,
            norm=OffsetRMSNorm,
            window="layer_types",
            scale=lambda config, _: config.query_pre_attn_scalar**-0.5,
            gate=lambda _: Gate("head"),
            reads=("query_pre_attn_scalar", "num_sliding_attention_heads", "per_layer_config"),
            fixed=(*NOT_BOTH_WAYS, ("gating", True), ("skip", ())),
        ),
        ("gemma", "self"): replace(stored("gemma"), fixed=NOT_BOTH_WAYS),
        ("gemma2", "self"): replace(
            stored("gemma2"), **GEMMA2, softcap="attn_logit_softcapping", fixed=NOT_BOTH_WAYS
        ),
        ("vaultgemma", "self"): replace(stored("vaultgemma"), **GEMMA2, softcap="attn_logit_softcapping"),
        ("gemma3_text", "self"): replace(
            stored("gemma3_text"),
            **GEMMA2,
            norm=OffsetRMSNorm,
            fixed=NOT_BOTH_WAYS,
            unused=("attn_logit_softcapping",),
        ),
        ("gemma3n_text", "self"): GEMMA3N,
        ("gemma4_text", "self"): GEMMA4,
        ("gemma4_unified_text", "self"): GEMMA4,
        ("embedding_gemma2_text", "self"): EMBEDDING_GEMMA2,
        ("phi3", "self"): replace(stored("phi3"), **MISTRAL),
        ("phi", "self"): replace(stored("phi"), **PHI),
        ("persimmon", "self"): replace(stored("persimmon"), **PHI),
        ("glm4", "self"): replace(stored("glm4"), output_bias=False),
        ("glm", "self"): replace(stored("glm"), output_bias=False),
        ("helium", "self"): replace(stored("helium"), output_bias=False),
        ("solar_open", "self"): replace(stored("solar_open"), output_bias=False),
        ("nemotron", "self"): replace(stored("nemotron"), reads=("norm_eps",)),
        ("stablelm", "self"): replace(
            stored("stablelm"), bias="use_qkv_bias", output_bias=False, fixed=(("qk_layernorm", False),)
        ),
        ("glm4_moe", "self"): replace(
            stored("glm4_moe"), output_bias=False, norm=HeadRMSNorm, norm_if="use_qk_norm"
        ),
        ("cohere", "self"): replace(
            stored("cohere"), norm=HeadLayerNorm, norm_if="use_qk_norm", norm_eps="layer_norm_eps"
        ),
        ("cohere2", "self"): replace(stored("cohere2"), window="layer_types"),
        ("cohere2_moe", "self"): Family(
            rope="interleaved",
            rotates=lambda config, index: is_sliding(config, index) or is_rotated_prefix(config, index),
            window="layer_types",
            reads=("rope_theta", "rope_scaling", "prefix_dense_sliding_window_pattern"),
        ),
        ("olmo2", "self"): replace(stored("olmo2"), norm=WideRMSNorm),
        ("flex_olmo", "self"): replace(stored("flex_olmo"), norm=WideRMSNorm),
        ("minimax_m2", "self"): replace(
            stored("minimax_m2"),
            norm=WideRMSNorm,
            bias=False,
            output_bias=False,
            reads=("rotary_dim",),  # the config converts it to partial_rotary_factor
        ),
        ("olmoe", "self"): replace(stored("olmoe"), norm=WideRMSNorm, fixed=(("clip_qkv", None),)),
        ("olmo_hybrid", "self"): Family(
            weights=NORMED,
            norm=WideRMSNorm,
            rotates=lambda config, _: (config.rope_parameters or {}).get("rope_theta") is not None,
        ),
        ("olmo3", "self"): replace(stored("olmo3"), norm=WideRMSNorm, window="layer_types"),
        ("olmo", "self"): replace(stored("olmo"), fixed=(("clip_qkv", None),)),
        ("granite", "self"): replace(stored("granite"), **GRANITE),
        ("granitemoe", "self"): replace(stored("granitemoe"), **GRANITE),
        ("granitemoeshared", "self"): replace(stored("granitemoeshared"), **GRANITE),
        ("granitemoehybrid", "self"): replace(stored("granitemoehybrid"), **GRANITE),
        ("hyperclovax", "self"): replace(stored("hyperclovax"), **GRANITE),
        ("starcoder2", "self"): replace(
            stored("starcoder2"),
            **MISTRAL | {"bias": "use_bias", "output_bias": "use_bias"},
            residual_dropout="residual_dropout",
        ),
        ("smollm3", "self"): replace(stored("smollm3"), window="layer_types"),
        ("gpt_oss", "self"): Family(sinks=True, window="layer_types", weights=(*GROUPED, ("", ("sinks",)))),
        ("mimo_v2_flash", "self"): Family(
            options=mimo_options,
            output_bias=False,
            window="layer_types",
            value_scale="attention_value_scale",
            rotates_part=True,
            share=0.334,
            weights=(*GROUPED, ("", ("sinks",))),
            reads=("v_head_dim",),
        ),
        ("hunyuan_v1_dense", "self"): replace(stored("hunyuan_v1_dense"), **HUNYUAN),
        ("hunyuan_v1_moe", "self"): replace(stored("hunyuan_v1_moe"), **HUNYUAN),
        ("lfm2", "self"): replace(stored("lfm2"), **LFM2),
        ("lfm2_moe", "self"): replace(stored("lfm2_moe"), **LFM2),
        ("llama4_text", "self"): Family(
            rope="interleaved",
            rope_layers="no_rope_layers",
            norm=PlainRMSNorm,
            norm_if="use_qk_norm",
            window="layer_types",
            temperature=llama4_temperature,
            counts_padding=True,
            reads=("attn_temperature_tuning", "floor_scale", "attn_scale", "attention_chunk_size"),
        ),
        ("gpt2", "self"): replace(
            stored("gpt2"),
            bias=True,
            output_bias=True,
            scale=lambda config, index: (
                (config.hidden_size // config.num_attention_heads)
                ** (-0.5 if config.scale_attn_weights else 0)
                / (index + 1 if config.scale_attn_by_inverse_layer_idx else 1)
            ),
            reads=("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
            dropout="attn_pdrop",
            residual_dropout="resid_pdrop",
            fixed=(("add_cross_attention", False), ("reorder_and_upcast_attn", False)),
        ),
        # GPT-NeoX layers never read is_decoder, so any value is accepted.
        ("gpt_neox", "self"): replace(stored("gpt_neox"), reads=("is_decoder",)),
        ("opt", "self"): replace(stored("opt"), bias="enable_bias", output_bias="enable_bias"),
        ("bert", "self"): BERT,
        ("whisper", "self"): WHISPER,
        ("whisper", "cross"): replace(
            WHISPER, path=r"decoder\.layers\.(\d+)\.encoder_attn", is_cross=True, is_causal=False
        ),
        ("whisper", "encoder"): replace(
            WHISPER,
            path=r"encoder\.layers\.(\d+)\.self_attn",
            is_causal=False,
            heads="encoder_attention_heads",
        ),
        ("t5", "cross"): Family(
            path=r"decoder\.block\.(\d+)\.layer\.1\.EncDecAttention",
            weights=tuple((name, (f"{name}_proj",)) for name in "qkvo"),
            is_cross=True,
            is_causal=False,
            width="d_model",
            heads="num_heads",
            kv_heads=None,
            head_dim="d_kv",
            bias=False,
            output_bias=False,
            rope=None,
            scale=lambda *_: 1.0,
            reads=("is_decoder",),
            dropout="dropout_rate",
            returns=3,
        ),
        ("deepseek_v2", "self"): replace(DEEPSEEK, rope="interleaved"),
        ("deepseek_v3", "self"): DEEPSEEK,
        ("kimi_k2", "self"): DEEPSEEK,
        ("glm4_moe_lite", "self"): DEEPSEEK,
        ("youtu", "self"): DEEPSEEK,
        ("mistral4", "self"): replace(
            DEEPSEEK, rotates_part=True, temperature=mistral_temperature, reads=("llama_4_scaling_beta",)
        ),
        ("minicpm3", "self"): replace(DEEPSEEK, rope="half"),
        ("deepseek_v32", "self"): SPARSE,
        ("glm_moe_dsa", "self"): replace(
            SPARSE,
            select=glm_indexer,
            reads=(*SPARSE.reads, "indexer_types", *SHARES),
            returns=3,
        ),
        ("mistral_large4_text", "self"): MISTRAL_LARGE,
        ("bamba", "self"): Family(rotates_part=True, reads=("attn_layer_indices",)),
        ("jamba", "self"): replace(
            stored("jamba"), bias=False, output_bias=False, reads=("attn_layer_period", "attn_layer_offset")
        ),
        ("minimax_m3_vl_text", "self"): MINIMAX_M3,
        ("minimax", "self"): Family(bias=False, output_bias=False, window="sliding_window"),
        ("nemotron_h", "self"): Family(
            path=r"layers\.([0-9]{1,6})\.mixer",
            is_mixed=True,
            bias=False,
            output_bias=False,
            rope=None,
            fixed=(("attention_bias", False),),
            reads=("use_bias",),  # of the other layers
            unused=("sliding_window",),
        ),
    }
)
# Why attnlib has no layer for a family whose attention resembles that of others.
REFUSED = MappingProxyType(
    {
        "axk2": "its output gate is computed from latents, not from the input of attention",
        "hy_v4": "it has sinks over latents, and an indexer that selects keys",
        "hunyuan_vl_text": "it rotates the two channels of a pair by different angles",
    }
)
