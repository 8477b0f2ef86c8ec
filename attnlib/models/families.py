"""The table of model families: weight names, storage layouts and config.json keys of their attention.

Checkpoint conversion reads folders with this table, and the transformers integration finds attention layers
with it. Other properties of a family, such as its windows and norms, are left to the code that builds layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Names = tuple[tuple[str, tuple[str, ...]], ...]
Gains = Literal["shared", "joined", "apart"]


def alike(*names: str) -> Names:
    """Pair each module name with itself, for families that name modules as attnlib does."""
    return tuple((name, (name,)) for name in names)


GROUPED = alike("q_proj", "k_proj", "v_proj", "o_proj")
NORMED = (*GROUPED, *alike("q_norm", "k_norm"))
QK_LAYERNORM: Names = (("q_layernorm", ("q_norm",)), ("k_layernorm", ("k_norm",)))


class DefaultSizes(NamedTuple):
    """The sizes that transformers assumes for a family if config.json does not give them.

    ``kv_heads=None`` means one KV head per query head; ``head_dim=None`` means ``width / heads``.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None


LARGE = DefaultSizes(4096, 32, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStorage:
    """The layout of attention in the checkpoints of a model family; the defaults describe Llama.

    ``path`` is a regex for the name of a layer's attention module; its group is the layer number. ``stem``
    matches the prefix of that name in a file. ``weights`` maps the family's module names to attnlib's. A
    module that maps to several attnlib modules stores their weights fused: one after another, or head by head
    if ``is_by_head``. Most other fields name keys of config.json; ``sizes`` and ``theta`` are the defaults
    for missing keys.
    """

    is_hybrid: bool = False  # True if some layers have a recurrent state instead of attention
    path: str = r"layers\.([0-9]{1,6})\.self_attn"
    stem: str = r"(?:model\.)?"
    weights: Names = GROUPED
    is_transposed: bool = False  # True if weights are stored as [in, out]
    is_by_head: bool = False  # True if the rows of a fused weight are [head, (q, k, v), channel]
    # The q_norm and k_norm weights have the shape [d] if "shared", [heads * d] if "joined" (one norm over all
    # heads), and [heads, d] if "apart".
    gains: Gains = "shared"
    width: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = "num_key_value_heads"  # None: loaders require one KV head per query head
    head_dim: str | None = "head_dim"
    sizes: DefaultSizes = LARGE
    rope: str | None = "half"  # or "interleaved", or a key of config.json that is true if interleaved
    rotates_part: bool = False  # True if the family reads partial_rotary_factor
    # The key of a list in config.json that says which layers have a rope. With "layer_types", only layers
    # with a window have one; with "sliding_window" also all layers of a model whose sliding_window is null.
    # With "position_embedding_type", all layers have one if that key is "rope".
    rope_layers: str | None = None
    theta: float = 10_000.0
    share: float = 1.0  # fraction of each head's channels to rotate by default
    window_theta: float | None = None  # theta of layers with a window, if different
    scaled: tuple[tuple[str, object], ...] = ()  # the rope parameters of a config.json that has none
    # The key of an option that no conversion supports, such as a limit that q, k and v are clipped to.
    refused: str | None = None

    @property
    def attention(self) -> str:
        """The name of the attribute in which a decoder layer holds its attention module."""
        return self.path.rpartition(".")[2]

    @property
    def is_gated(self) -> bool:
        """True if the output of attention has a gate for each value channel (``g_proj``)."""
        return any("g_proj" in ours for _, ours in self.weights)


def known_types(kind: object, known: Iterable[str], page: str) -> str:
    """Describe the ``known`` types in an error message: the closest to ``kind``, and the page of all."""
    close = get_close_matches(str(kind), known, 3) or ["llama"]
    return f"a type that {page} lists, such as {', '.join(close)}"


def parted(family: AttentionStorage, x: Tensor, rows: Sequence[int], heads: int) -> tuple[Tensor, ...]:
    """Split a stored weight or bias ``x`` into attnlib's, which have the row counts ``rows``."""
    x = x.T if family.is_transposed and x.dim() == 2 else x
    if len(rows) == 1:
        return (x,)
    if not family.is_by_head:
        return x.split(tuple(rows))
    return tuple(part.flatten(0, 1) for part in x.unflatten(0, (heads, len(rows), -1)).unbind(1))


def fused(family: AttentionStorage, parts: Sequence[Tensor], heads: int) -> Tensor:
    """Fuse attnlib's weights or biases into the one that the family stores: the inverse of :func:`parted`.

    If the family stores weights head by head, all ``parts`` must have ``heads`` heads.
    """
    x = parts[0]
    if len(parts) > 1 and family.is_by_head:
        x = torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)
    elif len(parts) > 1:
        x = torch.cat(tuple(parts))
    return x.T if family.is_transposed and x.dim() == 2 else x


