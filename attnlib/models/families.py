"""The table of model families: weight names, storage layouts and config.json keys of their attention.

Checkpoint conversion reads folders with this table, and the transformers integration finds attention layers
with it. Other properties of a family, such as its windows and norms, are left to the code that builds layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    # with a window have one.
    rope_layers: str | None = None
    theta: float = 10_000.0
    share: float = 1.0  # fraction of each head's channels to rotate by default
    window_theta: float | None = None  # theta of layers with a window, if different
    clip: str | None = None  # the key of the limit that q, k and v are clipped to

    @property
    def attention(self) -> str:
        """The name of the attribute in which a decoder layer holds its attention module."""
        return self.path.rpartition(".")[2]


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
GEMMA = AttentionStorage(sizes=DefaultSizes(3072, 28, 16, 16, 256))
GEMMA2 = replace(GEMMA, sizes=DefaultSizes(2304, 26, 8, 4, 256))
MISTRAL = AttentionStorage(sizes=DefaultSizes(4096, 32, 32, 8))
QWEN2 = AttentionStorage(sizes=DefaultSizes(4096, 32, 32, 32))
QWEN2_VL = AttentionStorage(sizes=DefaultSizes(8192, 80, 64, 8), head_dim=None, theta=1e6)
OLMO2 = AttentionStorage(weights=NORMED, gains="joined")
COHERE = AttentionStorage(sizes=DefaultSizes(8192, 40, 64), rope="interleaved")
# The keys are values of model_type in config.json, or in its text_config for a vision-language model.
STORED: Mapping[str, AttentionStorage] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "mixtral": replace(MISTRAL, theta=1e6),
        "qwen2": QWEN2,
        "qwen2_moe": replace(QWEN2, sizes=DefaultSizes(2048, 24, 16, 16)),
        "qwen2_vl_text": QWEN2_VL,
        "qwen2_5_vl_text": QWEN2_VL,
        "qwen3": AttentionStorage(weights=NORMED, sizes=DefaultSizes(4096, 32, 32, 32, 128)),
        "qwen3_moe": AttentionStorage(weights=NORMED, sizes=DefaultSizes(2048, 24, 32, 4)),
        "gemma": GEMMA,
        "gemma2": GEMMA2,
        "gemma3_text": replace(GEMMA2, weights=NORMED, theta=1e6, window_theta=10_000.0),
        "phi3": AttentionStorage(
            weights=(("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("o_proj", ("o_proj",))),
            sizes=DefaultSizes(3072, 32, 32),
            rotates_part=True,
        ),
        "olmo": AttentionStorage(clip="clip_qkv"),
        "olmo2": OLMO2,
        "olmo3": replace(OLMO2, theta=500_000.0, window_theta=500_000.0),
        "granite": LLAMA,
        "granitemoe": LLAMA,
        "smollm3": AttentionStorage(
            sizes=DefaultSizes(2048, 36, 16, 4), theta=2e6, rope_layers="no_rope_layers"
        ),
        "starcoder2": AttentionStorage(sizes=DefaultSizes(3072, 30, 24, 2)),
        "glm4": AttentionStorage(
            sizes=DefaultSizes(4096, 40, 32, 2, 128), rope="interleaved", rotates_part=True, share=0.5
        ),
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
    }
)
