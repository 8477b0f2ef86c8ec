"""Convert layers to fewer KV heads, for checkpoints in attnlib's own form."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...models.own_form import GroupedForm
from ..checkpoint.layer import ConvertedLayer, LayerShape
from ..heads.converter import grouped
from ..heads.grouping import neighbours
from .kind import Kind, Measured


class GroupedKind(Kind):
    """Layers with fewer KV heads: a layer's size is its KV-head count; :func:`grouped` gets ``options``."""

    def sizes(self, index: int) -> list[int]:
        heads = self.model.shape.kv_heads
        return [size for size in range(1, heads + 1) if heads % size == 0]

    def form(self, index: int, size: int) -> GroupedForm:
        neighbours(self.model.shape.kv_heads, size)
        return GroupedForm(num_key_value_heads=size)

    def measured(self, weights: Mapping[str, Tensor], shape: LayerShape, sizes: Sequence[int]) -> Measured:
        losses, layers = {}, {}
        for size in self.sizes(shape.index):
            made = self.made(weights, shape, size)
            losses[size] = made.errors["key_error"] ** 2 + made.errors["value_error"] ** 2
            if size in sizes:
                layers[size] = made
        return Measured(losses, layers)

    def made(self, weights: Mapping[str, Tensor], shape: LayerShape, size: int) -> ConvertedLayer:
        known = {"calibrations": self.calibrations, "device": self.device}
        made = grouped(self.model.config, size, **known, **self.options)(weights, shape)
        return ConvertedLayer(made.weights, errors=made.errors, form=self.form(shape.index, size))
