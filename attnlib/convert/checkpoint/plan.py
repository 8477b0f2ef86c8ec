"""Plan the converted folder before writing it: every tensor, the file for each, and the new config."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ...checkpoint_files.folder import CONFIG
from ...checkpoint_files.header import TensorEntry, make_header
from ...models.own_form import LayerForm, is_own
from .errors import CheckpointError, VerificationError
from .layer import ConvertedLayer, ConverterByLayer, LayerConverter
from .model import CheckpointModel, check_layer, edit_config, is_latent, shape_of
from .names import join, split


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor to write: ``layer`` is the number of its converted layer, or None for a copied tensor."""

    entry: TensorEntry
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight file to write: the bytes of its header, followed by its tensors in order."""

    name: str
    header: bytes
    outputs: Mapping[str, Output]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(output.entry.nbytes for output in self.outputs.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to write: weight files, their ``index`` (None for a single file) and ``config``."""

    shards: tuple[Shard, ...]
    index: dict[str, object] | None
    config: dict[str, object]


def weights_of(model: CheckpointModel, index: int) -> dict[str, Tensor]:
    """Read the weights of a layer from disk and return them by attnlib's names."""
    layer, tensors = model.layers[index], model.checkpoint.tensors
    stored = {name: tensors[layer.prefix + name].load() for name in layer.stored}
    return split(model.family, stored, replace(model.shape, index=index))


class ConvertedLayers:
    """A model's layers, converted on demand; the latest one is retained until another is requested.

    ``advance`` is called once for each layer, after its first conversion or by :meth:`skip`.
    """

    def __init__(
        self,
        model: CheckpointModel,
        convert_layer: LayerConverter,
        advance: Callable[[], object] = lambda: None,
    ):
        self.model = model
        self._advance, self._counted = advance, set()
        self.convert_layer: LayerConverter = convert_layer
        self.errors: dict[int, dict[str, float]] = {}
        self.forms: dict[int, LayerForm] = {}
        self._last: tuple[int, ConvertedLayer, dict[str, Tensor]] | None = None

    def skip(self, index: int) -> None:
        """Count a layer as converted, for example because an earlier run has written it."""
        if index not in self._counted:
            self._counted.add(index)
            self._advance()

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a converted layer by their full names."""
        return self._converted(index)[2]

    def kind(self, index: int) -> tuple:
        """Return a key: how a source layer is stored, and the attention type and size to convert it to.

        Layers with equal keys are expected to give tensors with the same names, dtypes and shapes.
        """
        kinds = self.convert_layer.kinds if isinstance(self.convert_layer, ConverterByLayer) else None
        stored = ((name, entry.dtype, entry.shape) for name, entry in self.model.stored(index).items())
        return (None if kinds is None else kinds[index], *stored)

    def planned(self, name: str, output: Output) -> Tensor:
        """Convert a layer if needed, and return its tensor ``name``.

        Raises:
            VerificationError: the tensor differs from the planned ``output`` in dtype or shape.
        """
        tensor = self.tensors(output.layer).get(name)
        wanted = output.entry.dtype, output.entry.shape
        got = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if got != wanted:
            raise VerificationError(
                f"{name}: expected {wanted}, as for an earlier layer of the same kind, got {got}"
            )
        return tensor

    def config(self, index: int) -> dict[str, object]:
        """Return the config.json fields that the converter returned with this layer."""
        return dict(self._converted(index)[1].config)

    def _converted(self, index: int):
        if self._last is None or self._last[0] != index:
            self._last = None  # free the previous layer before the next one is allocated
            layer, family = self.model.layers[index], self.model.family
            shape = replace(self.model.shape, index=index)
            converted = self.convert_layer(weights_of(self.model, index), shape)
            tensors = {
                layer.prefix + name: tensor for name, tensor in join(family, converted.weights, shape).items()
            }
            self.errors[index] = dict(converted.errors)
            if converted.form is not None:
                self.forms[index] = converted.form
            self._last = index, converted, tensors
            self.skip(index)
        return self._last


def make_plan(layers: ConvertedLayers, max_shard_size: int) -> Plan:
    """Plan all files by converting one layer for each key of :meth:`ConvertedLayers.kind`.

    Raises:
        CheckpointError: a converted tensor has the same name as a copied one.
        VerificationError: the converter's weights and config contradict each other.
    """
    model = layers.model
    seen, outputs, fields = {}, {}, None
    for index, layer in model.layers.items():
        key = layers.kind(index)
        if key not in seen:
            made = layers.tensors(index).items()
            seen[key] = {
                name.removeprefix(layer.prefix): TensorEntry(x.dtype, tuple(x.shape), 0) for name, x in made
            }
            if fields is not None and layers.config(index) != fields:
                raise VerificationError(
                    f"layer {index}: expected config {fields} as before, got {layers.config(index)}"
                )
            fields = layers.config(index)
        outputs |= {layer.prefix + name: Output(entry, index) for name, entry in seen[key].items()}
    config = edit_config(model.checkpoint.config, fields, model.shape)
    if not is_latent(config) and not is_own(config):
        _check_result(layers, seen, config)
    replaced = {layer.prefix + name for layer in model.layers.values() for name in layer.stored}
    for name, tensor in model.checkpoint.tensors.items():
        if name not in replaced:
            if name in outputs:
                raise CheckpointError(
                    f"{name!r}: expected only in the converted layers, got one in the source too"
                )
            outputs[name] = Output(tensor.entry)
    return _sharded(
        dict(sorted(outputs.items(), key=lambda item: _by_number(item[0]))), max_shard_size, config
    )


def _check_result(
    layers: ConvertedLayers, seen: Mapping[tuple, Mapping[str, TensorEntry]], config: Mapping[str, object]
) -> None:
    try:
        shape = shape_of(config, layers.model.family)
        for entries in seen.values():
            check_layer(entries, layers.model.family, shape, "converted ")
    except CheckpointError as error:
        raise VerificationError(f"the converter's weights and {CONFIG} differ: {error}") from error


def _sharded(outputs: Mapping[str, Output], max_shard_size: int, config: dict) -> Plan:
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise ImportError(
            "converting checkpoints needs huggingface_hub: pip install 'attnlib[hf]'"
        ) from error
    found = split_state_dict_into_shards_factory(
        dict(outputs),
        get_storage_size=lambda output: output.entry.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    shards = []
    for name, tensors in found.filename_to_tensors.items():
        wide_first = sorted(tensors, key=lambda tensor: -outputs[tensor].entry.dtype.itemsize)
        header, placed = make_header({tensor: outputs[tensor].entry for tensor in wide_first})
        placed_outputs = {tensor: replace(outputs[tensor], entry=entry) for tensor, entry in placed.items()}
        shards.append(Shard(name, header, placed_outputs))
    index = {"metadata": found.metadata, "weight_map": found.tensor_to_filename} if found.is_sharded else None
    return Plan(tuple(shards), index, config)


def _by_number(name: str) -> list:
    """Return a sort key that puts ``layers.2`` before ``layers.10`` and groups the tensors of a layer."""
    parts = re.split(r"([0-9]+)", name)
    return [(len(digits := part.lstrip("0")), digits) if i % 2 else part for i, part in enumerate(parts)]
