"""Gates that scale the output of attention by a projection of the layer's input."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from .internal.signatures import kind

Per = Literal["head", "channel"]
Activation = Literal["sigmoid", "softplus"]


@kind
@dataclass(frozen=True, slots=True)
class Gate:
    """A gate on the output of attention, before the output projection (Qiu et al., 2025, arXiv 2505.06708).

    With a gate, a layer returns ``o_proj(activation(g_proj(x)) * out)``. The gate has one factor for each
    head (Step 3.5), or one for each head and value channel (Qwen3-Next). ``bias`` is for ``g_proj``.

    Raises:
        ValueError: ``per`` or ``activation`` is unknown.
        TypeError: ``bias`` is not a bool.

    >>> layer = attnlib.GroupedQueryAttention(64, 4, mask=attnlib.CAUSAL, gate=Gate("head"))
    >>> layer.g_proj
    Linear(in_features=64, out_features=4, bias=False)
    """

    per: Per
    activation: Activation = "sigmoid"
    bias: bool = False

    def __post_init__(self) -> None:
        for name, known in (("per", get_args(Per)), ("activation", get_args(Activation))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"gate.{name}: expected one of {known}, got {value!r}")
        if not isinstance(self.bias, bool):
            raise TypeError(f"gate.bias: expected a bool, got {self.bias!r}")

    def rows(self, num_heads: int, v_head_dim: int) -> int:
        """Return the number of output features of ``g_proj``; they are in the order of the heads."""
        return num_heads * (v_head_dim if self.per == "channel" else 1)

    def apply(self, out: Tensor, logits: Tensor) -> Tensor:
        """Return ``out`` ``[..., h, e]`` times the gate of ``logits`` ``[..., h]`` or ``[..., h * e]``.

        The activation is computed in fp32, or in fp64 for fp64 logits, and rounded to the dtype of ``out``.

        Raises:
            ValueError: the logits are not those of ``h`` heads, because only one of q and g_proj is sharded.
        """
        heads, width = out.shape[-2:]
        if logits.shape[-1] != self.rows(heads, width):
            raise ValueError(
                f"g_proj: expected {self.rows(heads, width)} features for {heads} heads, got "
                f"{logits.shape[-1]}; shard it by heads like the projection of q"
            )
        logits = logits.unflatten(-1, (heads, -1))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return out * (wide.sigmoid() if self.activation == "sigmoid" else F.softplus(wide)).to(out.dtype)
