"""Read rotary embeddings (rope) from a config.json, as transformers 5 or an earlier version writes it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...checkpoint_files.folder import CONFIG
from ...models.families import AttentionStorage
from ...rope.rope import Rope
from ...rope.scaling import scaling_of
from .errors import CheckpointError
from .model import shape_of
from .names import family_of, text_of

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# The first Phi 3 files call longrope "su". With "mrope", image patches have several positions, but text
# tokens have only one, so they are rotated as usual.
RENAMED = MappingProxyType({"su": "longrope", "mrope": "default"})
WINDOW, FULL = "sliding_attention", "full_attention"
OLD_KEYS = MappingProxyType({"gpt_neox": ("rotary_emb_base", "rotary_pct")})  # all other families use KEYS
KEYS = ("rope_theta", "partial_rotary_factor")
LOCAL = "rope_local_base_freq"  # this field has the theta of sliding-window layers
ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # here a "dynamic" rope with an alpha only has a larger theta
ROTARY = "rotary_dim"  # released MiniMax-M2 files count the rotated channels
# Without layer_types, every n-th layer has no window: the key of n, and its default.
PATTERN = "sliding_window_pattern"
EVERY = MappingProxyType(
    {
        "gemma3_text": (PATTERN, 6),
        **dict.fromkeys(("cohere2", "olmo3", "exaone4", "exaone_moe"), (PATTERN, 4)),
        "afmoe": ("global_attn_every_n_layers", 4),
    }
)


def rope_of(config: Mapping[str, object], index: int | None = None) -> Rope | None:
    """Return the rope of layer ``index`` of ``config``; None for learned positions or a layer without rope.

    Without ``index``, return the rope of the first layer that has one. All layers pair their channels the
    same way, but frequencies may differ between layers with and without a window.

    The rope is stored in ``rope_parameters`` or, in older files, in ``rope_scaling`` and ``rope_theta``. If a
    file has both, the function makes the same choice as transformers. With ``partial_rotary_factor``, only
    the first channels of each head are rotated.

    Raises:
        CheckpointError: the rope type is unknown, a layer type has no rope, or a number is missing or
            impossible; or :func:`shape_of` rejects the model or a size.
    """
    config = text_of(config)
    family = family_of(config.get("model_type"))
    if family.rope is None:
        return None
    if index is None:
        layers = config.get(family.layers, family.sizes.layers)
        index = next(
            (i for i in range(layers if type(layers) is int else 1) if _rotates(config, family, i)), None
        )
    elif not _rotates(config, family, index):
        index = None
    return None if index is None else _rope(config, family, has_window=_has_window(config, index))


def _rope(config: Mapping[str, object], family: AttentionStorage, *, has_window: bool) -> Rope:
    """Return the rope of all layers with a sliding window, or of all layers without one."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    fields = _fields(config, family, key, has_window=has_window)
    share = fields["partial_rotary_factor"]
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise CheckpointError(
            f"{CONFIG}: partial_rotary_factor: expected a share above 0 and up to 1, got {str(share)[:80]}"
        )
    try:
        dim = int(shape_of(config, family).head_dim * share)
        if fields["rope_type"] == "dynamic" and fields.get("alpha") and config["model_type"] in ALPHA:
            stretch = fields["alpha"] ** (dim / (dim - 2))
            fields |= {"rope_type": "default", "rope_theta": fields["rope_theta"] * stretch}
        scaling = scaling_of(fields, max_position=config.get("max_position_embeddings"))
        return Rope(dim, fields["rope_theta"], scaling, interleaved=family.rope == "interleaved")
    except KeyError as error:
        raise CheckpointError(
            f"{CONFIG}: {key}: expected {error.args[0]} with {fields['rope_type']!r}, and it is missing"
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{CONFIG}: {key}: {error}") from error


def _fields(
    config: Mapping[str, object], family: AttentionStorage, key: str, *, has_window: bool
) -> dict[str, object]:
    """Return the rope fields in ``config``; missing fields have the defaults of transformers."""
    given = config.get(key) or dict(family.scaled)
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{CONFIG}: {key}: expected an object, got {str(given)[:80]}")
    names, theta = OLD_KEYS.get(str(config["model_type"]), KEYS), family.theta
    if family.window_theta is not None:
        given = _of_layers(given, key, has_window=has_window)
        names, theta = ((LOCAL, KEYS[1]), family.window_theta) if has_window else (names, theta)
    elif any(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(
            f"{CONFIG}: {key}: expected one rope for all layers, got one for each layer type"
        )
    fields = {"rope_theta": theta, "partial_rotary_factor": family.share}
    if config["model_type"] == "minimax_m2" and config.get(ROTARY) is not None:
        fields["partial_rotary_factor"] = _count(config, ROTARY, 0) / shape_of(config, family).head_dim
    fields |= {
        name: config[own] for name, own in zip(KEYS, names, strict=True) if config.get(own) is not None
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if config.get("original_max_position_embeddings") is not None:
        fields["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    kind = fields.get("rope_type", fields.get("type", "default"))
    kind = RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise CheckpointError(
            f"{CONFIG}: {key}: expected a rope_type of {', '.join(KINDS)}, got {str(kind)[:80]!r}; "
            "such a model cannot be converted"
        )
    return fields | {"rope_type": kind}


def _of_layers(given: Mapping[str, object], key: str, *, has_window: bool) -> Mapping[str, object]:
    """Return the rope fields for layers with a sliding window, or for layers without one.

    In older files, the rope scaling applies only to layers without a window.
    """
    if key == "rope_scaling":
        return {} if has_window else given
    kinds = {kind: value or {} for kind, value in given.items()}
    if any(not isinstance(value, Mapping) for value in kinds.values()):
        raise CheckpointError(
            f"{CONFIG}: {key}: expected one rope for each layer type, got {str(given)[:80]}"
        )
    return kinds.get(WINDOW if has_window else FULL, {})


def _rotates(config: Mapping[str, object], family: AttentionStorage, index: int) -> bool:
    """True if layer ``index`` rotates its queries and keys."""
    if family.rope_layers == "sliding_window" and config.get("sliding_window", 0) is None:
        return True
    if family.rope_layers == "position_embedding_type":
        return config.get(family.rope_layers) == "rope"
    if family.rope_layers in ("layer_types", "sliding_window"):
        return _has_window(config, index)
    if family.rope_layers is None:
        return True
    listed = config.get(family.rope_layers)
    if listed is None:
        return (index + 1) % _count(config, "no_rope_layer_interval", 4) != 0
    return bool(_entry(listed, index, family.rope_layers))


def _has_window(config: Mapping[str, object], index: int) -> bool:
    """True if a layer has a sliding window; only meaningful for families whose rope depends on windows."""
    listed = config.get("layer_types")
    if listed is not None:
        return _entry(listed, index, "layer_types") == WINDOW
    every = EVERY.get(str(config["model_type"]))
    return every is not None and (index + 1) % _count(config, *every) != 0


def _count(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{CONFIG}: {key}: expected a count, got {str(value)[:80]}")
    return value


def _entry(listed: object, index: int, key: str) -> object:
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not -1 < index < len(listed):
        raise CheckpointError(f"{CONFIG}: {key}: expected an entry for layer {index}, got {str(listed)[:80]}")
    return listed[index]
