"""A grouped-query layer in the form that DeepSeek-V3's own loaders read: a plain rope, and a norm of eps 1e-6."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm

from ...checks import check_count
from ...kv import DTYPES
from ...layers import GroupedQueryAttention, MultiHeadLatentAttention
from ...rope import Rope
from ..calibration import Calibration, fitting
from ..weights import Heads, split
from .embedding import Latent
from .folding import check_fold, even_queries, fold
from .layers import check_latent, check_latent_heads, latent_layer
from .truncation import truncate

Norm = Literal["exact", "calibrated"]
BASELINE = "svd_"  # begins the names of errors that are not the layer's own
NORM_EPS = 1e-6  # of a latent, whatever config.json says of the other norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a token stores, ``rank + rope_dim`` values, and how they are found.

    DeepSeek normalises the latent and a grouped-query layer does not. ``norm="exact"`` gives one of the ``rank``
    channels to a constant so large that the norm divides by nearly nothing else; it needs biases
    (``attention_bias=True``). ``"calibrated"`` needs none: latents have mean square 1 over the calibration, so that the
    norm is the identity on the mean, and a token is off by how far the size of its own latent is from that. ``reach``
    is as in :func:`fold`.

    Raises:
        TypeError: a number is no int.
        ValueError: a number is too small, or an unknown norm.
    """

    rank: int
    rope_dim: int = 64
    reach: int = 2048
    norm: Norm = "exact"

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm: expected one of {get_args(Norm)}, got {self.norm!r}")
        check_count("rank", self.rank, least=1 + self.reserved)
        check_count("rope_dim", self.rope_dim, least=2)
        check_count("reach", self.reach, least=1)

    @property
    def reserved(self) -> int:
        """Channels of the latent that hold nothing of the input."""
        return 1 if self.norm == "exact" else 0


@dataclass(frozen=True, slots=True, eq=False)
class DeepseekLayer:
    """A state dict of DeepSeek-V3's attention, its interleaved rope, and what was lost.

    ``errors`` are root mean squares relative to what there was, under the calibration: ``key_error`` and
    ``value_error`` of the truncation and the norm, over whole keys as even queries see them and over values;
    ``svd_key_error`` and ``svd_value_error``, the same of the plain SVD of the weights at the same rank, which is not
    what the layer has; ``rope_error`` of rotated keys, see :func:`fold`; ``norm_error`` of latents, what the norm
    changes; and ``rounding``, the greatest of a weight to its dtype. With ``norm="calibrated"`` those of keys, values
    and latents are measured on :meth:`Calibration.inputs`, and NaN where there are none.
    """

    state: Mapping[str, Tensor]
    rope: Rope
    errors: Mapping[str, float]


def gqa_to_deepseek(
    layer: GroupedQueryAttention,
    rank: int,
    *,
    rope_dim: int = 64,
    calibration: Calibration | None = None,
    reach: int = 2048,
    norm: Norm = "exact",
) -> MultiHeadLatentAttention:
    """As :func:`gqa_to_mla`, a new layer whose state dict a DeepSeek-V3 checkpoint can hold as it is.

    Its rope is ``Rope(rope_dim, theta, scaling, interleaved=True)`` with the old layer's ``theta`` and scaling, its
    norm_eps 1e-6 and its scale the default. ``norm`` is explained at ``Target``; with ``"exact"`` leave the norms'
    gains and the biases out of a weight decay. A bias of q makes q_lora_rank ``hidden_size + 1``.

    Raises:
        ValueError: a size out of range, ``rope_dim`` does not divide the rotated channels, or an unknown norm.
        TypeError: as :func:`mha_to_gqa`, or a size that is no int.
        NotImplementedError: what DeepSeek has not: no rope at all, scalings other than Linear and Llama3, norms of q
            and k, sinks, softcap, ALiBi; and biases with ``norm="calibrated"``.

    >>> layer = GroupedQueryAttention(64, 8, num_kv_heads=1, mask=CAUSAL, rope=Rope(8))
    >>> x = torch.randn(1, 9, 64)
    >>> torch.testing.assert_close(gqa_to_deepseek(layer, 8 + 1, rope_dim=8)(x), layer(x))
    """
    check_latent(layer)
    target = Target(rank=rank, rope_dim=rope_dim, reach=reach, norm=norm)
    with torch.no_grad():
        state = layer.state_dict()
        heads = split(state, head_dim=layer.head_dim, rope=layer.rope)
        made = to_deepseek(heads, state, target, scale=layer.scale, calibration=calibration)
        return latent_layer(layer, made.state, rope=made.rope, norm_eps=NORM_EPS, scale=None)


