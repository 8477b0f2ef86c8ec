"""What config.json says of the attention, held against the weights; and the config of the result."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kv import DTYPES, KVLayout
from .errors import CheckpointError
from .folder import CONFIG, Checkpoint
from .header import Entry
from .layer import LayerShape
from .names import Family, Layer, family_of, find_layers

MAX_COUNT = 2**24  # of heads, layers or channels; a larger number is a mistake or an attack
FLOATS = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")  # they name code that a loader would run
LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint whose layers are known: where their weights are, and ``unknown`` tensors beside these."""

    checkpoint: Checkpoint
    family: Family
    shape: LayerShape
    layers: Mapping[int, Layer]
    unknown: tuple[str, ...]

    def stored(self, index: int) -> dict[str, Entry]:
        """The tensors of a layer by their names on disk, prefix excluded."""
        layer = self.layers[index]
        return {name: self.checkpoint.tensors[layer.prefix + name].entry for name in layer.stored}

    @property
    def dtype(self) -> torch.dtype:
        """What K and V are computed in: the dtype of their weights, bf16 where that is only for storage."""
        entry = next(entry for name, entry in self.stored(0).items() if name.endswith("weight"))
        return entry.dtype if entry.dtype in DTYPES else torch.bfloat16


def read_model(checkpoint: Checkpoint) -> Model:
    """Find the layers of a checkpoint, and hold every weight of theirs against config.json.

    Raises:
        CheckpointError: a model that the table of names does not know, packed weights, a layer missing, or a size that
            differs from what config.json says; names the tensor and both numbers.
    """
    config = checkpoint.config
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise CheckpointError(
                f"{CONFIG}: {key}: packed weights cannot be converted; dequantise them elsewhere first"
            )
    family = family_of(config.get("model_type"))
    shape = shape_of(config, family)
    layers, unknown = find_layers(family, checkpoint.tensors)
    count = _count(config, family.layers)
    if sorted(layers) != list(range(count)):
        raise CheckpointError(f"{CONFIG}: {family.layers}: expected {len(layers)} as stored, got {count}")
    model = Model(checkpoint, family, shape, layers, tuple(unknown))
    for index, layer in layers.items():
        check_layer(model.stored(index), family, shape, layer.prefix)
    return model


def shape_of(config: Mapping[str, object], family: Family) -> LayerShape:
    """The shape of layer 0; all layers have the same."""
    width, heads = _count(config, family.width), _count(config, family.heads)
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    head_dim = _count(config, "head_dim", default=max(1, width // heads))
    if heads % kv_heads:
        raise CheckpointError(f"{CONFIG}: num_key_value_heads: expected a divisor of {heads} heads, got {kv_heads}")
    return LayerShape(0, width, heads, kv_heads, head_dim)


def check_layer(stored: Mapping[str, Entry], family: Family, shape: LayerShape, prefix: str) -> None:
    """Raises CheckpointError unless a layer has all its weights, as floats, of the sizes that ``shape`` says."""
    for disk, ours in family.projections:
        rows = [shape.rows.get(part, shape.head_dim) for part in ours]
        columns = shape.heads * shape.head_dim if ours == ("o_proj",) else shape.width
        if f"{disk}.weight" not in stored and ours[0] in shape.rows:
            raise CheckpointError(f"{prefix}{disk}.weight: expected in every layer, and it is missing")
        for parameter in ("weight", "bias"):
            name = f"{disk}.{parameter}"
            if name not in stored:
                continue
            wanted = (sum(rows), columns) if parameter == "weight" and ours[0] in shape.rows else (sum(rows),)
            wanted = wanted[::-1] if family.transposed else wanted
            if stored[name].shape != wanted:
                raise CheckpointError(
                    f"{prefix}{name}: expected {list(wanted)}, as {CONFIG} says with {shape.heads} heads, "
                    f"{shape.kv_heads} KV heads of {shape.head_dim} and a width of {shape.width}, "
                    f"got {list(stored[name].shape)}"
                )
            if stored[name].dtype not in FLOATS:
                raise CheckpointError(f"{prefix}{name}: expected a floating dtype, got {stored[name].dtype}")


def edit_config(config: Mapping[str, object], fields: Mapping[str, object], shape: LayerShape) -> dict[str, object]:
    """``config`` with the converter's ``fields``, an explicit ``head_dim``, and no key that names code to run.

    Fields that have a ``model_type`` are those of another model, and all of its config.
    """
    if "model_type" in fields:
        return dict(fields)
    kept = {key: value for key, value in config.items() if key not in CODE_KEYS}
    return kept | ({"head_dim": shape.head_dim} if fields else {}) | dict(fields)


def is_latent(config: Mapping[str, object]) -> bool:
    """Whether the attention of ``config`` is latent (MLA)."""
    return config.get("kv_lora_rank") is not None


def token_bytes(config: Mapping[str, object], model: Model) -> int:
    """Bytes that the cache keeps for one token in all layers of a model of ``config``, windows aside."""
    if is_latent(config):
        layout = KVLayout.latent(config["kv_lora_rank"], config["qk_rope_head_dim"], dtype=model.dtype)
    else:
        shape = shape_of(config, model.family)
        layout = KVLayout.grouped(shape.kv_heads, shape.head_dim, dtype=model.dtype)
    return len(model.layers) * layout.token_bytes


def _count(config: Mapping[str, object], key: str, *, default: int | None = None) -> int:
    value = default if config.get(key) is None and default is not None else config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise CheckpointError(f"{CONFIG}: {key}: expected a count of 1 to {MAX_COUNT}, got {str(value)[:80]}")
    return value
