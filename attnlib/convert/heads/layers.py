"""From a grouped-query layer to one with fewer KV heads, and back to plain projections."""

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
    """A new layer with ``num_kv_heads`` KV heads, merged from those of an MHA or GQA layer, which stays as it
    is.

    With a ``calibration`` the default is ``merge="principal"``: the shared head of each group is the one from
    which the old ones follow best by linear maps, which move into queries and o (Yu et al., 2024, arXiv
    2406.07056), and groups are those that lose least. Keys are weighed at distances up to ``reach``, each
    doubling as much as any other. Norms of q and k forbid to map keys; ``"principal-values"`` then takes
    their mean. Without a calibration the default is that of Ainslie et al., 2023 (arXiv 2305.13245): the mean
    of neighbours.

    ``merge="first"`` keeps one head of each group, ``"energy"`` weights keys and values by their mean
    squares, and ``"learned"`` makes k_proj and v_proj :class:`MixedLinear`, which start as the mean and are
    trained until :func:`fold`. ``align`` turns heads towards each other before one of these;
    ``grouping="similar"`` puts heads together that lose least (principal), or that are alike after alignment.
    All look at activations over ``calibration``; None means :meth:`Calibration.white`, weights alone.

    Everything else, mask, rope, norms, sinks, scale, dtype and mode included, is the old layer's. Sums are
    fp64.

    Raises:
        ValueError: ``num_kv_heads`` does not divide the layer's, norms forbid to map or to turn keys,
        ``align`` before
            a principal merge, or an unknown option.
        TypeError: not a grouped-query layer, or one whose projections are more than a weight.
        NotImplementedError: ``grouping="similar"`` of a layer with ALiBi, whose slopes belong to the order of
        heads.

    >>> layer = MultiHeadAttention(64, 8, mask=CAUSAL, rope=Rope(8))
    >>> mha_to_gqa(layer, 2, calibration=Calibration.of([torch.randn(100, 64)])).kv_layout.heads
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
        moves_heads=layer.alibi_slopes is None,
    )
    state = layer.state_dict()
    with torch.no_grad():
        heads = split(state, head_dim=layer.head_dim, rope=layer.rope)
        heads = arrange(heads, num_kv_heads, chosen, calibration)
        merged = merge_heads(heads, num_kv_heads, chosen, calibration).heads
        new = _like(layer, num_kv_heads, join(merged, state))
        if chosen.merge == "learned":
            new.k_proj, new.v_proj = (
                _mixed(*rows) for rows in ((heads.k, new.k_proj), (heads.v, new.v_proj))
            )
    return new


@kind
def fold(layer: GroupedQueryAttention) -> GroupedQueryAttention:
    """A new layer with plain projections that computes what one made with ``merge="learned"`` has learnt.

    Raises:
        TypeError: ``layer`` was not made so.
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
    """Refuse what is not a grouped-query layer of plain projections.

    Raises:
        TypeError: with the name of what is something else.
    """
    if not isinstance(layer, GroupedQueryAttention):
        raise TypeError(f"layer: expected a GroupedQueryAttention, got {type(layer).__name__}")
    if layer.score is not None:
        raise NotImplementedError("layer: its score is by function, which conversion does not carry over yet")
    if layer.v_head_dim != layer.head_dim:
        raise NotImplementedError(
            f"layer: expected values as wide as keys, head_dim={layer.head_dim}, got "
            f"v_head_dim={layer.v_head_dim}"
        )
    if layer.temperature is not None or layer.norm_after_rope:
        raise NotImplementedError("layer: conversion knows no temperature, and no norms after rope")
    for name in ("q_norm", "k_norm"):
        if type(getattr(layer, name)) not in (nn.RMSNorm, type(None)):
            kind = type(getattr(layer, name)).__name__
            raise NotImplementedError(
                f"{name}: conversion knows norms of each head by nn.RMSNorm alone, got {kind}"
            )
    for name in PROJECTIONS:
        module = getattr(layer, name)
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{name}: expected a plain nn.Linear, got {type(module).__name__}; fold adapters into the "
                "weight first"
            )


def _mixed(rows: Tensor, merged: nn.Linear) -> MixedLinear:
    """What starts as the mean of heads ``[g, d, m + 1]`` in each group, as ``merged`` is, and learns what
    they give.
    """
    groups = merged.out_features // rows.shape[1]
    rows = rows.unflatten(0, (groups, -1)).to(merged.weight.dtype)
    bias = None if merged.bias is None else rows[..., -1].clone()
    return MixedLinear(rows[..., :-1].clone(), bias, torch.full_like(rows[:, :, 0, 0], 1 / rows.shape[1]))


def _like(
    layer: GroupedQueryAttention, num_kv_heads: int, state: Mapping[str, Tensor]
) -> GroupedQueryAttention:
    """A layer with these weights and all the options of ``layer``."""
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
    new.scale, new.q_gain = layer.scale, layer.q_gain  # which the constructor would take from scale= and rope
    if layer.alibi_slopes is not None:
        new.alibi_slopes.copy_(layer.alibi_slopes)
    return new.train(layer.training)