def to_deepseek(
    heads: Heads, state: Mapping[str, Tensor], target: Target, *, scale: float, calibration: Calibration | None
) -> DeepseekLayer:
    """The weights that :func:`gqa_to_deepseek` gives its layer, from a grouped layer's ``state`` and its heads.

    dtypes are those of ``state``; ``scale`` is the old layer's, and goes into q.

    Raises: as :func:`gqa_to_deepseek`, of what can be seen from weights.
    """
    check_latent_heads(heads)
    if heads.rope is None:
        raise NotImplementedError("rope: expected one, as DeepSeek has, got none; convert with gqa_to_mla")
    if (dtype := state["q_proj.weight"].dtype) not in DTYPES:
        raise TypeError(f"q_proj.weight: expected fp16, bf16, fp32 or fp64, got {dtype}; cast the weights first")
    check_target(target, heads.rope, kv_heads=len(heads.k), head_dim=heads.k.shape[1])
    check_biases(target.norm, state)
    calibration = fitting(calibration, heads.k.shape[-1] - 1, heads.k.device)
    heads = even_queries(heads, calibration)
    whole, lost = fold(heads, target.rope_dim, calibration, reach=target.reach)
    cut, errors = _truncate(whole, heads.group, target, calibration)
    weights = _weights(cut, state, target, scale)
    stored = {name: value.to(dtype, copy=True) for name, value in weights.items()}
    rounding = max(_relative((value - stored[name]).norm(), value.norm()) for name, value in weights.items())
    errors |= {"rope_error": lost**0.5, "rounding": rounding}
    return DeepseekLayer(stored, cut.rope, errors)


def check_target(target: Target, rope: Rope, *, kv_heads: int, head_dim: int) -> None:
    """Refuse what no layer of these sizes can become, whatever its weights.

    Raises: as :func:`gqa_to_deepseek`.
    """
    check_fold(rope, target.rope_dim)
    full_rank = 2 * kv_heads * head_dim - target.rope_dim + target.reserved
    if target.rank > full_rank:
        raise ValueError(f"rank: expected at most {full_rank}, the rank of the whole latent, got {target.rank}")


def check_biases(norm: Norm, state: Mapping[str, Tensor]) -> None:
    """Refuse biases in ``state`` that are not 0 and have no place beside this norm.

    Raises: as :func:`gqa_to_deepseek`.
    """
    biases = sorted(name for name, value in state.items() if name.endswith("bias") and value.double().any())
    if biases and norm == "calibrated":
        raise NotImplementedError(f'{", ".join(biases)}: norm="calibrated" has no place for a bias; use norm="exact"')


def _truncate(whole: Latent, group: int, target: Target, calibration: Calibration) -> tuple[Latent, dict[str, float]]:
    """The latent of the channels that the target has room for, sized for its norm, and what is lost of K and V.

    What plain SVD loses is found alike. All that needs moments only is done in the latent's own coordinates, whose
    moments are much smaller than those of the inputs.
    """
    eye = torch.eye(len(whole.down), dtype=whole.down.dtype, device=whole.down.device)
    inner = replace(whole, down=eye, k_up=whole.k_up[::group], v_up=whole.v_up[::group])  # the same for a whole group
    text = Calibration(calibration.tokens, whole.down @ calibration.moment @ whole.down.T)
    white = Calibration(0, whole.down @ whole.down.T)
    turned = {"": calibration.energy(whole.k_rope), BASELINE: whole.k_rope.square().sum()}
    rank, found = target.rank - target.reserved, {"norm_error": 0.0}
    for name, moments in ((BASELINE, white), ("", text)) if calibration.tokens else (("", text),):
        keys, values = (moments.energy(up).sum() for up in (inner.k_up, inner.v_up))
        keys = keys + turned[name]
        cut = inner
        if rank < len(eye):
            cut = truncate(inner, rank, moments, balance=(values / keys).item() if keys and values else 1.0)
        made = _sized(replace(cut, down=cut.down @ whole.down), target.norm, calibration)
        if target.norm == "exact":
            lost = _errors(inner, cut, text, turned[""])
        else:
            lost, found["norm_error"] = _errors_with_norm(replace(inner, down=whole.down), made, calibration.inputs())
        found |= {f"{name}{kind}": error for kind, error in lost.items()}
    if not calibration.tokens:  # plain SVD it was
        found |= {f"{BASELINE}{kind}": error for kind, error in lost.items()}
    ups = (up.repeat_interleave(group, 0) for up in (made.k_up, made.v_up))
    return Latent(whole.q_nope, whole.q_rope, made.down, whole.k_rope, *ups, whole.rope), found


def _errors(exact: Latent, other: Latent, calibration: Calibration, turned: Tensor) -> dict[str, float]:
    """What ``other`` misses of K and V, relative to these, where nothing but moments matters: without a norm."""
    found = {}
    for part, up, other_up in (("key", exact.k_up, other.k_up), ("value", exact.v_up, other.v_up)):
        size = calibration.energy(up).sum() + (turned if part == "key" else 0)
        lost = calibration.energy(up - other_up @ other.down).sum()
        found[f"{part}_error"] = _relative(lost.clamp(min=0).sqrt(), size.sqrt())
    return found


