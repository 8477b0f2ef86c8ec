"""Conversion of a grouped-query layer to fewer KV heads, by merges that are fixed or learned in training."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...internal.signatures import kind
from ...layers import GroupedQueryAttention
from ..calibration import Calibration
from ..weights import PROJECTIONS, join, split
from .align import Align
from .merging import arrange, merge_heads
from .mixed import MixedLinear
from .recipe import Grouping, Merge, recipe


@kind
def mha_to_gqa(
    layer: GroupedQueryAttention,
    num_kv_heads: int,
    *,
    merge: Merge | None = None,
    align: Align | None = None,
    grouping: Grouping | None = None,
    calibration: Calibration | None = None,
    reach: int = 2048,
) -> GroupedQueryAttention:
    """Convert an MHA or GQA layer to a new layer with fewer KV heads by merging groups of heads.

    The old layer does not change. The new layer has the same mask, rope, norms, sinks, gate, scale, dtype,
    mode and other options. Weights are merged in fp64.

    With a ``calibration`` the default is ``merge="principal"``. Each group gets the shared head from which
    linear maps best predict its old heads, and the maps are folded into q and o (Yu et al., 2024, arXiv
    2406.07056). Groups are chosen for the least loss. Key errors are averaged over distances up to ``reach``;
    each doubling of the distance counts equally. If the layer has norms of q and k, its keys cannot be
    mapped. The default is then ``"principal-values"``, which averages the keys. Without a calibration the
    default is ``"mean"``, which averages neighbours (Ainslie et al., 2023, arXiv 2305.13245).

    ``merge="first"`` keeps only the first head of each group. ``"energy"`` weights keys and values by their
    mean squares. ``"learned"`` makes k_proj and v_proj :class:`MixedLinear`, a weighted sum that starts as
    the mean; you train its weights and then call :func:`fold`. ``align`` rotates heads towards each other
    before a merge; principal merges do not need it. ``grouping="similar"`` chooses groups for the least loss
    in principal merges, and by similarity after alignment in others. All options use activations over
    ``calibration``; None means :meth:`Calibration.white`, which uses only the weights. If the layer has a
    gate for each value channel, values cannot be mapped or rotated; the default is then ``"mean"``.

    Raises:
        ValueError: ``num_kv_heads`` does not divide the layer's number of KV heads, norms rule out mapping or
            rotating the keys, a channel gate rules out mapping or rotating the values, ``align`` is combined
            with a principal merge, or an option is unknown.
        TypeError: the layer is not grouped-query, or a projection is not a plain nn.Linear.
        NotImplementedError: ``grouping="similar"`` for a layer with ALiBi, whose slopes depend on the order
            of heads, or the layer has an option that conversion does not support.

    >>> layer = MultiHeadAttention(64, 8, mask=CAUSAL, rope=Rope(8))
    >>> calibration = Calibration.of([torch.randn(100, 64)])
    >>> mha_to_gqa(layer, 2, calibration=calibration).kv_layout.heads
    2
    """
    check_grouped(layer)
    chosen = recipe(
        merge,
        align,
        grouping,
        reach=reach,
        calibrated=calibration is not None,
        maps_keys=layer.k_norm is None,
        maps_values=layer.gate is None or layer.gate.per == "head",
        moves_heads=layer.alibi_slopes is None,
    )
    state = layer.state_dict()
    with torch.no_grad():
        heads = split(state, head_dim=layer.head_dim, rope=layer.rope)
        heads = arrange(heads, num_kv_heads, chosen, calibration)
        merged = merge_heads(heads, num_kv_heads, chosen, calibration).heads
        new = _like(layer, num_kv_heads, join(merged, state))
        if chosen.merge == "learned":
            new.k_proj, new.v_proj = _mixed(heads.k, new.k_proj), _mixed(heads.v, new.v_proj)
    return new


@kind
def fold(layer: GroupedQueryAttention) -> GroupedQueryAttention:
    """Turn a layer with a learned merge, after its training, into an equivalent plain layer.

    Raises:
        TypeError: k_proj or v_proj of ``layer`` is not a :class:`MixedLinear`.
    """
    mixed = [name for name in ("k_proj", "v_proj") if type(getattr(layer, name, None)) is MixedLinear]
    if len(mixed) < 2:
        raise TypeError(
            'layer: expected MixedLinear k_proj and v_proj, as mha_to_gqa(merge="learned") makes them'
        )
    state = {name: value for name, value in layer.state_dict().items() if name.split(".")[0] not in mixed}
    for name in mixed:
        state |= {f"{name}.{key}": value for key, value in getattr(layer, name).folded().items()}
    return _like(layer, layer.num_kv_heads, state)


def check_grouped(layer: nn.Module) -> None:
    """Raise an error unless ``layer`` is a grouped-query layer with plain projections and known options.

    Raises:
        TypeError: the layer or one of its projections has another type.
        NotImplementedError: the layer has a score function, a norm of values, values and keys of different
            width, a temperature, norms after rope, or norms that are not nn.RMSNorm.
    """
    if not isinstance(layer, GroupedQueryAttention):
        raise TypeError(f"layer: expected a GroupedQueryAttention, got {type(layer).__name__}")
    if not layer.own_keys:
        raise NotImplementedError("layer: it reads the keys of another layer; convert that layer")
    if layer.values is not None or layer.v_norm is not None:
        raise NotImplementedError(
            'layer: it normalizes its values (v_norm, values="keys"), which conversion does not support'
        )
    if layer.score is not None:
        raise NotImplementedError("layer: it has a score function, which conversion does not support yet")
    if layer.v_head_dim != layer.head_dim:
        raise NotImplementedError(
            f"layer: expected values as wide as keys, head_dim={layer.head_dim}, got "
            f"v_head_dim={layer.v_head_dim}"
        )
    if layer.temperature is not None or layer.norm_after_rope:
        raise NotImplementedError("layer: conversion does not support a temperature or norms after rope")
    for name in ("q_norm", "k_norm"):
        if type(getattr(layer, name)) not in (nn.RMSNorm, type(None)):
            kind = type(getattr(layer, name)).__name__
            raise NotImplementedError(
                f"{name}: conversion does not support other norms than nn.RMSNorm, got {kind}"
            )
    for name in (*PROJECTIONS, *(("g_proj",) if layer.gate else ())):
        module = getattr(layer, name)
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{name}: expected a plain nn.Linear, got {type(module).__name__}; fold adapters into the "
                "weight first"
            )


def _mixed(rows: Tensor, merged: nn.Linear) -> MixedLinear:
    """Return a projection that learns how to merge heads, and starts with the mean of each group."""
    groups = merged.out_features // rows.shape[1]
    rows = rows.unflatten(0, (groups, -1)).to(merged.weight.dtype)
    bias = None if merged.bias is None else rows[..., -1].clone()
    return MixedLinear(rows[..., :-1].clone(), bias, torch.full_like(rows[:, :, 0, 0], 1 / rows.shape[1]))


def _like(
    layer: GroupedQueryAttention, num_kv_heads: int, state: Mapping[str, Tensor]
) -> GroupedQueryAttention:
    """Return a layer with the options of ``layer``, except its KV heads, and the weights in ``state``."""
    norm = {} if layer.q_norm is None else {"qk_norm": True, "norm_eps": layer.q_norm.eps}
    weight = layer.q_proj.weight
    new = GroupedQueryAttention(
        layer.hidden_size,
        layer.num_heads,
        mask=layer.mask,
        num_kv_heads=num_kv_heads,
        head_dim=layer.head_dim,
        bias=layer.k_proj.bias is not None,
        output_bias=layer.o_proj.bias is not None,
        rope=layer.rope,
        gate=layer.gate,
        sinks=layer.sinks is not None,
        softcap=layer.softcap,
        alibi=layer.alibi_slopes is not None,
        dropout_p=layer.dropout_p,
        context_parallel=layer.context_parallel,
        backend=layer.backend,
        device=weight.device,
        dtype=weight.dtype,
        **norm,
    )
    new.load_state_dict(state)
    # Copy scale and q_gain, because the constructor would derive them from its scale and rope arguments.
    new.scale, new.q_gain = layer.scale, layer.q_gain
    if layer.alibi_slopes is not None:
        new.alibi_slopes.copy_(layer.alibi_slopes)
    return new.train(layer.training)
