"""Conversion of a grouped-query layer to a layer that DeepSeek-V3's own loaders can read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import torch
from torch import Tensor

from ...internal.checks import check_count
from ...internal.signatures import kind
from ...kv import DTYPES
from ...layers import GroupedQueryAttention, MultiHeadLatentAttention
from ...rope.rope import Rope
from ..calibration import Calibration, fitting
from ..weights import Heads, split
from .attended import Attended, attended
from .cost import Cost
from .embedding import Latent
from .folding import even_queries, fold
from .layers import check_latent, check_latent_heads, latent_layer, rounded
from .losses import BASELINE, Losses
from .narrowed import narrowed
from .norm import NORM_EPS, Constant, Norm, check_biases, check_text, constant_row
from .queries import QueryCost, QueryProjection, check_query_rank, low_rank, whole_queries
from .state import deepseek_state
from .truncation import truncate


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The sizes of a DeepSeek-V3 layer, and the options of the conversion to it.

    The cache stores ``rank + rope_dim`` values per token. DeepSeek normalises the latent and a grouped-query
    layer does not. Therefore one of the ``rank`` channels holds a constant that is large enough to determine
    the norm almost alone. With ``norm="exact"``, this constant is a bias (``attention_bias=True``).
    ``norm="calibrated"`` needs no bias: the constant is the linear function of the inputs that is closest to
    1 over the calibration, and its deviation from 1 becomes a relative error of the token's latent. ``reach``
    is the largest distance over which rope errors are averaged. Queries go through ``q_rank`` channels
    (DeepSeek's q_lora_rank), one of which also holds a constant; None keeps their full rank.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is too small, or the norm is unknown.
    """

    rank: int
    rope_dim: int = 64
    reach: int = 2048
    norm: Norm = "exact"
    q_rank: int | None = None
    reserved: ClassVar[int] = 1  # number of latent (or low-rank query) channels that hold the constant

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm: expected one of {get_args(Norm)}, got {self.norm!r}")
        check_count("rank", self.rank, least=1 + self.reserved)
        check_count("rope_dim", self.rope_dim, least=2)
        check_count("reach", self.reach, least=1)


@dataclass(frozen=True, slots=True, eq=False)
class DeepseekLayer:
    """A state dict of DeepSeek-V3's attention, its interleaved rope, and the conversion errors.

    ``errors`` are root mean square errors over the calibration, relative to the original layer:

    - ``key_error``, ``value_error``: errors of the truncation and the norm, measured by :class:`Cost`, with
      tokens weighted by the attention they get.
    - ``svd_key_error``, ``svd_value_error``: the same for a plain SVD of the weights at the same rank. This
      is a baseline for comparison; the layer does not use it.
    - ``query_error``: error of low-rank queries, measured by :class:`QueryCost`; only with ``q_rank``.
    - ``rope_error``: error of the rotated keys, see :func:`fold`.
    - ``norm_error``: how much the norm changes the latents.
    - ``rounding``: the largest relative error from rounding a weight to its dtype.

    With ``norm="calibrated"``, the errors of keys, values, queries and latents are measured on the
    calibration's sample of inputs, and are NaN without one.
    """

    state: Mapping[str, Tensor]
    rope: Rope
    errors: Mapping[str, float]


@kind
def gqa_to_deepseek(
    layer: GroupedQueryAttention,
    rank: int,
    *,
    rope_dim: int = 64,
    calibration: Calibration | None = None,
    reach: int = 2048,
    norm: Norm = "exact",
    q_rank: int | None = None,
) -> MultiHeadLatentAttention:
    """Convert a grouped-query layer to a new layer whose state dict fits a DeepSeek-V3 checkpoint.

    Arguments not explained here are those of :func:`gqa_to_mla`. The new rope has ``rope_dim`` channels and
    the old layer's ``theta`` and scaling (see ``narrowed``); norm_eps is 1e-6 and the scale is the default.
    ``Target`` explains ``norm``; when you train a layer with ``"exact"``, exclude norm weights and biases
    from weight decay. ``q_rank`` is DeepSeek's q_lora_rank. None means no q_lora_rank, unless q has a bias
    and ``norm="exact"``; the rank is then ``hidden_size + 1``.

    Raises:
        ValueError: a size is out of range, ``rope_dim`` does not divide the number of rotated channels, the
            norm is unknown, or ``norm="calibrated"`` lacks a calibration text or its inputs have mean 0.
        TypeError: as :func:`mha_to_gqa`, or a size is not an int.
        NotImplementedError: DeepSeek-V3 cannot represent the layer: it has no rope, a rope scaling that
            ``narrowed`` refuses, norms of q and k, a gate, sinks, softcap, ALiBi, or biases
            with ``norm="calibrated"``.
    >>> layer = GroupedQueryAttention(64, 8, num_kv_heads=1, mask=CAUSAL, rope=Rope(8))
    >>> x = torch.randn(1, 9, 64)
    >>> torch.testing.assert_close(gqa_to_deepseek(layer, 8 + 1, rope_dim=8)(x), layer(x))
    """
    check_latent(layer)
    target = Target(rank=rank, rope_dim=rope_dim, reach=reach, norm=norm, q_rank=q_rank)
    with torch.no_grad():
        state = layer.state_dict()
        heads = split(state, head_dim=layer.head_dim, rope=layer.rope)
        made = to_deepseek(heads, state, target, scale=layer.scale, calibration=calibration)
        return latent_layer(layer, made.state, rope=made.rope, norm_eps=NORM_EPS, scale=None)


