"""Conversion of grouped-query to latent attention: embed exactly, concentrate rope, truncate the latent.

Every grouped-query layer can be written as a latent layer with a cache of the same size. The latent holds all
values and the key channels without rope. The single rotary key holds the rotated key channels of all heads
side by side; each query has zeros for the heads of other groups. Two steps then reduce the size.
Concentrating rope mixes the rotary keys of the heads pair by pair, keeps the components that matter most, and
moves the rest, without rotation, into the latent. Truncation keeps the directions of the latent that matter
most.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor, nn

from ...internal.checks import check_count
from ...internal.signatures import kind
from ...layers import GroupedQueryAttention, MultiHeadLatentAttention
from ...rope.rope import Rope
from ..calibration import Calibration, fitting
from ..heads.layers import check_grouped
from ..weights import Heads, split
from .attended import attended, usual_scale
from .cost import Cost, relative
from .embedding import Latent, concentrate, embed
from .queries import QueryCost, check_query_rank, low_rank
from .truncation import truncate

NORMS = "q_norm and k_norm that scale each token differently"


@kind
def gqa_to_mla(
    layer: GroupedQueryAttention,
    rank: int | None = None,
    *,
    rope_dim: int | None = None,
    q_rank: int | None = None,
    calibration: Calibration | None = None,
    reach: int = 2048,
) -> MultiHeadLatentAttention:
    """Convert a grouped-query layer to a new latent layer; the old layer does not change.

    The cache stores ``rank + rope_dim`` values per token instead of ``2 * g * d`` (g KV heads of d channels).
    ``rope_dim=None`` keeps all ``g * layer.rope.dim`` rotary channels, and ``rank=None`` does not truncate
    the latent; if both are None, the new layer computes the same function. ``concentrate`` and ``truncate``
    explain smaller sizes. ``calibration=None`` means :meth:`Calibration.white`, which uses only the weights.
    ``q_rank`` makes the queries low-rank (see ``low_rank``) and becomes q_lora_rank.

    The weights have DeepSeek-V3's names. DeepSeek normalises latents and a grouped-query layer does not, so
    the norm is made an identity. With ``eps = 2 ** 100`` (less in fp16), it divides by ``2 ** 50``, and its
    weight multiplies by the same number; this is exact to the last bit for latents below ``2 ** 23`` (see
    ``identity_eps``), but such a large weight hardly learns. A bias of q becomes a bias of q_proj or
    q_b_proj, which MultiHeadLatentAttention itself never creates. ``rope`` is a ``SelectedRope``. Mask,
    gate, scale, dropout, backend, dtype and mode are those of the old layer.

    Raises:
        ValueError: a rank, rope_dim, q_rank or reach is out of range, or the calibration has another width.
        TypeError: as :func:`mha_to_gqa`, or a size is not an int.
        NotImplementedError: the layer has a feature that latent layers lack: norms of q and k, sinks,
            softcap, ALiBi.

    >>> layer = GroupedQueryAttention(64, 8, num_kv_heads=4, mask=CAUSAL, rope=Rope(8))
    >>> x = torch.randn(1, 9, 64)
    >>> torch.testing.assert_close(gqa_to_mla(layer)(x), layer(x))
    >>> smaller = gqa_to_mla(layer, 32, rope_dim=8, calibration=Calibration.of([x]))
    >>> smaller.kv_layout.token_bytes
    160
    """
    check_latent(layer)
    with torch.no_grad():
        state, eps = layer.state_dict(), identity_eps(layer.q_proj.weight.dtype)
        heads = split(state, head_dim=layer.head_dim, rope=layer.rope)
        latent = to_latent(
            heads,
            rank,
            rope_dim=rope_dim,
            calibration=calibration,
            reach=reach,
            q_rank=q_rank,
            scale=layer.scale,
        )
        return latent_layer(layer, join(latent, state), rope=latent.rope, norm_eps=eps, scale=layer.scale)


def to_latent(
    heads: Heads,
    rank: int | None,
    *,
    rope_dim: int | None,
    calibration: Calibration | None,
    reach: int,
    q_rank: int | None = None,
    scale: float | None = None,
) -> Latent:
    """Convert heads to the weights of a latent layer, with the options of :func:`gqa_to_mla`.

    ``scale`` is the layer's softmax scale; None means the usual one.

    Raises: as :func:`gqa_to_mla`, except for errors that need the layer itself.
    """
    check_latent_heads(heads)
    check_count("reach", reach, least=1)
    for name, size in (("rank", rank), ("rope_dim", rope_dim)):
        if size is not None:
            check_count(name, size)
    if heads.rope is None and rope_dim:
        raise ValueError(f"rope_dim: expected None or 0 for a layer without rope, got {rope_dim}")
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    latent, _ = whole_latent(heads, rope_dim, calibration, reach=reach)
    cuts = rank is not None and rank != len(latent.down)
    if not cuts and q_rank is None:
        return latent
    seen = attended(
        heads, calibration, scale=usual_scale(heads.rope, heads.k.shape[1]) if scale is None else scale
    )
    if cuts:
        latent = truncate(latent, rank, seen, Cost.of(latent, heads, calibration, seen, reach=reach))
    if q_rank is not None:
        cost = QueryCost.of(heads, calibration, seen, reach=reach)
        latent, _ = with_low_rank_queries(latent, q_rank, cost)
    return latent


def with_low_rank_queries(latent: Latent, q_rank: int, cost: QueryCost) -> tuple[Latent, float]:
    """Return the latent with queries of rank ``q_rank``, and the relative error that this causes in scores.

    Raises:
        ValueError: ``q_rank`` is more than the queries can use.
    """
    h, d, width = cost.heads.q.shape
    check_query_rank(q_rank, heads=h, head_dim=d, width=width - 1)
    queries = low_rank(cost, q_rank, has_offset=bool(cost.heads.q[..., -1].any())).scaled(cost.calibration)
    return replace(latent, q=queries.rows, q_down=queries.down), cost.missed(queries)


def whole_latent(
    heads: Heads, rope_dim: int | None, calibration: Calibration, *, reach: int
) -> tuple[Latent, float]:
    """Return the untruncated latent with ``rope_dim`` rotary channels (None: all), and its rope error."""
    if rope_dim in (None, len(heads.k) * heads.rotated):
        return embed(heads), 0.0
    return concentrate(heads, rope_dim, calibration, reach=reach)


def identity_eps(dtype: torch.dtype) -> float:
    """Return an eps so large that the latent's norm, with ``sqrt(eps)`` as its weight, changes nothing.

    The latent's mean square is so small compared with eps that it vanishes in rounding. The root of eps is a
    power of two that the dtype can represent. In fp16 the root is ``2 ** 15``, which is enough for latents
    below ``2 ** 7``. A converted layer of another dtype must not be cast to fp16.
    """
    return 2.0**30 if dtype == torch.float16 else 2.0**100


def join(latent: Latent, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a latent layer's state dict under DeepSeek-V3's names, from ``latent`` and the old state dict.

    If the old k_proj or o_proj has a bias, both kv_a_proj_with_mqa and o_proj get one. The query projection
    has a bias if q_proj has one. Low-rank queries also get a norm. All weights have the dtype of ``state``.
    """
    return rounded(latent_state(latent, state), state["q_proj.weight"].dtype)[0]


