"""A grouped-query layer in the form that DeepSeek-V3's own loaders read: a plain rope, and a norm of eps
1e-6.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

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
    """What a token stores, ``rank + rope_dim`` values, and how they are found.

    DeepSeek normalises the latent and a grouped-query layer does not. So one of the ``rank`` channels is a
    constant so large that the norm divides by nearly nothing else. With ``norm="exact"`` it is a bias
    (``attention_bias=True``). ``"calibrated"`` needs none: it is the linear function of the inputs that is
    nearest to a constant over the calibration, and the latent of a token is off by as much as that. ``reach``
    is as in :func:`fold`. Queries go through ``q_rank`` channels, DeepSeek's q_lora_rank, one of which is
    such a constant too; None leaves them whole.

    Raises:
        TypeError: a number is no int.
        ValueError: a number is too small, or an unknown norm.
    """

    rank: int
    rope_dim: int = 64
    reach: int = 2048
    norm: Norm = "exact"
    q_rank: int | None = None

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm: expected one of {get_args(Norm)}, got {self.norm!r}")
        check_count("rank", self.rank, least=1 + self.reserved)
        check_count("rope_dim", self.rope_dim, least=2)
        check_count("reach", self.reach, least=1)

    @property
    def reserved(self) -> int:
        """Channels of a latent that hold nothing of keys, values or queries: the constant."""
        return 1


@dataclass(frozen=True, slots=True, eq=False)
class DeepseekLayer:
    """A state dict of DeepSeek-V3's attention, its interleaved rope, and what was lost.

    ``errors`` are root mean squares relative to what there was, under the calibration: ``key_error`` and
    ``value_error`` of the truncation and the norm, what :class:`Cost` says of them, a token weighed by its
    attention; ``svd_key_error`` and ``svd_value_error``, the same of the plain SVD of the weights at the same
    rank, which is not what the layer has; ``query_error`` of queries of low rank, if they were asked for, see
    :class:`QueryCost`; ``rope_error`` of rotated keys, see :func:`fold`; ``norm_error`` of latents, what the
    norm changes; and ``rounding``, the greatest of a weight to its dtype. With ``norm="calibrated"`` those of
    keys, values, queries and latents are measured on :meth:`Calibration.inputs`, and NaN where there are
    none.
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
    """As :func:`gqa_to_mla`, a new layer whose state dict a DeepSeek-V3 checkpoint can hold as it is.

    Its rope is ``narrowed(layer.rope, rope_dim)``, with the old layer's ``theta`` and scaling, its norm_eps
    1e-6 and its scale the default. ``norm`` is explained at ``Target``; with ``"exact"`` leave the norms'
    gains and the biases out of a weight decay. ``q_rank`` is q_lora_rank; without it there is none, but that
    a bias of q makes it ``hidden_size + 1``.

    Raises:
        ValueError: a size out of range, ``rope_dim`` does not divide the rotated channels, or an unknown
        norm; or
            ``norm="calibrated"`` without a text, or with one whose inputs have the mean 0.
        TypeError: as :func:`mha_to_gqa`, or a size that is no int. NotImplementedError: what DeepSeek has
        not: no rope at all, scalings that ``narrowed`` refuses, norms of q
            and k, sinks, softcap, ALiBi; and biases with ``norm="calibrated"``.

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
    """The weights that :func:`gqa_to_deepseek` gives its layer, from a grouped layer's ``state`` and its
    heads.

    dtypes are those of ``state``; ``scale`` is the old layer's, and goes into q.

    Raises: as :func:`gqa_to_deepseek`, of what can be seen from weights.
    """
    check_latent_heads(heads)
    if heads.rope is None:
        raise NotImplementedError("rope: expected one, as DeepSeek has, got none; convert with gqa_to_mla")
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
    """Queries of the rank that is asked for, or as they are; the constant beside their channels, and what is
    missed.
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
    """Refuse what no layer of these sizes can become, whatever its weights.

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
    """The latent of this rank, its constant, and what is lost of K and V; what plain SVD would lose is found
    alike.
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
    made = replace(whole, down=cut.down @ whole.down, k_up=k_up, v_up=v_up)
    return made, constant, errors


def _sized_cut(latent: Latent, rank: int, of: Attended, cost: Cost, seen: Attended) -> Latent:
    """Cut by its cost to those of ``of``, and scaled: channels have mean square 1 on the mean, up to a power
    of two.
    """
    if rank < len(latent.down):
        latent = truncate(latent, rank, of, cost)
    size = (latent.down @ seen.moment * latent.down).sum(-1).clamp(min=0).mean().sqrt()
    by = size.log2().round().exp2() if size else size + 1.0  # which loses no bit
    return replace(latent, down=latent.down / by, k_up=latent.k_up * by, v_up=latent.v_up * by)
