"""What checkpoint conversion asks for each layer, made of what turns heads into fewer: a converter to grouped heads."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from ..calibration import Calibration
from ..checkpoint.errors import CheckpointError, RequestError
from ..checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from ..checkpoint.model import shape_of
from ..checkpoint.names import family_of
from ..checkpoint.source_rope import rope_of
from ..weights import Heads, join, split
from .align import Align, check_gains
from .grouping import neighbours
from .merging import Grouping, arrange, merge_heads, shares

Calibrations = Callable[[int], Calibration]
StoredMerge = Literal["mean", "first", "energy"]
ERRORS = ("key_error", "value_error", "query_rounding", "output_rounding")


def grouped(
    config: Mapping[str, object],
    kv_heads: int,
    *,
    merge: StoredMerge = "mean",
    align: Align = "none",
    grouping: Grouping = "neighbours",
    calibrations: Calibrations | None = None,
) -> LayerConverter:
    """Layers of the model of this config.json into layers of ``kv_heads`` KV heads, as ``mha_to_gqa`` makes them.

    ``calibrations`` gives the calibration of a layer by its index; None means weights alone. As many heads as there
    are is an exact copy.

    Errors of a layer, each 0 if nothing was lost: ``key_error`` and ``value_error`` are the root mean square of what
    the stored heads miss, over all keys (before norm and rope) and values of the source, relative to these, under the
    calibration; ``query_rounding`` and ``output_rounding`` are what turned weights lost to their dtype, relative.

    Raises:
        RequestError: ``kv_heads`` does not divide the source's KV heads, or an option that it does not permit.
        CheckpointError: as ``rope_of``; the converter raises it for weights that are not finite.
    """
    shape, rope = shape_of(config, family_of(config.get("model_type"))), rope_of(config)
    for name, value, known in (
        ("merge", merge, StoredMerge),
        ("align", align, Align),
        ("grouping", grouping, Grouping),
    ):
        if value not in get_args(known):
            raise RequestError(f"{name}: expected one of {get_args(known)}, got {value!r}")
    try:
        neighbours(shape.kv_heads, kv_heads)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error
    if align == "all" and rope is not None and rope.dim < shape.head_dim:
        # transformers rotates whole heads of such a model whatever its config says, vLLM a part of them
        raise RequestError('align: loaders disagree about a partial_rotary_factor, got "all"; use align="values"')

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        if kv_heads == shape.kv_heads:
            return ConvertedLayer(weights, errors=dict.fromkeys(ERRORS, 0.0))
        try:
            heads = split(_wide(weights), head_dim=shape.head_dim, rope=rope)
        except ValueError as error:
            raise CheckpointError(f"layer {shape.index}: {error}; such heads cannot be merged") from error
        if align == "all":
            try:
                check_gains(heads)
            except ValueError as error:
                raise RequestError(f"layer {shape.index}: {error}") from error
        calibration = Calibration.white(shape.width) if calibrations is None else calibrations(shape.index)
        arranged = arrange(heads, kv_heads, align=align, grouping=grouping, calibration=calibration)
        mixes = shares(arranged, kv_heads, merge=merge, calibration=calibration)
        new = join(merge_heads(arranged, *mixes), weights)
        stored = split(_wide(new), head_dim=shape.head_dim, rope=rope)
        return ConvertedLayer(new, {"num_key_value_heads": kv_heads}, _errors(arranged, stored, calibration))

    return convert_layer


def _errors(arranged: Heads, stored: Heads, calibration: Calibration) -> dict[str, float]:
    """What ``stored`` misses of ``arranged``, by the names of ERRORS."""
    size = len(arranged.k) // len(stored.k)

    def missed(old: Tensor, new: Tensor) -> float:
        return _relative(*(calibration.energy(x).sum() for x in (old - new.repeat_interleave(size, 0), old)))

    def rounding(old: Tensor, new: Tensor) -> float:
        return _relative(*(x.square().sum() for x in (old - new, old)))

    measures = (missed(arranged.k, stored.k), missed(arranged.v, stored.v))
    measures += (rounding(arranged.q, stored.q), rounding(arranged.o, stored.o))
    return dict(zip(ERRORS, measures, strict=True))


def _relative(lost: Tensor, whole: Tensor) -> float:
    return float((lost / whole.clamp(min=torch.finfo(whole.dtype).tiny)).sqrt())


def _wide(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of eight bits as fp32, for little is defined on eight bits."""
    return {name: value.float() if value.dtype.itemsize == 1 else value for name, value in weights.items()}
