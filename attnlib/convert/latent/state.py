"""The state dict of DeepSeek-V3's attention from a latent whose norm passes beside a constant channel."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from .embedding import Latent
from .norm import Constant


def deepseek_state(
    latent: Latent, constant: Constant, state: Mapping[str, Tensor], *, scale: float
) -> dict[str, Tensor]:
    """The weights before they are rounded, with biases if the constant is one, from those of a grouped layer.

    ``scale`` is the grouped layer's, and goes into q.
    """
    dtype, o = state["q_proj.weight"].dtype, state["o_proj.weight"]
    q = torch.cat((latent.q_nope, latent.q_rope), 1)
    q = (q * (scale * q.shape[1] ** 0.5)).flatten(0, 1)
    up = torch.cat((latent.k_up, latent.v_up), 1).flatten(0, 1)
    down = torch.cat((latent.down, constant.size * constant.row[None], latent.k_rope))
    biased = constant.is_bias
    queries = _biased_queries(q, dtype) if biased and "q_proj.bias" in state else {"q_proj.weight": q[:, :-1]}
    new = queries | {
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_layernorm.weight": pad(torch.full_like(up[0], constant.gain), (0, 1)),
        "kv_b_proj.weight": pad(up * constant.rest, (0, 1)),
        "o_proj.weight": o,
    }
    if biased:
        new["kv_a_proj_with_mqa.bias"] = down[:, -1]
        new["o_proj.bias"] = state.get("o_proj.bias", torch.zeros_like(o[:, 0]))
    return new


def _biased_queries(q: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows ``[..., m + 1]`` of q as DeepSeek's two projections with a norm between: of the inputs, and a constant."""
    width = q.shape[-1]
    ones = torch.ones_like(q[0])
    constant = Constant.of(ones, width, dtype)
    seen = torch.tensor(width**0.5, dtype=dtype).item()  # what the norm makes of the constant
    return {
        "q_a_proj.weight": torch.diag(ones)[:, :-1],
        "q_a_proj.bias": pad(0 * ones[:-1], (0, 1), value=constant.size),
        "q_a_layernorm.weight": pad(constant.gain * ones[:-1], (0, 1), value=1.0),
        "q_b_proj.weight": torch.cat((q[:, :-1] * constant.rest, q[:, -1:] / seen), -1),
    }
