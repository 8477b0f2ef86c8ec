"""Layers of fewer KV heads, in attnlib's own form."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ...own_form import GroupedForm
from ..checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from ..checkpoint.plan import weights_of
from ..heads.converter import grouped
from ..heads.grouping import neighbours
from .kind import Kind


class GroupedKind(Kind):
    """Layers of fewer KV heads, whose number is their size; ``options`` are those of :func:`grouped`."""

    def sizes(self, index: int) -> list[int]:
        heads = self.model.shape.kv_heads
        return [size for size in range(1, heads + 1) if heads % size == 0]

    def form(self, index: int, size: int) -> GroupedForm:
        neighbours(self.model.shape.kv_heads, size)
        return GroupedForm(num_key_value_heads=size)

    def losses(self, index: int) -> dict[int, float]:
        weights, shape = weights_of(self.model, index), replace(self.model.shape, index=index)
        made = {size: self._converter(size)(weights, shape).errors for size in self.sizes(index)}
        return {size: errors["key_error"] ** 2 + errors["value_error"] ** 2 for size, errors in made.items()}

    def made(self, weights: Mapping[str, Tensor], shape: LayerShape, size: int) -> ConvertedLayer:
        made = self._converter(size)(weights, shape)
        return ConvertedLayer(made.weights, errors=made.errors, form=self.form(shape.index, size))

    def _converter(self, size: int) -> LayerConverter:
        known = {"calibrations": self.calibrations, "device": self.device}
        return grouped(self.model.config, size, **known, **self.options)
