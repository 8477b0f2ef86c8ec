"""The description of a family's attention (:class:`Family`), and functions of configs that it refers to."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ...gate import Gate
from ...indexing import Indexer
from ...models.families import STORED, AttentionStorage
from ...rope.axes import Order
from ...rope.rope import Rope
from ...rope.scaling import QueryTemperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(AttentionStorage):
    """The attention of a model family; the defaults describe Llama.

    A string is the name of a config field, unless it is a fixed choice such as ``"half"``. Usually the whole
    attention module is replaced. If the model itself calls other parts of that module, ``place`` names the
    submodule to replace, and weights whose names start with an entry of ``beside`` stay in the model.
    """

    is_mixed: bool = False  # True if path also matches modules of layers without attention
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
    rope_class: type[Rope] = Rope
    # A function of the config and a layer number that tells which layers have a rope, if rope_layers cannot.
    rotates: Callable[[Any, int], bool] | None = None
    window: str | None = None  # config field that says which layers have a window
    kinds: tuple[str, ...] = ("full_attention",)  # layer types that are known if ``window`` is None
    scale: Callable[[Any, int], float] | None = None
    value_scale: str | None = None  # config field with the factor of values
    # A function of the config and a layer number that returns more arguments of the layer: head counts, ...
    options: Callable[[Any, int], dict[str, Any]] | None = None
    reads: tuple[str, ...] = ()  # more config fields that define attention
    softcap: str | None = None
    sinks: bool = False
    shared: str | None = None  # config field that counts the last layers, which read keys of earlier layers
    value_norm: bool = False  # values have an RMS norm without a scale
    values: str | None = None  # config field that is true if layers without a window have values="keys"
    gate: Callable[[Any], Gate] | None = None
    axes: Order | None = None  # the order of the rope's axes, and the sections of a config that has none
    sections: tuple[int, ...] = ()
    # A function of the config and a bool, which is True if the layer has a rope.
    temperature: Callable[[Any, bool], QueryTemperature | None] | None = None
    # A function of the config, a layer number and the layer's rope that returns the layer's Indexer. None
    # is returned for a layer that reads the choice of an earlier one.
    select: Callable[[Any, int, Rope], Indexer | None] | None = None
    # A function of a latent layer, the config, and the dtype and device, which changes the layer in place.
    finish: Callable[[nn.Module, Any, dict[str, Any]], None] | None = None
    counts_padding: bool = False  # True if the temperature counts padding tokens as positions
    dropout: str | None = "attention_dropout"  # None: the family has no dropout
    residual_dropout: str | None = None
    fixed: tuple[tuple[str, object], ...] = ()  # config fields that must have this value
    unused: tuple[str, ...] = ()  # config fields that must be None, as transformers' layers never read them
    returns: int = 2  # attention returns a tuple of this length, 3 in T5 and GLM-5
    is_packed: bool = False  # True if attention gets packed tokens, and returns a tensor (vision encoders)


def stored(kind: str) -> Family:
    """Return a family that names its weights as the table ``STORED`` says, and is otherwise like Llama."""
    return Family(**{field.name: getattr(STORED[kind], field.name) for field in fields(AttentionStorage)})


def is_sliding(config: Any, index: int) -> bool:
    """True if a layer has a sliding window."""
    return config.layer_types[index] == "sliding_attention"


def is_rotated_prefix(config: Any, index: int) -> bool:
    """True if a layer of Cohere 2 MoE is one of the first, dense ones that have a rope without a window."""
    return config.mlp_layer_types[index] == "dense" and config.prefix_dense_sliding_window_pattern == 1


def mimo_options(config: Any, index: int) -> dict[str, Any]:
    """Return the head sizes of a MiMo-V2-Flash layer; with a window, it has twice the KV heads, and sinks."""
    has_window = is_sliding(config, index)
    kv_heads = config.num_key_value_heads * (2 if has_window else 1)
    return {"num_kv_heads": kv_heads, "v_head_dim": config.v_head_dim, "sinks": has_window}


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


def laguna_gate(config: Any) -> Gate:
    """Return the gate of Laguna's layers, which ``gating`` describes."""
    return Gate("head" if config.gating in (True, "per-head") else "channel", "softplus")
