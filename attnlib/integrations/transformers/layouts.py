"""Derive cache layouts (what each layer stores per token) from the config of a transformers model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kv import KVLayout
from ...layers.choices import index_sizes
from .building import indexer_of, options_of
from .families import FAMILIES
from .latents import SIZES, keeps_latents
from .own import FORMS
from .replacing import ReplacedAttention

STATES = ("conv", "linear_attention")  # types of layers that keep a state of fixed size per row
CHOOSING = ("indexed_attention", "minimax_m3_sparse")  # types of layers that choose their keys
OWN_CACHE = ("minimax",)  # models that refuse every cache but one of their own class


def layouts_of(model: nn.Module, config: Any, storage_dtype: torch.dtype | None) -> list[KVLayout | None]:
    """Return the cache layout of each layer of a model.

    It is None for a layer that keeps a recurrent state, or that reads the keys of another layer.

    Raises:
        NotImplementedError: a layer keeps neither keys and values, nor latents, nor a recurrent state, or the
            config does not say which.
        ValueError: the model expands its latents before attention.
    """
    own = {x.layer_idx: x.layer for x in model.modules() if isinstance(x, ReplacedAttention)}
    if hasattr(config, FORMS):  # attnlib's own checkpoint form, in which layers may have different sizes
        return [
            replace(own[index].kv_layout_as(model.dtype), storage_dtype=storage_dtype)
            for index in sorted(own)
        ]
    kinds = _layer_types_of(config)
    is_latent = all(getattr(config, name, None) is not None for name in SIZES)
    if is_latent and not keeps_latents(model):
        raise ValueError(
            "model: expected one that passes latents to attention, got one that expands them first; "
            "call hf.absorb(model) or hf.replace(model)"
        )
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    layouts, options = [], {"dtype": model.dtype, "storage_dtype": storage_dtype}
    family = FAMILIES.get((config.model_type, "self"))
    per_layer = getattr(config, "per_layer_config", [config] * len(kinds))
    for index, (of_layer, kind, mode) in enumerate(zip(per_layer, kinds, modes, strict=True)):
        if kind in STATES or mode == "reuse":
            layouts.append(None)
            continue
        options["window"] = of_layer.sliding_window if kind == "sliding_attention" else None
        if kind in CHOOSING and (family is None or family.select is None):
            raise NotImplementedError(f"model: expected layers that keep keys and values, got {kind!r}")
        index_keys = index_sizes(indexer_of(family, of_layer, index))
        of_keys = options | index_keys
        if is_latent:
            if mode == "reuse_but_indexer":
                layouts.append(KVLayout.index_only(**index_keys, dtype=model.dtype))
                continue
            rope_dim = options_of(family, of_layer, index).get("qk_rope_head_dim", of_layer.qk_rope_head_dim)
            layouts.append(KVLayout.latent(of_layer.kv_lora_rank, rope_dim, **of_keys))
            continue
        heads = getattr(of_layer, "num_key_value_heads", None) or of_layer.num_attention_heads
        heads = options_of(family, config, index).get("num_kv_heads", heads)
        width = getattr(of_layer, "head_dim", None) or of_layer.hidden_size // of_layer.num_attention_heads
        layouts.append(KVLayout.grouped(heads, width, getattr(of_layer, "v_head_dim", None), **of_keys))
    return layouts


def state_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that keep a recurrent state."""
    return [number for number, kind in enumerate(_layer_types_of(config)) if kind in STATES]


def _layer_types_of(config: Any) -> list[str]:
    """Return the attention type of each layer, such as ``"sliding_attention"``.

    Raises:
        NotImplementedError: a layer has no keys and values to cache.
    """
    if not hasattr(config, "num_hidden_layers"):
        raise NotImplementedError(
            f"model: expected num_hidden_layers in its config, got a {type(config).__name__} without it; use "
            "a DynamicCache for this model"
        )
    if config.model_type in OWN_CACHE:
        raise NotImplementedError(
            f"model: expected one that takes any cache, got {config.model_type}, whose recurrent layers need "
            "a cache class of their own; call generate without a cache"
        )
    per_layer = getattr(config, "per_layer_config", [config] * config.num_hidden_layers)
    kinds = list(getattr(config, "layer_types", None) or [])[: config.num_hidden_layers] or [
        "full_attention" if getattr(of_layer, "sliding_window", None) is None else "sliding_attention"
        for of_layer in per_layer
    ]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", "chunked_attention", *CHOOSING, *STATES):
            raise NotImplementedError(f"model: expected layers that keep keys and values, got {kind!r}")
    if all(kind in STATES for kind in kinds):
        raise NotImplementedError("model: expected a layer that keeps keys and values, got none")
    return kinds


def check_shapes(index: int, layout: KVLayout, key: Tensor, value: Tensor) -> None:
    """Raise NotImplementedError unless keys and values ``[b, g, s, d]`` have the sizes from the config."""
    if (key.shape[1], key.shape[3], value.shape[3]) != (layout.heads, layout.dim, layout.value_dim):
        raise NotImplementedError(
            f"layer {index}: expected {layout.heads} heads with {layout.dim} key channels and "
            f"{layout.value_dim} value channels, by the model's config, got keys {tuple(key.shape)} and "
            f"values {tuple(value.shape)}; use a DynamicCache for this model"
        )
