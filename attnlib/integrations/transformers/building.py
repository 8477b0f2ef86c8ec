"""Build an attnlib layer from a transformers config."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...indexing import Indexer
from ...layers import GroupedQueryAttention, MultiHeadLatentAttention
from ...masks.band import CAUSAL, AnyMask, Mask, sliding
from ...masks.ready_made import chunked
from ...models.families import known_types
from ...rope.axes import Axes
from ...rope.rope import Rope
from ...rope.scaling import scaling_of
from .families import FAMILIES, REFUSED
from .family import Family
from .fields import SIZES, check_fields, check_rope
from .norms import PlainRMSNorm
from .values import ScaledValueAttention
from .weights import to_ours

PAGE = "docs/transformers.md"


def family_of(config: Any, part: str) -> Family:
    """Return the model family of a config, for a ``part`` of the model such as "self" or "cross".

    Raises:
        NotImplementedError: the family is unknown.
    """
    family = FAMILIES.get((config.model_type, part))
    if family is None and config.model_type in REFUSED:
        raise NotImplementedError(
            f"config: attnlib has no layer for {config.model_type}: {REFUSED[config.model_type]}; use the "
            "model with its own layers"
        )
    if family is None:
        known = known_types(config.model_type, [name for name, at in FAMILIES if at == part], PAGE)
        raise NotImplementedError(
            f"config: model_type: expected {known}, got {config.model_type!r} ({part}); "
            'other models can use attn_implementation="attnlib" with their own layers'
        )
    return family


def layer_from(
    config: Any,
    index: int,
    part: str,
    weights: Mapping[str, Tensor] | None,
    factory: Mapping[str, Any],
    *,
    kv_heads: int | None = None,
) -> nn.Module:
    """Build a layer as ``from_config`` does; ``kv_heads`` overrides the KV-head count of the config."""
    family = family_of(config, part)
    check_fields(family, config)
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[index]
        check_fields(family, config)
    rope = rope_of(family, config, index)
    options = {
        "mask": mask_of(family, config, index),
        "rope": rope,
        "temperature": None if family.temperature is None else family.temperature(config, rope is not None),
        "dropout_p": (family.dropout and getattr(config, family.dropout, None)) or 0.0,
    }
    if kv_heads is not None:
        options["num_kv_heads"] = kv_heads
    layer = (_latent if family.is_latent else _grouped)(family, config, index, options | dict(factory))
    if weights is not None:
        layer.load_state_dict(to_ours(family, weights, layer), assign=True)
    return layer


def mask_of(family: Family, config: Any, index: int) -> AnyMask:
    """Return the attention mask of a layer, from the family and the config."""
    kind = layer_type(config, index)
    if not family.is_causal:
        radius = config.sliding_window if family.window and kind == "sliding_attention" else None
        return Mask(radius, radius)
    if family.window is None and kind not in family.kinds:
        known = " or ".join(family.kinds).replace("_", " ")
        raise NotImplementedError(f"layer_types: expected {known} of {config.model_type}, got {kind!r}")
    kind = kind if family.window == "layer_types" else "full_attention"
    if kind == "chunked_attention":
        return CAUSAL & chunked(config.attention_chunk_size)
    if kind not in ("full_attention", "sliding_attention"):
        raise NotImplementedError(f"layer_types: expected full, sliding or chunked attention, got {kind!r}")
    window = None
    if kind == "sliding_attention" or family.window == "sliding_window":
        window = config.sliding_window
    return CAUSAL if window is None else sliding(window)


def layer_type(config: Any, index: int) -> str:
    """Return the attention type of a layer in the config, such as ``"full_attention"``."""
    types = getattr(config, "layer_types", None)
    return "full_attention" if types is None else types[index]


def shared_as(config: Any, index: int) -> str:
    """Return the name under which a layer shares keys with later ones, or reads those of an earlier one."""
    sources = getattr(config, "kv_source_layers", None)
    return layer_type(config, index) if sources is None else f"layer {sources[index]}"


def rope_of(family: Family, config: Any, index: int) -> Rope | None:
    """Return the rotary embedding of a layer, or None if the layer has none."""
    if family.rope is None or not _rotates(family, config, index):
        return None
    if getattr(config, "is_heterogeneous", False):  # layers have configs of their own
        config = config.per_layer_config[index]
    fields = dict(config.rope_parameters)
    if any(isinstance(value, Mapping) for value in fields.values()):  # each layer type has its own parameters
        fields = dict(fields[layer_type(config, index)])
    check_rope(family, fields)
    share, width = fields.get("partial_rotary_factor"), _head_dim(family, config)
    # older configs keep this field at the top level
    share = getattr(config, "partial_rotary_factor", family.share) if share is None else share
    if family.axes == "ladders":
        if fields.get("rope_type") != "axial":
            raise NotImplementedError(f"rope_type: expected 'axial', got {fields.get('rope_type')!r}")
        return Rope(width, fields["rope_theta"], axes=Axes((width // 4,) * 2, "ladders"))
    scaling = scaling_of(fields, max_position=getattr(config, "max_position_embeddings", None))
    if fields.get("rope_type") != "proportional" and share != 1:
        if not family.rotates_part:
            raise NotImplementedError(
                f"partial_rotary_factor: {config.model_type} rotates whole heads, got {share}"
            )
        width = width if family.is_latent else int(width * share)  # MLA: width counts rotary channels only
    is_interleaved = (
        getattr(config, family.rope) if hasattr(config, family.rope) else family.rope == "interleaved"
    )
    axes = _axes(family, fields, width // 2)
    return family.rope_class(width, fields["rope_theta"], scaling, is_interleaved, axes)


def _axes(family: Family, fields: Mapping[str, Any], pairs: int) -> Axes | None:
    """Return the axes of a rope with this number of channel pairs, or None if the family has one axis."""
    if family.axes is None:
        return None
    sections = tuple(fields.get("mrope_section") or family.sections)
    if family.axes == "interleaved":  # transformers reads the sections of the other axes only
        sections = (pairs - sum(sections[1:]), *sections[1:])
    if family.axes == "alternating":  # configs list rows, columns and time
        sections = (sections[-1], *sections[:-1])
    return Axes(sections, family.axes)


def _rotates(family: Family, config: Any, index: int) -> bool:
    if family.rotates is not None:
        return family.rotates(config, index)
    if family.rope_layers is None or (
        family.rope_layers == "sliding_window" and config.sliding_window is None
    ):
        return True
    if family.rope_layers == "position_embedding_type":
        return config.position_embedding_type == "rope"
    if family.rope_layers in ("layer_types", "sliding_window"):
        return layer_type(config, index) == "sliding_attention"
    return bool(getattr(config, family.rope_layers)[index])


def _grouped(family: Family, config: Any, index: int, options: dict[str, Any]) -> nn.Module:
    heads = getattr(config, family.heads)
    heads = heads if isinstance(heads, int) else heads[index]
    options = {
        "num_kv_heads": None if family.kv_heads is None else getattr(config, family.kv_heads),
        "head_dim": _head_dim(family, config),
        "sinks": family.sinks,
        "norm_after_rope": family.norm_after_rope,
        "bias": _value(config, family.bias),
        "output_bias": _value(config, family.output_bias),
        "scale": None if family.scale is None else family.scale(config, index),
        "softcap": _value(config, family.softcap),
        "gate": None if family.gate is None else family.gate(config),
        "own_keys": family.shared is None
        or index < config.num_hidden_layers - getattr(config, family.shared),
        "values": "keys" if _has_values_of_keys(family, config, index) else None,
        "select": indexer_of(family, config, index),
        **options_of(family, config, index),
        **options,
    }
    value_scale = _value(config, family.value_scale)
    made = GroupedQueryAttention if value_scale is None else ScaledValueAttention
    layer = made(getattr(config, family.width), heads, **options)
    if value_scale is not None:
        layer.value_scale = value_scale
    has_norm = family.norm_if is None or getattr(config, family.norm_if)
    if family.norm is not None and has_norm and not (family.norm is PlainRMSNorm and options["rope"] is None):
        eps = _value(config, family.norm_eps)
        factory = {name: options.get(name) for name in ("device", "dtype")}
        layer.q_norm = family.norm(heads, layer.head_dim, eps, **factory)
        if layer.own_keys:
            layer.k_norm = family.norm(layer.num_kv_heads, layer.head_dim, eps, **factory)
        if layer.indexer is not None and layer.select.norms == "rms":
            layer.indexer.q_norm = family.norm(layer.select.heads, layer.select.head_dim, eps, **factory)
            layer.indexer.k_norm = family.norm(1, layer.select.head_dim, eps, **factory)
    if family.value_norm and layer.own_keys:
        eps = _value(config, family.norm_eps)
        layer.v_norm = PlainRMSNorm(layer.num_kv_heads, layer.head_dim, eps)
    return layer


def _has_values_of_keys(family: Family, config: Any, index: int) -> bool:
    return bool(_value(config, family.values)) and layer_type(config, index) == "full_attention"


def _latent(family: Family, config: Any, index: int, options: dict[str, Any]) -> nn.Module:
    options |= {name: getattr(config, name, None) for name in SIZES}
    options |= {"bias": _value(config, family.bias), "norm_eps": _value(config, family.norm_eps)}
    options |= {"select": indexer_of(family, config, index)} | options_of(family, config, index)
    layer = MultiHeadLatentAttention(getattr(config, family.width), getattr(config, family.heads), **options)
    if family.finish is not None:
        family.finish(layer, config, {name: options.get(name) for name in ("device", "dtype")})
    return layer


def options_of(family: Family | None, config: Any, index: int) -> dict[str, Any]:
    """Return the arguments of a layer that only a function of its family knows."""
    return {} if family is None or family.options is None else family.options(config, index)


def indexer_of(family: Family | None, config: Any, index: int) -> Indexer | None:
    """Return the index branch of a layer, or None if it has none."""
    if family is None or family.select is None:
        return None
    return family.select(config, index, rope_of(family, config, index))


def _head_dim(family: Family, config: Any) -> int:
    """Return the head dimension, or the number of rotary channels of an MLA layer."""
    if family.is_latent:
        return config.qk_rope_head_dim
    given = None if family.head_dim is None else getattr(config, family.head_dim, None)
    return given or getattr(config, family.width) // getattr(config, family.heads)


def _value(config: Any, name: object) -> Any:
    """Return the config field ``name``, or ``name`` itself if it is not a string."""
    return getattr(config, name) if isinstance(name, str) else name
