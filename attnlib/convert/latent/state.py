"""The state dict of a DeepSeek-V3 layer in which a constant channel neutralises the latent norm."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .embedding import Latent
from .norm import Constant


def deepseek_state(
    latent: Latent,
    constant: Constant,
    state: Mapping[str, Tensor],
    *,
    scale: float,
    query_constant: Constant | None = None,
) -> dict[str, Tensor]:
    """Return a DeepSeek-V3 layer's weights before rounding, made from ``latent`` and the old ``state``.

    The result has biases if the ``constant`` channel is a bias. ``scale`` is the old layer's softmax scale;
    its ratio to DeepSeek's default is folded into q. ``query_constant`` is the constant channel that
    neutralises the norm of low-rank queries.
    """
    o = state["o_proj.weight"]
    q = torch.cat((latent.q_nope, latent.q_rope), 1)
    q = (q * (scale * q.shape[1] ** 0.5 / latent.rope.latent_scale)).flatten(0, 1)
    up = torch.cat((latent.k_up, latent.v_up), 1).flatten(0, 1)
    down = torch.cat((latent.down, constant.size * constant.row[None], latent.k_rope))
    new = {"q_proj.weight": q[:, :-1]}
    if query_constant is not None:
        new = _low_rank(q, latent.q_down, query_constant, state["q_proj.weight"].dtype)
    new |= {
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_layernorm.weight": pad(torch.full_like(up[0], constant.norm_weight), (0, 1)),
        "kv_b_proj.weight": pad(up * constant.weight_scale, (0, 1)),
        "o_proj.weight": o,
    }
    if constant.is_bias:
        new["kv_a_proj_with_mqa.bias"] = down[:, -1]
        new["o_proj.bias"] = state.get("o_proj.bias", torch.zeros_like(o[:, 0]))
    return new


def _low_rank(q: Tensor, down: Tensor, constant: Constant, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of low-rank queries, including their norm.

    ``down`` ``[k, m]`` maps inputs to k channels, and ``q`` ``[..., k + 1]`` maps these to queries. The last
    column of ``q`` is a bias: its input is the constant channel, which is a fixed number after the norm.
    """
    seen = torch.tensor(constant.width**0.5, dtype=dtype).item()
    new = {
        "q_a_proj.weight": torch.cat((down, constant.size * constant.row[None, :-1])),
        "q_a_layernorm.weight": pad(torch.full_like(down[:, 0], constant.norm_weight), (0, 1), value=1.0),
        "q_b_proj.weight": torch.cat((q[:, :-1] * constant.weight_scale, q[:, -1:] / seen), -1),
    }
    if constant.is_bias:
        new["q_a_proj.bias"] = pad(torch.zeros_like(down[:, 0]), (0, 1), value=constant.size)
    return new
