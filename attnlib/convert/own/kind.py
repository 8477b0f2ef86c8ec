"""The base class of layer types in attnlib's own form: their possible sizes, losses and converters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint_files.config import without_code
from ...models.own_form import LayerForm, own_config, stored_name
from ..calibration import Calibration
from ..checkpoint.layer import ConvertedLayer, ConverterByLayer, LayerShape
from ..checkpoint.model import CheckpointModel, layout_of

Calibrations = Callable[[int], Calibration]


class Measured(NamedTuple):
    """A layer's loss at each possible size, and the converted layers of the requested sizes.

    A loss is the relative squared error of the scores plus the relative squared error of the outputs.
    """

    losses: dict[int, float]
    layers: dict[int, ConvertedLayer]


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """Converts the layers of ``model`` to one layer type, whose converter functions take ``options``."""

    model: CheckpointModel
    calibrations: Calibrations | None
    device: torch.device | str
    options: Mapping[str, object]

    @abstractmethod
    def sizes(self, index: int) -> list[int]:
        """Return the possible sizes of a layer in ascending order."""

    @abstractmethod
    def form(self, index: int, size: int) -> LayerForm:
        """Return the config.json entry (form) of a converted layer of this size.

        Its rope pairs are placeholders; the conversion chooses them later.

        Raises:
            ValueError: the size is impossible for this layer.
        """

    @abstractmethod
    def measured(self, weights: Mapping[str, Tensor], shape: LayerShape, sizes: Sequence[int]) -> Measured:
        """Return a layer's losses at all possible sizes, and the layer converted to each of ``sizes``.

        Some layer types decompose the weights only once for all sizes.
        """

    @abstractmethod
    def made(self, weights: Mapping[str, Tensor], shape: LayerShape, size: int) -> ConvertedLayer:
        """Return the layer converted to ``size``. All weights have attnlib's parameter names."""

    def alternatives(self, total: int) -> "list[Kind]":
        """Return the kinds to choose from in a cache of ``total`` bytes per token, the default first."""
        return [self]

    def token_bytes(self, index: int, size: int) -> int:
        """Return the KV-cache bytes per token that layer ``index`` takes at this size."""
        return layout_of(self.form(index, size), self.model).token_bytes

    def converter(self, sizes: Sequence[int]) -> ConverterByLayer:
        """Return a converter to attnlib's own form that gives layer i the size ``sizes[i]``."""
        config = own_config(without_code(self.model.checkpoint.config))

        def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
            made = self.made(weights, shape, sizes[shape.index])
            named = {stored_name(name): value for name, value in made.weights.items()}
            return ConvertedLayer(named, config, made.errors, made.form)

        return ConverterByLayer(convert_layer, tuple(map(self.form, self.model.layers, sizes)))