LLAMA = AttentionStorage()
NORMED_LLAMA = AttentionStorage(weights=NORMED)
GEMMA = AttentionStorage(sizes=DefaultSizes(3072, 28, 16, 16, 256))
GEMMA2 = replace(GEMMA, sizes=DefaultSizes(2304, 26, 8, 4, 256))
MISTRAL = AttentionStorage(sizes=DefaultSizes(4096, 32, 32, 8))
QWEN2 = AttentionStorage(sizes=DefaultSizes(4096, 32, 32, 32))
QWEN2_VL = AttentionStorage(sizes=DefaultSizes(8192, 80, 64, 8), head_dim=None, theta=1e6)
QWEN3_VL = AttentionStorage(weights=NORMED, sizes=DefaultSizes(4096, 32, 32, 32, 128), theta=500_000.0)
OLMO2 = AttentionStorage(weights=NORMED, gains="joined")
COHERE = AttentionStorage(sizes=DefaultSizes(8192, 40, 64), rope="interleaved")
ERNIE = AttentionStorage(sizes=DefaultSizes(2560, 28, 20, 4), rope="interleaved", theta=500_000.0)
EXAONE = AttentionStorage(weights=NORMED, sizes=DefaultSizes(4096, 32, 32, 32), rope_layers="sliding_window")
GLM4 = AttentionStorage(
    sizes=DefaultSizes(4096, 40, 32, 2, 128), rope="interleaved", rotates_part=True, share=0.5
)
GLM4_MOE = AttentionStorage(sizes=DefaultSizes(4096, 46, 96, 8), rotates_part=True, share=0.5)
HUNYUAN = AttentionStorage(
    weights=(*GROUPED, ("query_layernorm", ("q_norm",)), ("key_layernorm", ("k_norm",)))
)
# The rows of each head in q_proj are those of its query, then those of its gate.
QWEN3_NEXT = AttentionStorage(
    is_hybrid=True,
    weights=(("q_proj", ("q_proj", "g_proj")), *NORMED[1:]),
    is_by_head=True,
    sizes=DefaultSizes(2048, 48, 16, 2, 256),
    rotates_part=True,
    share=0.25,
)
LFM2 = AttentionStorage(
    is_hybrid=True,
    weights=(*alike("q_proj", "k_proj", "v_proj"), ("out_proj", ("o_proj",)), *QK_LAYERNORM),
    sizes=DefaultSizes(2560, 32, 32, 8),
    theta=1e6,
)
LLAMA3_ROPE = (
    ("rope_type", "llama3"), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192),
)  # fmt: skip
MINISTRAL3_ROPE = (
    ("rope_type", "yarn"), ("rope_theta", 1e6), ("factor", 16.0), ("original_max_position_embeddings", 16384),
    ("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", 1.0), ("mscale_all_dim", 1.0),
)  # fmt: skip
# The keys are values of model_type in config.json, or in its text_config for a vision-language model.
STORED: Mapping[str, AttentionStorage] = MappingProxyType(
    {
        "llama": LLAMA,
        "arcee": replace(LLAMA, sizes=DefaultSizes(2560, 32, 32)),
        "jais2": replace(LLAMA, sizes=DefaultSizes(3328, 32, 26)),
        "seed_oss": replace(LLAMA, sizes=DefaultSizes(4096, 64, 80, 8, 128)),
        "solar_open": replace(LLAMA, sizes=DefaultSizes(4096, 48, 64, 8, 128), theta=1e6),
        "apertus": replace(NORMED_LLAMA, theta=12e6, scaled=(*LLAMA3_ROPE, ("factor", 8.0))),
        "hy_v3": replace(NORMED_LLAMA, sizes=DefaultSizes(4096, 80, 64, 8, 128), theta=11_158_840.0),
        "ernie4_5": replace(ERNIE, sizes=DefaultSizes(1024, 18, 16, 2, 128)),
        "ernie4_5_moe": ERNIE,
        "ernie4_5_vl_moe_text": ERNIE,
        "helium": replace(ERNIE, sizes=DefaultSizes(2560, 24, 20, 20, 128), theta=100_000.0),
        "mistral": MISTRAL,
        "mixtral": replace(MISTRAL, theta=1e6),
        "ministral": MISTRAL,
        "phimoe": replace(MISTRAL, theta=1e6),
        "cwm": replace(
            MISTRAL,
            sizes=DefaultSizes(6144, 64, 48, 8, 128),
            theta=1e6,
            scaled=(*LLAMA3_ROPE, ("factor", 16.0)),
        ),
        "ministral3": replace(MISTRAL, sizes=DefaultSizes(4096, 34, 32, 8, 128), scaled=MINISTRAL3_ROPE),
        "qwen2": QWEN2,
        "qwen2_moe": replace(QWEN2, sizes=DefaultSizes(2048, 24, 16, 16)),
        "qwen2_vl_text": QWEN2_VL,
        "qwen2_5_vl_text": QWEN2_VL,
        "qwen3": AttentionStorage(weights=NORMED, sizes=DefaultSizes(4096, 32, 32, 32, 128)),
        "qwen3_moe": AttentionStorage(weights=NORMED, sizes=DefaultSizes(2048, 24, 32, 4)),
        "qwen3_vl_text": QWEN3_VL,
        "qwen3_vl_moe_text": replace(QWEN3_VL, sizes=DefaultSizes(2048, 24, 16, 16)),
        "qwen3_next": QWEN3_NEXT,
        "qwen3_5_text": replace(QWEN3_NEXT, sizes=DefaultSizes(4096, 32, 16, 4, 256)),
        "qwen3_5_moe_text": replace(QWEN3_NEXT, sizes=DefaultSizes(2048, 40, 16, 2, 256)),
        "dots1": replace(NORMED_LLAMA, sizes=DefaultSizes(4608, 62, 32, 32)),
        "mellum": replace(
            NORMED_LLAMA, sizes=DefaultSizes(2304, 28, 32, 4, 128), theta=500_000.0, window_theta=10_000.0
        ),
        "exaone4": EXAONE,
        "exaone_moe": EXAONE,
        "afmoe": AttentionStorage(
            weights=(*NORMED, ("gate_proj", ("g_proj",))),
            sizes=DefaultSizes(2048, 32, 16, None, 128),
            rope_layers="layer_types",
        ),
        "gemma": GEMMA,
        "gemma2": GEMMA2,
        "vaultgemma": GEMMA2,
        "gemma3_text": replace(GEMMA2, weights=NORMED, theta=1e6, window_theta=10_000.0),
        "phi3": AttentionStorage(
            weights=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",))),
            sizes=DefaultSizes(3072, 32, 32),
            rotates_part=True,
        ),
        "olmo": AttentionStorage(refused="clip_qkv"),
        "olmo2": OLMO2,
        "olmo3": replace(OLMO2, theta=500_000.0, window_theta=500_000.0),
        "olmoe": replace(OLMO2, sizes=DefaultSizes(2048, 16, 16), refused="clip_qkv"),
        "flex_olmo": replace(OLMO2, theta=500_000.0),
        "minimax_m2": replace(OLMO2, sizes=DefaultSizes(3072, 62, 48, 8, 128), theta=5e6, rotates_part=True),
        "granite": LLAMA,
        "granitemoe": LLAMA,
        "granitemoeshared": LLAMA,
        "granitemoehybrid": replace(LLAMA, is_hybrid=True, rope_layers="position_embedding_type"),
        "hyperclovax": LLAMA,
        "jamba": replace(MISTRAL, is_hybrid=True, rope=None),
        "lfm2": LFM2,
        "lfm2_moe": replace(LFM2, sizes=DefaultSizes(2048, 32, 32, 8)),
        "hunyuan_v1_dense": HUNYUAN,
        "hunyuan_v1_moe": HUNYUAN,
        "smollm3": AttentionStorage(
            sizes=DefaultSizes(2048, 36, 16, 4), theta=2e6, rope_layers="no_rope_layers"
        ),
        "starcoder2": AttentionStorage(sizes=DefaultSizes(3072, 30, 24, 2)),
        "nemotron": AttentionStorage(sizes=DefaultSizes(6144, 32, 48), rotates_part=True, share=0.5),
        "stablelm": AttentionStorage(
            sizes=DefaultSizes(2560, 32, 32, 32),
            head_dim=None,
            rotates_part=True,
            share=0.25,
            refused="qk_layernorm",
        ),
        "phi": AttentionStorage(
            weights=(*alike("q_proj", "k_proj", "v_proj"), ("dense", ("o_proj",)), *QK_LAYERNORM),
            sizes=DefaultSizes(2048, 24, 32),
            rotates_part=True,
            share=0.5,
        ),
        "glm": GLM4,
        "glm4": GLM4,
        "glm4_moe": replace(GLM4_MOE, weights=NORMED),
        "glm4v_text": replace(GLM4, sizes=DefaultSizes(4096, 40, 32, 2), head_dim=None, share=1.0),
        "glm4v_moe_text": GLM4_MOE,
        "cohere": replace(COHERE, weights=NORMED, gains="apart", theta=500_000.0),
        "cohere2": replace(COHERE, rope_layers="layer_types"),
        "gpt_neox": AttentionStorage(
            path=r"layers\.([0-9]{1,6})\.attention",
            stem=r"(?:gpt_neox\.)?",
            weights=(("query_key_value", ("q_proj", "k_proj", "v_proj")), ("dense", ("o_proj",))),
            is_by_head=True,
            kv_heads=None,
            head_dim=None,
            sizes=DefaultSizes(6144, 44, 64),
            rotates_part=True,
            share=0.25,
        ),
        "persimmon": AttentionStorage(
            weights=(
                ("query_key_value", ("q_proj", "k_proj", "v_proj")),
                ("dense", ("o_proj",)),
                *QK_LAYERNORM,
            ),
            is_by_head=True,
            kv_heads=None,
            head_dim=None,
            sizes=DefaultSizes(4096, 36, 64),
            rotates_part=True,
            share=0.5,
        ),
        "opt": AttentionStorage(
            stem=r"(?:model\.)?decoder\.",
            weights=(*alike("q_proj", "k_proj", "v_proj"), ("out_proj", ("o_proj",))),
            kv_heads=None,
            head_dim=None,
            sizes=DefaultSizes(768, 12, 12),
            rope=None,
        ),
        "gpt2": AttentionStorage(
            path=r"h\.([0-9]{1,6})\.attn",
            stem=r"(?:transformer\.)?",
            weights=(("c_attn", ("q_proj", "k_proj", "v_proj")), ("c_proj", ("o_proj",))),
            is_transposed=True,
            layers="n_layer",
            heads="n_head",
            width="n_embd",
            kv_heads=None,
            head_dim=None,
            sizes=DefaultSizes(768, 12, 12),
            rope=None,
        ),
        "bert": AttentionStorage(
            path=r"encoder\.layer\.([0-9]{1,6})\.attention",
            stem=r"(?:bert\.)?",
            weights=(
                ("self.query", ("q_proj",)),
                ("self.key", ("k_proj",)),
                ("self.value", ("v_proj",)),
                ("output.dense", ("o_proj",)),
            ),
            kv_heads=None,
            head_dim=None,
            sizes=DefaultSizes(768, 12, 12),
            rope=None,
        ),
    }
)
# The family of the language model in vision-language models whose config.json does not name that family.
SEEING: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "llava": "llama",
        "mistral3": "mistral",
        "qwen2_vl": "qwen2_vl_text",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "qwen3_vl": "qwen3_vl_text",
        "qwen3_vl_moe": "qwen3_vl_moe_text",
        "glm4v": "glm4v_text",
        "glm4v_moe": "glm4v_moe_text",
        "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    }
)