def to_deepseek(
    heads: Heads,
    state: Mapping[str, Tensor],
    target: Target,
    *,
    scale: float,
    calibration: Calibration | None,
) -> DeepseekLayer:
    """Convert a layer's weights like :func:`gqa_to_deepseek`, given its state dict and its heads.

    The new weights have the dtype of ``state``. ``scale`` is the old layer's softmax scale, which is folded
    into q.

    Raises: as :func:`gqa_to_deepseek`, except for errors that need the layer itself.
    """
    check_latent_heads(heads)
    if heads.gates is not None:
        raise NotImplementedError("gate: expected None, as in DeepSeek, got an output gate; use gqa_to_mla")
    if heads.rope is None:
        raise NotImplementedError("rope: expected a rope, as in DeepSeek, got none; convert with gqa_to_mla")
    if (dtype := state["q_proj.weight"].dtype) not in DTYPES:
        raise TypeError(
            f"q_proj.weight: expected fp16, bf16, fp32 or fp64, got {dtype}; cast the weights first"
        )
    (h, d, width), g = heads.q.shape, len(heads.k)
    check_target(target, heads.rope, heads=h, kv_heads=g, head_dim=d, width=width - 1)
    check_biases(target.norm, state)
    check_text(target.norm, calibrated=calibration is not None and calibration.tokens > 0)
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    seen = attended(heads, calibration, scale=scale)
    constant = Constant.of(constant_row(target.norm, seen.moment, dtype), target.rank, dtype)
    heads = even_queries(heads, calibration)
    whole, lost = fold(heads, target.rope_dim, calibration, reach=target.reach)
    losses = Losses.of_inputs(
        whole, Cost.of(whole, heads, calibration, seen, reach=target.reach), seen, constant
    )
    cut, constant, errors = _cut(heads, whole, target.rank - target.reserved, losses)
    query_constant = None
    if target.q_rank is not None or (target.norm == "exact" and "q_proj.bias" in state):
        cost = QueryCost.of(heads, calibration, seen, reach=target.reach)
        queries, query_constant, missed = _queries(cost, target, dtype)
        cut, errors = replace(cut, q=queries.rows, q_down=queries.down), errors | missed
    weights = deepseek_state(cut, constant, state, scale=scale, query_constant=query_constant)
    stored, rounding = rounded(weights, dtype)
    errors |= {"rope_error": lost**0.5, "rounding": rounding}
    return DeepseekLayer(stored, cut.rope, errors)


def _queries(
    cost: QueryCost, target: Target, dtype: torch.dtype
) -> tuple[QueryProjection, Constant, dict[str, float]]:
    """Return low-rank queries, the constant channel that fixes their norm, and their error in scores.

    If the target has no ``q_rank``, the queries keep their full rank and no error is reported.
    """
    row = constant_row(target.norm, cost.calibration.moment, dtype)
    if target.q_rank is None:
        queries = whole_queries(cost.heads)
    else:
        queries = low_rank(cost, target.q_rank - target.reserved, has_offset=bool(row[-1]))
    queries = queries.scaled(cost.calibration)
    constant = cost.beside(queries, Constant.of(row, len(queries.down) + target.reserved, dtype))
    return queries, constant, {} if target.q_rank is None else {"query_error": cost.missed(queries, constant)}


def check_target(target: Target, rope: Rope, *, heads: int, kv_heads: int, head_dim: int, width: int) -> None:
    """Raise an error if a layer with the given rope and sizes cannot be converted to ``target``.

    Raises: as :func:`gqa_to_deepseek`.
    """
    narrowed(rope, target.rope_dim)
    full_rank = 2 * kv_heads * head_dim - target.rope_dim + target.reserved
    if target.rank > full_rank:
        raise ValueError(
            f"rank: expected at most {full_rank}, the rank of the whole latent, got {target.rank}"
        )
    check_query_rank(target.q_rank, heads=heads, head_dim=head_dim, width=width, reserved=target.reserved)


def _cut(heads: Heads, whole: Latent, rank: int, losses: Losses) -> tuple[Latent, Constant, dict[str, float]]:
    """Truncate a latent to ``rank``; return it with its constant channel and its key and value errors.

    The errors include those of a plain SVD of the weights, as a baseline.
    """
    white = Attended.white(whole.down.shape[1], whole.down.device)
    plain = _sized_cut(
        losses.whole, rank, white.through(whole.down), Cost.plain(whole, heads, white), losses.seen
    )
    cut = _sized_cut(losses.whole, rank, losses.seen, losses.cost, losses.seen)
    constant, baseline = losses.beside(cut), losses.of(plain, losses.beside(plain))
    errors = losses.of(cut, constant) | {
        f"{BASELINE}{name}": baseline[name] for name in ("key_error", "value_error")
    }
    k_up, v_up = (up.repeat_interleave(heads.group, 0) for up in (cut.k_up, cut.v_up))
    return replace(whole, down=cut.down @ whole.down, k_up=k_up, v_up=v_up), constant, errors


def _sized_cut(latent: Latent, rank: int, of: Attended, cost: Cost, seen: Attended) -> Latent:
    """Truncate a latent, and scale it to a mean square near 1.

    The inputs ``of`` determine which directions are retained, and the inputs ``seen`` determine the scale.
    The scale is a power of two, so nothing is rounded.
    """
    if rank < len(latent.down):
        latent = truncate(latent, rank, of, cost)
    size = (latent.down @ seen.moment * latent.down).sum(-1).clamp(min=0).mean().sqrt()
    scale = size.log2().round().exp2() if size else size + 1.0
    return replace(latent, down=latent.down / scale, k_up=latent.k_up * scale, v_up=latent.v_up * scale)
