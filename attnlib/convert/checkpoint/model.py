"""Validate config.json against the stored attention weights, and edit it for the converted model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ...checkpoint_files.config import require_unpacked, without_code
from ...checkpoint_files.folder import CONFIG, Checkpoint
from ...checkpoint_files.header import TensorEntry
from ...kv import DTYPES, KVLayout
from ...models.families import AttentionStorage
from ...models.own_form import GroupedForm, LayerForm, is_own, layers_of
from .errors import CheckpointError
from .layer import LayerShape
from .names import PARAMETERS, TEXT, Layer, family_of, find_layers, text_of

MAX_COUNT = 2**24  # more heads, layers or channels than this are a mistake or an attack
FLOATS = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
KV_HEADS = "num_key_value_heads"


@dataclass(frozen=True, slots=True)
class CheckpointModel:
    """A checkpoint whose attention layers have been found; ``unknown`` lists other tensors inside them."""

    checkpoint: Checkpoint
    family: AttentionStorage
    shape: LayerShape
    layers: Mapping[int, Layer]
    unknown: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, object]:
        """The config.json of the model; for a vision-language model, the part about its text model."""
        return text_of(self.checkpoint.config)

    @property
    def depth(self) -> int:
        """The number of layers, with and without attention."""
        return _count(self.config, self.family.layers, self.family.sizes.layers)

    def stored(self, index: int) -> dict[str, TensorEntry]:
        """Return a layer's tensor entries by their names on disk, without the prefix of the layer."""
        layer = self.layers[index]
        return {name: self.checkpoint.tensors[layer.prefix + name].entry for name in layer.stored}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computed keys and values: the dtype of the weights, or bf16 if that is fp8."""
        entry = next(
            entry for name, entry in self.stored(min(self.layers)).items() if name.endswith("weight")
        )
        return entry.dtype if entry.dtype in DTYPES else torch.bfloat16


def read_model(checkpoint: Checkpoint) -> CheckpointModel:
    """Find the attention layers of a checkpoint and validate each weight against config.json.

    Raises:
        CheckpointError: the model type is unknown, weights are packed, a layer is missing, or a size
            differs from config.json; the message names the tensor and both numbers.
    """
    config = text_of(checkpoint.config)
    require_unpacked(checkpoint.config)
    family = family_of(config.get("model_type"))
    shape = shape_of(config, family)
    if family.refused is not None and config.get(family.refused) not in (None, False):
        raise CheckpointError(
            f"{CONFIG}: {family.refused}: expected null or false, got {str(config[family.refused])[:80]}; "
            "a model with this option cannot be converted"
        )
    layers, unknown = find_layers(family, checkpoint.tensors)
    count = _count(config, family.layers, family.sizes.layers)
    # Layers beyond the last one, as in GLM 4.5, only predict further tokens.
    for index in [index for index in layers if 0 <= index - count < _predicting(config)]:
        further = layers.pop(index)
        unknown += [further.prefix + name for name in further.stored]
    if not (family.is_hybrid and layers and max(layers) < count) and sorted(layers) != list(range(count)):
        raise CheckpointError(f"{CONFIG}: {family.layers}: expected {len(layers)} as stored, got {count}")
    model = CheckpointModel(checkpoint, family, shape, layers, tuple(unknown))
    for index, layer in layers.items():
        check_layer(model.stored(index), family, shape, layer.prefix)
    return model


def shape_of(config: Mapping[str, object], family: AttentionStorage) -> LayerShape:
    """Return the shape of layer 0 in a text model, whose layers all have the same shape."""
    config, sizes = text_of(config), family.sizes
    width, heads = _count(config, family.width, sizes.width), _count(config, family.heads, sizes.heads)
    kv_heads = _count(config, KV_HEADS, None if family.kv_heads is None else sizes.kv_heads, null=heads)
    head_dim = max(1, width // heads)
    if family.head_dim is not None:
        head_dim = _count(config, family.head_dim, sizes.head_dim, null=head_dim)
    if heads % kv_heads:
        raise CheckpointError(f"{CONFIG}: {KV_HEADS}: expected a divisor of {heads} heads, got {kv_heads}")
    return LayerShape(0, width, heads, kv_heads, head_dim)


def check_layer(
    stored: Mapping[str, TensorEntry], family: AttentionStorage, shape: LayerShape, prefix: str
) -> None:
    """Raise CheckpointError unless a layer has all its weights as floats, with the sizes from ``shape``."""
    for disk, ours in family.weights:
        if f"{disk}.weight" not in stored and ours[0] in shape.rows:
            raise CheckpointError(f"{prefix}{disk}.weight: expected in every layer, and it is missing")
        for parameter in PARAMETERS:
            name = f"{disk}.{parameter}"
            if name not in stored:
                continue
            wanted = _wanted(family, shape, ours, parameter)
            if stored[name].shape != wanted:
                raise CheckpointError(
                    f"{prefix}{name}: expected {list(wanted)}, as {CONFIG} says with {shape.heads} heads, "
                    f"{shape.kv_heads} KV heads of {shape.head_dim} and a width of {shape.width}, "
                    f"got {list(stored[name].shape)}"
                )
            if stored[name].dtype not in FLOATS:
                raise CheckpointError(f"{prefix}{name}: expected a floating dtype, got {stored[name].dtype}")


def _wanted(
    family: AttentionStorage, shape: LayerShape, ours: tuple[str, ...], parameter: str
) -> tuple[int, ...]:
    """Return the expected shape of a parameter on disk that stores the projections or norm in ``ours``."""
    if ours[0] not in shape.rows:  # the weight of a norm
        heads = shape.heads if ours[0] == "q_norm" else shape.kv_heads
        whole = {
            "shared": (shape.head_dim,),
            "joined": (heads * shape.head_dim,),
            "apart": (heads, shape.head_dim),
        }
        return whole[family.gains]
    rows = sum(shape.rows[part] for part in ours)
    if parameter == "bias":
        return (rows,)
    wanted = (rows, shape.heads * shape.head_dim if ours == ("o_proj",) else shape.width)
    return wanted[::-1] if family.is_transposed else wanted


def edit_config(
    config: Mapping[str, object], fields: Mapping[str, object], shape: LayerShape
) -> dict[str, object]:
    """Return ``config`` with the converter's ``fields`` and ``head_dim``, and without keys that name code.

    If a vision-language model has a ``text_config``, the fields go there. If the fields have a
    ``model_type``, they are the complete config of another model and are returned unchanged.
    """
    if "model_type" in fields:
        return dict(fields)
    new = dict(fields)
    if fields and family_of(text_of(config).get("model_type")).head_dim is not None:
        new = {"head_dim": shape.head_dim} | new
    kept = without_code(config)
    if text_of(config) is config or TEXT not in config:
        return kept | new
    return kept | {TEXT: kept[TEXT] | new}


def has_key_norms(model: CheckpointModel) -> bool:
    """True if any layer normalizes its keys before computing scores."""
    disk = tuple(f"{name}." for name, ours in model.family.weights if ours == ("k_norm",))
    return any(name.startswith(disk) for layer in model.layers.values() for name in layer.stored)


def is_latent(config: Mapping[str, object]) -> bool:
    """True if ``config`` describes latent attention (MLA)."""
    return config.get("kv_lora_rank") is not None


def token_bytes(
    config: Mapping[str, object],
    model: CheckpointModel,
    *,
    dtype: torch.dtype | None = None,
    storage_dtype: torch.dtype | None = None,
) -> int:
    """Return the KV-cache bytes per token for all layers of a model with ``config``, ignoring windows.

    ``dtype`` is that of computation and defaults to the dtype of the weights; ``storage_dtype`` is as in
    :class:`~attnlib.KVLayout`.
    """
    if is_own(config):
        layouts = [layout_of(form, model) for form in layers_of(config)]
    elif is_latent(config):
        layout = KVLayout.latent(config["kv_lora_rank"], config["qk_rope_head_dim"], dtype=model.dtype)
        layouts = [layout] * len(model.layers)
    else:
        shape = shape_of(config, model.family)
        layouts = [KVLayout.grouped(shape.kv_heads, shape.head_dim, dtype=model.dtype)] * len(model.layers)
    stored = (replace(x, dtype=dtype or x.dtype, storage_dtype=storage_dtype) for x in layouts)
    return sum(layout.token_bytes for layout in stored)


def layout_of(form: LayerForm, model: CheckpointModel) -> KVLayout:
    """Return the KV-cache layout that a layer of ``model`` has after its conversion to ``form``."""
    options = {"dtype": model.dtype, "index_dim": 0 if form.select is None else form.select.head_dim}
    if isinstance(form, GroupedForm):
        return KVLayout.grouped(form.num_key_value_heads, model.shape.head_dim, **options)
    return KVLayout.latent(form.kv_lora_rank, form.qk_rope_head_dim, **options)


def _predicting(config: Mapping[str, object]) -> int:
    """Return the number of stored layers that only predict further tokens; transformers ignores them."""
    found = config.get("num_nextn_predict_layers")
    return found if type(found) is int else 0


def _count(config: Mapping[str, object], key: str, absent: int | None, *, null: int | None = None) -> int:
    """Return a count from ``config``: ``absent`` if the key is missing, ``null`` if its value is null."""
    value = config.get(key, absent)
    value = null if value is None else value
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise CheckpointError(f"{CONFIG}: {key}: expected a count of 1 to {MAX_COUNT}, got {str(value)[:80]}")
    return value