IS_LATENT = "its attention is latent already"
HEADS_DIFFER = "the number of heads differs between its layers"
SHARES_KEYS = "its last layers read the keys of earlier ones"
HAS_SINKS = "its attention has sinks"
CHOOSES_KEYS = "its layers choose their keys with an index branch"
# Why no entry of STORED can describe a model type whose layers attnlib has.
UNCONVERTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "youtu"), IS_LATENT),
        **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), IS_LATENT),
        **dict.fromkeys(("mistral_large4", "mistral_large4_text"), IS_LATENT),
        **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), CHOOSES_KEYS),
        **dict.fromkeys(("mistral4", "minicpm3"), IS_LATENT),
        **dict.fromkeys(("laguna", "step3p5", "step3p7"), HEADS_DIFFER),
        **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), SHARES_KEYS),
        **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), SHARES_KEYS),
        **dict.fromkeys(("gpt_oss", "mimo_v2_flash"), HAS_SINKS),
        **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), CHOOSES_KEYS),
        **dict.fromkeys(("minimax", "nemotron_h"), "its recurrent layers have the names of attention"),
        "bamba": "its decoder layers return more than hidden states",
        "olmo_hybrid": "a null theta in its config.json switches off the rope",
        **dict.fromkeys(("llama4", "llama4_text"), "its norms of q and k have no weights"),
        "cohere2_moe": "two lists in its config.json say which layers have a rope",
        "embedding_gemma2_text": "its values have a norm",
        "axk2": "its output gate is computed from latents",
        "hy_v4": "it has sinks over latents, and an indexer that selects keys",
        "hunyuan_vl_text": "it rotates the two channels of a pair by different angles",
        **dict.fromkeys(("whisper", "t5"), "it has an encoder, and attention to its outputs"),
    }
)
