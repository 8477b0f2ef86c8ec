"""A kind of layers that attnlib's own form can hold: the sizes each may have, what they lose, and who makes
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint_files.config import without_code
from ...models.own_form import INNER, LayerForm, own_config
from ..calibration import Calibration
from ..checkpoint.layer import ConvertedLayer, ConverterByLayer, LayerShape
from ..checkpoint.model import CheckpointModel, layout_of

Calibrations = Callable[[int], Calibration]
Advance = Callable[[], object]


class Measured(NamedTuple):
    """What a layer loses at each size that it may have, and the layers that were asked for, by their size.

    A loss is the share that scores miss of their mean square, plus that of outputs.
    """

    losses: dict[int, float]
    layers: dict[int, ConvertedLayer]


@dataclass(frozen=True, slots=True)
class Kind(ABC):
    """Layers of ``model`` as one kind of layers; ``options`` are those of the functions that make them."""

    model: CheckpointModel
    calibrations: Calibrations | None
    device: torch.device | str
    options: Mapping[str, object]

    @abstractmethod
    def sizes(self, index: int) -> list[int]:
        """The sizes that a layer may have, from small to large."""

    @abstractmethod
    def form(self, index: int, size: int) -> LayerForm:
        """What a layer of this size is, but for the pairs that its rope chooses.

        Raises:
            ValueError: no layer has such a size.
        """

    @abstractmethod
    def measured(self, weights: Mapping[str, Tensor], shape: LayerShape, sizes: Sequence[int]) -> Measured:
        """What a layer loses, and layers of these ``sizes``, from the weights of one: it is decomposed
        once.
        """

    @abstractmethod
    def made(self, weights: Mapping[str, Tensor], shape: LayerShape, size: int) -> ConvertedLayer:
        """A layer of this size from the weights of one, both by our names."""

    def token_bytes(self, index: int, size: int) -> int:
        """Bytes that a layer of this size stores of a token."""
        return layout_of(self.form(index, size), self.model).token_bytes

    def converter(self, sizes: Sequence[int]) -> ConverterByLayer:
        """What makes layers of these sizes, for a checkpoint in attnlib's own form."""
        config = own_config(without_code(self.model.checkpoint.config))

        def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
            made = self.made(weights, shape, sizes[shape.index])
            named = {f"{INNER}{name}": value for name, value in made.weights.items()}
            return ConvertedLayer(named, config, made.errors, made.form)

        return ConverterByLayer(convert_layer, tuple(map(self.form, self.model.layers, sizes)))