def rounded(state: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """Round weights to ``dtype``; return them with the largest relative rounding error of a weight."""
    stored = {name: value.to(dtype, copy=True) for name, value in state.items()}
    return stored, max(relative((value - stored[name]).norm(), value.norm()) for name, value in state.items())


def latent_state(latent: Latent, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a latent layer's state dict like :func:`join`, but do not round the weights of ``latent``."""
    dtype = state["q_proj.weight"].dtype
    q, down = (
        torch.cat((latent.q_nope, latent.q_rope), 1).flatten(0, 1),
        torch.cat((latent.down, latent.k_rope)),
    )
    to_heads = "q_proj" if latent.q_down is None else "q_b_proj"
    new = {
        f"{to_heads}.weight": q[:, :-1],
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_layernorm.weight": torch.full_like(latent.down[:, 0], identity_eps(dtype) ** 0.5),
        "kv_b_proj.weight": rearrange(torch.cat((latent.k_up, latent.v_up), 1), "h d r -> (h d) r"),
        "o_proj.weight": state["o_proj.weight"],
    }
    new |= {name: value for name, value in state.items() if name.startswith("g_proj.")}
    if "q_proj.bias" in state:
        new[f"{to_heads}.bias"] = q[:, -1]
    if latent.q_down is not None:
        new["q_a_proj.weight"] = latent.q_down
        new["q_a_layernorm.weight"] = torch.full_like(latent.q_down[:, 0], identity_eps(dtype) ** 0.5)
    if "k_proj.bias" in state or "o_proj.bias" in state:
        new["kv_a_proj_with_mqa.bias"] = down[:, -1]
        new["o_proj.bias"] = state.get("o_proj.bias", torch.zeros_like(state["o_proj.weight"][:, 0]))
        if latent.q_down is not None:
            new["q_a_proj.bias"] = torch.zeros_like(latent.q_down[:, 0])
    return new


def check_latent(layer: nn.Module) -> None:
    """Raise an error unless ``layer`` is a grouped-query layer without softcap and ALiBi.

    :func:`check_latent_heads` checks for norms and sinks.

    Raises: as :func:`gqa_to_mla`.
    """
    check_grouped(layer)
    for name, value in (("softcap", layer.softcap), ("ALiBi", layer.alibi_slopes)):
        _refuse(name, value)


def check_latent_heads(heads: Heads) -> None:
    """Raise NotImplementedError if the old layer has norms of q and k, or sinks.

    A norm divides the key of each token by a different number, which no linear map of a latent can do.
    Dividing all keys by one typical size instead loses more than truncating the latent to a fifth of its
    rank, as measured in docs/conversion_theory.md.

    Raises:
        NotImplementedError: the heads have norms or sinks.
    """
    _refuse(NORMS, heads.gains)
    _refuse("sinks", heads.sinks)


def _refuse(name: str, value: object) -> None:
    if value is not None:
        raise NotImplementedError(
            f"layer: it has {name}, which latent layers do not support; use mha_to_gqa or --to gqa"
        )


def latent_layer(
    layer: GroupedQueryAttention,
    state: Mapping[str, Tensor],
    *,
    rope: Rope | None,
    norm_eps: float,
    scale: float | None,
) -> MultiHeadLatentAttention:
    """Return a latent layer with the weights and sizes of ``state`` and the options of ``layer``."""
    weight, rank = layer.q_proj.weight, len(state["kv_a_layernorm.weight"])
    new = MultiHeadLatentAttention(
        layer.hidden_size,
        layer.num_heads,
        mask=layer.mask,
        q_lora_rank=len(state["q_a_layernorm.weight"]) if "q_a_layernorm.weight" in state else None,
        kv_lora_rank=rank,
        qk_nope_head_dim=len(state["kv_b_proj.weight"]) // layer.num_heads - layer.head_dim,
        qk_rope_head_dim=len(state["kv_a_proj_with_mqa.weight"]) - rank,
        v_head_dim=layer.head_dim,
        bias="kv_a_proj_with_mqa.bias" in state,
        rope=rope,
        norm_eps=norm_eps,
        gate=layer.gate,
        scale=scale,
        dropout_p=layer.dropout_p,
        context_parallel=layer.context_parallel,
        backend=layer.backend,
        device=weight.device,
        dtype=weight.dtype,
    )
    for name in ("q_proj", "q_b_proj"):
        if f"{name}.bias" in state:
            rows, channels = state[f"{name}.weight"].shape
            setattr(new, name, nn.Linear(channels, rows, device=weight.device, dtype=weight.dtype))
    new.load_state_dict(state)
    return new.train(layer.training)
