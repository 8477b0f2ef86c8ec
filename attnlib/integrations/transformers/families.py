"""A table of the transformers model families that attnlib supports, and how each differs from Llama."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ...models.families import GROUPED, NORMED, STORED, AttentionStorage, alike
from ...rope.scaling import QueryTemperature
from .norms import HeadLayerNorm, HeadRMSNorm, OffsetRMSNorm, PlainRMSNorm, WideRMSNorm

LATENT = alike(
    "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
)
LATENT += alike("o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(AttentionStorage):
    """The attention of a model family; the defaults describe Llama.

    A string is the name of a config field, unless it is a fixed choice such as ``"half"``. Usually the whole
    attention module is replaced. If the model itself calls other parts of that module, ``place`` names the
    submodule to replace, and weights whose names start with an entry of ``beside`` stay in the model.
    """

    place: str = ""
    beside: tuple[str, ...] = ()
    is_latent: bool = False
    is_cross: bool = False
    is_causal: bool = True
    bias: str | bool | tuple[str, ...] = "attention_bias"  # applies to the projections of q, k and v
    output_bias: str | bool | None = "attention_bias"
    norm: Callable[..., nn.Module] | None = None
    norm_if: str | None = None
    norm_eps: str | float = "rms_norm_eps"
    norm_after_rope: bool = False
    window: str | None = None  # config field that says which layers have a window
    scale: Callable[[Any, int], float] | None = None
    reads: tuple[str, ...] = ()  # more config fields that define attention
    softcap: str | None = None
    sinks: bool = False
    shared: str | None = None  # config field that counts the last layers, which read keys of earlier layers
    value_norm: bool = False  # values have an RMS norm without a scale
    values: str | None = None  # config field that is true if layers without a window have values="keys"
    # A function of the config and a bool, which is True if the layer has a rope.
    temperature: Callable[[Any, bool], QueryTemperature | None] | None = None
    counts_padding: bool = False  # True if the temperature counts padding tokens as positions
    dropout: str = "attention_dropout"
    residual_dropout: str | None = None
    fixed: tuple[tuple[str, object], ...] = ()  # config fields that must have this value
    unused: tuple[str, ...] = ()  # config fields that must be None, as transformers' layers never read them
    returns: int = 2  # attention returns a tuple of this length, 3 in T5


def stored(kind: str) -> Family:
    """Return a family that names its weights as the table ``STORED`` says, and is otherwise like Llama."""
    return Family(**{field.name: getattr(STORED[kind], field.name) for field in fields(AttentionStorage)})


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
GLM4 = replace(stored("glm4"), output_bias=False)
DEEPSEEK = Family(
    is_latent=True,
    weights=LATENT,
    kv_heads=None,
    head_dim=None,
    output_bias=None,
    rope="rope_interleave",
    norm_eps=1e-6,
)


def mistral_temperature(config: Any, rotates: bool) -> QueryTemperature | None:
    """Return the query temperature that the rope parameters of a config define, or None if there is none."""
    weight = config.rope_parameters.get("llama_4_scaling_beta")
    return (
        QueryTemperature(weight, config.rope_parameters["original_max_position_embeddings"])
        if weight
        else None
    )


def llama4_temperature(config: Any, rotates: bool) -> QueryTemperature | None:
    """Return the query temperature of a layer without rope; it is None with rope, or if switched off."""
    if rotates or not config.attn_temperature_tuning:
        return None
    return QueryTemperature(config.attn_scale, int(config.floor_scale), offset=1)


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
        ("llama", "self"): replace(stored("llama"), fixed=(("rope_interleaved", False),)),
        ("mistral", "self"): replace(stored("mistral"), **MISTRAL),
        ("mixtral", "self"): replace(stored("mixtral"), **MISTRAL),
        ("ministral3", "self"): Family(
            **MISTRAL, temperature=mistral_temperature, reads=("llama_4_scaling_beta",)
        ),
        ("qwen2", "self"): replace(stored("qwen2"), **QWEN2),
        ("qwen2_moe", "self"): replace(stored("qwen2_moe"), **QWEN2 | {"bias": "qkv_bias"}),
        ("qwen3", "self"): replace(stored("qwen3"), norm=HeadRMSNorm, window="layer_types"),
        ("qwen3_moe", "self"): replace(stored("qwen3_moe"), norm=HeadRMSNorm, window="sliding_window"),
        ("gemma", "self"): replace(stored("gemma"), fixed=NOT_BOTH_WAYS),
        ("gemma2", "self"): replace(
            stored("gemma2"), **GEMMA2, softcap="attn_logit_softcapping", fixed=NOT_BOTH_WAYS
        ),
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
        ("glm4", "self"): GLM4,
        ("glm4_moe", "self"): replace(
            GLM4, rope="half", norm=HeadRMSNorm, norm_if="use_qk_norm", weights=NORMED
        ),
        ("cohere", "self"): replace(
            stored("cohere"), norm=HeadLayerNorm, norm_if="use_qk_norm", norm_eps="layer_norm_eps"
        ),
        ("cohere2", "self"): replace(stored("cohere2"), window="layer_types"),
        ("olmo2", "self"): replace(stored("olmo2"), norm=WideRMSNorm),
        ("olmo3", "self"): replace(stored("olmo3"), norm=WideRMSNorm, window="layer_types"),
        ("olmo", "self"): replace(stored("olmo"), fixed=(("clip_qkv", None),)),
        ("granite", "self"): replace(stored("granite"), **GRANITE),
        ("granitemoe", "self"): replace(stored("granitemoe"), **GRANITE),
        ("starcoder2", "self"): replace(
            stored("starcoder2"),
            **MISTRAL | {"bias": "use_bias", "output_bias": "use_bias"},
            residual_dropout="residual_dropout",
        ),
        ("smollm3", "self"): replace(stored("smollm3"), window="layer_types"),
        ("gpt_oss", "self"): Family(sinks=True, window="layer_types", weights=(*GROUPED, ("", ("sinks",)))),
        ("hunyuan_v1_dense", "self"): Family(
            norm=HeadRMSNorm,
            norm_after_rope=True,
            weights=(*GROUPED, ("query_layernorm", ("q_norm",)), ("key_layernorm", ("k_norm",))),
        ),
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
        ("mistral4", "self"): replace(
            DEEPSEEK, rotates_part=True, temperature=mistral_temperature, reads=("llama_4_scaling_beta",)
        ),
        ("minicpm3", "self"): replace(DEEPSEEK, rope="half"),
    }
)
