"""The interface of a layer converter: the shape of a layer to convert, and the converted layer.

Weights have attnlib's parameter names here, whatever their names on disk: ``q_proj.weight`` ``[h * d, m]``,
``k_proj.weight`` and ``v_proj.weight`` ``[g * d, m]``, ``o_proj.weight`` ``[m, h * d]``, and, if the model
has them, biases, ``q_norm.weight``, ``k_norm.weight`` ``[d]`` and an output gate ``g_proj.weight``
``[h * d, m]``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...internal.signatures import kind
from ...models.own_form import LayerForm


@kind
@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of layer ``index`` of the source, with ``heads`` query heads and hidden size ``width``."""

    index: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def rows(self) -> dict[str, int]:
        """The number of output channels of each projection, which are the rows of its weight."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": self.width, "g_proj": q}


@kind
@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A layer's new weights, in the dtype in which they will be stored.

    ``config`` holds config.json fields for the new weights, equal for all layers. Usually they are added to
    the source's config, for example ``num_key_value_heads``. If they have a ``model_type``, they are the
    complete config of another model. ``form`` is the attention type and size of this layer, if the result is
    a checkpoint in attnlib's own format. ``errors`` go into the report under names that the converter
    chooses.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, object] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    form: LayerForm | None = None


LayerConverter = Callable[[Mapping[str, Tensor], LayerShape], ConvertedLayer]


@dataclass(frozen=True, slots=True)
class ConverterByLayer:
    """A converter with one target per layer: ``kinds[i]`` is the type and size of layer i after conversion.

    If two source layers are stored the same way and ``kinds`` is equal for both, their results must have
    equal shapes.
    """

    convert_layer: LayerConverter
    kinds: tuple[LayerForm, ...]

    def __call__(self, weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        return self.convert_layer(weights, shape)


@kind
def identity(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
    """Return the layer unchanged."""
    return ConvertedLayer(weights)
