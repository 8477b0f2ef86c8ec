"""Checkpoint conversion to fewer KV heads: group, align and merge the heads of each layer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from ...internal.signatures import kind
from ...rope.rope import Rope
from ..calibration import Calibration, fitting
from ..checkpoint.errors import CheckpointError, RequestError
from ..checkpoint.layer import ConvertedLayer, LayerConverter, LayerShape
from ..checkpoint.model import shape_of
from ..checkpoint.names import family_of, text_of
from ..checkpoint.source_rope import rope_of
from ..weights import Heads, join, split
from .align import Align, check_norm_weights
from .grouping import neighbours
from .measure import relative_errors, relative_root
from .merging import arrange, merge_heads
from .principal import Merged
from .recipe import Grouping, recipe

Calibrations = Callable[[int], Calibration]
StoredMerge = Literal["principal", "principal-values", "mean", "first", "energy"]
ERRORS = ("key_error", "value_error", "query_rounding", "output_rounding")


@kind
def grouped(
    config: Mapping[str, object],
    kv_heads: int,
    *,
    merge: StoredMerge | None = None,
    align: Align | None = None,
    grouping: Grouping | None = None,
    calibrations: Calibrations | None = None,
    reach: int = 2048,
    device: torch.device | str = "cpu",
) -> LayerConverter:
    """Return a converter that reduces every layer of the model in ``config`` to ``kv_heads`` KV heads.

    Layers are converted as by ``mha_to_gqa``. ``calibrations`` maps a layer index to its calibration; None
    uses only the weights. If the model already has ``kv_heads`` KV heads, layers are copied exactly.
    Computation runs on ``device``, and results are returned on the CPU.

    The report lists four relative errors for each layer, which are 0 if nothing was lost:

    - ``key_error`` and ``value_error``: root mean square errors of the keys (before norm and rope) and
      values, weighted by their effect on scores and outputs over the calibration.
    - ``query_rounding`` and ``output_rounding``: rounding errors of the changed q and o weights.

    Raises:
        RequestError: ``kv_heads`` does not divide the model's KV heads, or an option is not permitted.
        CheckpointError: as ``rope_of``. The converter also raises it if weights are not finite.
    """
    family = family_of(text_of(config).get("model_type"))
    shape = shape_of(config, family)
    alike = rotates_alike(config)
    if merge is not None and merge not in get_args(StoredMerge):
        raise RequestError(f"merge: expected one of {get_args(StoredMerge)}, got {merge!r}")
    if align == "all" and not alike:
        raise RequestError(
            'align: loaders disagree about a partial_rotary_factor, got "all"; use align="values"'
        )
    options = {"reach": reach, "calibrated": calibrations is not None, "maps_values": not family.is_gated}
    recipe_for = partial(recipe, merge, align, grouping, **options)
    try:
        neighbours(shape.kv_heads, kv_heads)
        recipe_for(maps_keys=alike)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error

    def convert_layer(weights: Mapping[str, Tensor], shape: LayerShape) -> ConvertedLayer:
        if kv_heads == shape.kv_heads:
            return ConvertedLayer(weights, errors=dict.fromkeys(ERRORS, 0.0))
        rope = rope_of(config, shape.index)
        heads = heads_of({name: value.to(device) for name, value in weights.items()}, shape, rope)
        try:
            layer_recipe = recipe_for(maps_keys=alike and heads.gains is None)
            if align == "all":
                _require_plain_norms(weights)
                check_norm_weights(heads)
        except ValueError as error:
            raise RequestError(f"layer {shape.index}: {error}") from error
        calibration = None if calibrations is None else calibrations(shape.index)
        calibration = fitting(calibration, shape.width, heads.k.device)
        arranged = arrange(heads, kv_heads, layer_recipe, calibration)
        merged = merge_heads(arranged, kv_heads, layer_recipe, calibration)
        new = join(merged.heads, weights)
        stored = heads_of({name: value.to(device) for name, value in new.items()}, shape, rope)
        errors = _errors(arranged, merged, stored, calibration)
        new = {name: value.cpu() for name, value in new.items()}
        return ConvertedLayer(new, {"num_key_value_heads": kv_heads}, errors)

    return convert_layer


def rotates_alike(config: Mapping[str, object]) -> bool:
    """True if all programs that load this model apply rope to the same channels.

    For some model families, transformers rotates whole heads and vLLM rotates only a part of each head.
    """
    family, rope = family_of(text_of(config).get("model_type")), rope_of(config)
    return rope is None or rope.dim == shape_of(config, family).head_dim or family.rotates_part


def heads_of(weights: Mapping[str, Tensor], shape: LayerShape, rope: Rope | None) -> Heads:
    """Split a layer's weights into heads; the weights have attnlib's parameter names and any dtype.

    Raises:
        CheckpointError: the weights do not split into heads, or are not finite.
    """
    # Convert 8-bit weights to fp32 first, because torch implements few operations for them.
    wide = {name: value.float() if value.dtype.itemsize == 1 else value for name, value in weights.items()}
    try:
        return split(wide, head_dim=shape.head_dim, rope=rope)
    except ValueError as error:
        raise CheckpointError(f"layer {shape.index}: {error}; such heads cannot be merged") from error


def _require_plain_norms(weights: Mapping[str, Tensor]) -> None:
    if "k_norm.bias" in weights:
        raise ValueError(
            "align: norms of q and k with biases, which subtract a mean, do not commute with rotations of "
            'keys; use align="values"'
        )


def _errors(arranged: Heads, merged: Merged, stored: Heads, calibration: Calibration) -> dict[str, float]:
    """Return the errors of converting one layer, under the names in ERRORS.

    The merge errors compare the ``stored`` heads, after rounding, with the ``arranged`` heads before the
    merge. The rounding errors compare ``stored`` with the ``merged`` heads.
    """

    def rounding(exact: Tensor, rounded: Tensor) -> float:
        return relative_root((exact - rounded).square().sum(), exact.square().sum())

    measures = relative_errors(arranged, merged, stored, calibration)
    measures += (rounding(merged.heads.q, stored.q), rounding(merged.heads.o, stored.o))
    return dict(zip(ERRORS, measures, strict=True))
