"""What a converter of one layer gets and gives; reading and writing checkpoints knows nothing else of it.

Weights go by the parameter names of this library's layers, whatever their names on disk: ``q_proj.weight``
``[h * d, m]``, ``k_proj.weight`` and ``v_proj.weight`` ``[g * d, m]``, ``o_proj.weight`` ``[m, h * d]``,
biases and ``q_norm.weight``, ``k_norm.weight`` ``[d]`` where the model has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...internal.signatures import kind
from ...models.own_form import LayerForm


@kind
@dataclass(frozen=True, slots=True)
class LayerShape:
    """Layer ``index`` of the source: ``width`` m, ``heads`` h, ``kv_heads`` g, ``head_dim`` d."""

    index: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def rows(self) -> dict[str, int]:
        """What each projection gives out: the rows of its weight."""
        keys = self.kv_heads * self.head_dim
        return {"q_proj": self.heads * self.head_dim, "k_proj": keys, "v_proj": keys, "o_proj": self.width}


@kind
@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A layer's new weights, in the dtype in which they are to be stored.

    ``config`` is what config.json must say of them, the same for all layers: keys such as
    ``num_key_value_heads`` that are added to the source's, or all of another model's, its ``model_type``
    among them. ``form`` is what one of attnlib's own form says of this layer alone. ``errors`` go into the
    report, by names of the converter's choice.
    """

    weights: Mapping[str, Tensor]
    config: Mapping[str, object] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    form: LayerForm | None = None


LayerConverter = Callable[[Mapping[str, Tensor], LayerShape], ConvertedLayer]


@dataclass(frozen=True, slots=True)
class ConverterByLayer:
    """A converter to layers of several ``kinds``; of one kind, those that are stored alike come out alike."""

    convert_layer: LayerConverter
    kinds: tuple[LayerForm, ...]

    def __call__(self, weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        return self.convert_layer(weights, shape)


@kind
def identity(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
    """The layer as it is."""
    return ConvertedLayer(weights)