def _errors_with_norm(exact: Latent, other: Latent, y: Tensor | None) -> tuple[dict[str, float], float]:
    """The same of inputs y ``[n, m + 1]`` and an ``other`` whose latents pass a norm, and what that norm changes.

    How much depends on the size of every single latent: none of it follows from moments. NaN without inputs.
    """
    if y is None:
        return dict.fromkeys(("key_error", "value_error"), math.nan), math.nan
    whole, latents = y @ exact.down.T, y @ other.down.T
    normed = rms_norm(latents, latents.shape[-1:], eps=NORM_EPS)
    turned, found = (y @ exact.k_rope.T).square().sum(), {}
    for part, up, other_up in (("key", exact.k_up, other.k_up), ("value", exact.v_up, other.v_up)):
        wanted = whole @ up.flatten(0, 1).T
        size = wanted.square().sum() + (turned if part == "key" else 0)
        found[f"{part}_error"] = _relative((wanted - normed @ other_up.flatten(0, 1).T).norm(), size.sqrt())
    return found, _relative((normed - latents).norm(), latents.norm())


def _relative(lost: Tensor, whole: Tensor) -> float:
    return float(lost / whole) if whole else 0.0


def _sized(latent: Latent, norm: Norm, calibration: Calibration) -> Latent:
    """The same latent with channels of mean square 1 on the mean.

    A norm sees the size of a latent, which is steadiest where many channels make it: ``"calibrated"`` channels get the
    square roots of their sizes. All of one size would be best for a normal distribution, but channels that are small
    on the mean are large on few tokens.
    """
    size = calibration.energy(latent.down[:, None]).clamp(min=0).sqrt()
    if not size.any():
        return latent
    if norm == "exact":
        by = size.square().mean().sqrt().log2().round().exp2().expand_as(size)  # which loses no bit
    else:
        by = size.clamp(min=1e-6 * size.max()).sqrt()
        by = by * (size / by).square().mean().sqrt()
    return replace(latent, down=latent.down / by[:, None], k_up=latent.k_up * by, v_up=latent.v_up * by)


def _weights(latent: Latent, state: Mapping[str, Tensor], target: Target, scale: float) -> dict[str, Tensor]:
    """The state dict before it is rounded."""
    dtype, o = state["q_proj.weight"].dtype, state["o_proj.weight"]
    q = torch.cat((latent.q_nope, latent.q_rope), 1)
    q = (q * (scale * q.shape[1] ** 0.5)).flatten(0, 1)
    up = torch.cat((latent.k_up, latent.v_up), 1).flatten(0, 1)
    if target.norm == "calibrated":
        return {
            "q_proj.weight": q[:, :-1],
            "kv_a_proj_with_mqa.weight": torch.cat((latent.down, latent.k_rope))[:, :-1],
            "kv_a_layernorm.weight": torch.ones_like(up[0]),
            "kv_b_proj.weight": up,
            "o_proj.weight": o,
        }
    constant, gain, rest = _identity(target.rank, dtype)
    row = pad(torch.zeros_like(latent.down[:1, :-1]), (0, 1), value=constant)
    down = torch.cat((latent.down, row, latent.k_rope))
    queries = _biased_queries(q, dtype) if "q_proj.bias" in state else {"q_proj.weight": q[:, :-1]}
    return queries | {
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_proj_with_mqa.bias": down[:, -1],
        "kv_a_layernorm.weight": pad(torch.full_like(up[0], gain), (0, 1)),
        "kv_b_proj.weight": pad(up * rest, (0, 1)),
        "o_proj.weight": o,
        "o_proj.bias": state.get("o_proj.bias", torch.zeros_like(o[:, 0])),
    }


def _biased_queries(q: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows ``[..., m + 1]`` of q as DeepSeek's two projections with a norm between: of the inputs, and a constant."""
    constant, gain, rest = _identity(q.shape[-1], dtype)
    seen = torch.tensor(q.shape[-1] ** 0.5, dtype=dtype).item()  # what the norm makes of the constant
    ones = torch.ones_like(q[0])
    return {
        "q_a_proj.weight": torch.diag(ones)[:, :-1],
        "q_a_proj.bias": pad(0 * ones[:-1], (0, 1), value=constant),
        "q_a_layernorm.weight": pad(gain * ones[:-1], (0, 1), value=1.0),
        "q_b_proj.weight": torch.cat((q[:, :-1] * rest, q[:, -1:] / seen), -1),
    }


def _identity(width: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """A constant channel, a gain and a factor that together undo an RMSNorm over ``width`` channels x.

    It divides by ``sqrt((constant^2 + |x|^2) / width)``, which is off by ``|x|^2 / (2 * constant^2)``, relatively: for
    a mean square of 1 over 512 channels 2 ** -32, in fp16 2 ** -20. Constant and gain are powers of two, and lose
    nothing in any dtype; the factor, between 0.7 and 1.5, belongs to the weights behind the norm.
    """
    constant = 2.0 ** (14 if dtype == torch.float16 else 20)  # fp16 also has to hold x / gain
    divisor = constant / width**0.5
    gain = 2.0 ** round(math.log2(divisor))
    return constant, gain, divisor / gain
