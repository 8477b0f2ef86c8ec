"""The weights of a grouped-query layer head by head, as conversions compute with them, from and to its state
dict.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..rope.rope import Rope

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Projections of ``h`` query heads and ``g`` KV heads, fp64; query head i reads KV head ``i // (h / g)``.

    q ``[h, d, m + 1]``, k and v ``[g, d, m + 1]``: the last column is the bias (0 without), which the
    constant one of a :class:`Calibration` meets. o ``[m, h, d]``; its bias is nobody's business here.
    ``gains`` are those of q_norm ``[h, d]`` and of k_norm ``[g, d]``, the same row for all heads of most
    models. ``rope`` says which channels are rotated, and in which pairs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    rope: Rope | None
    gains: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None

    @property
    def rotated(self) -> int:
        """How many of the first channels of a head rope rotates."""
        return 0 if self.rope is None else self.rope.dim

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return len(self.q) // len(self.k)

    def pairs(self, rows: Tensor) -> Tensor:
        """Rotated channels of ``[..., d, m]`` as complex ``[..., p / 2, m]``: rope multiplies by a phase."""
        interleaved = self.rope is not None and self.rope.interleaved
        return pairs_of(rows[..., : self.rotated, :], interleaved=interleaved)


def pairs_of(rows: Tensor, *, interleaved: bool) -> Tensor:
    """Channels ``[..., p, m]`` as complex numbers ``[..., p / 2, m]``, paired as :func:`attnlib.rotate`
    does.
    """
    channels = "(pair part)" if interleaved else "(part pair)"
    return torch.complex(*rearrange(rows, f"... {channels} m -> part ... pair m", part=2))


def rows_of(pairs: Tensor, *, interleaved: bool) -> Tensor:
    """The inverse of :func:`pairs_of`."""
    channels = "(pair part)" if interleaved else "(part pair)"
    return rearrange([pairs.real, pairs.imag], f"part ... pair m -> ... {channels} m")


def split(state: Mapping[str, Tensor], *, head_dim: int, rope: Rope | None) -> Heads:
    """The heads in a state dict of :class:`attnlib.GroupedQueryAttention`, the names of transformers; all are
    copies.

    Raises:
        ValueError: weights that no grouped-query layer has, or that are not finite.
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"{name}: expected finite weights, got NaN or infinity")
    q, k, v = (_rows(state, name, head_dim) for name in PROJECTIONS[:3])
    o = state["o_proj.weight"].to(torch.float64, copy=True)
    if len(q) % len(k) or k.shape != v.shape or o.shape[-1] != len(q) * head_dim:
        shapes = ", ".join(f"{name} {tuple(state[f'{name}.weight'].shape)}" for name in PROJECTIONS)
        raise ValueError(f"state: expected projections of heads of {head_dim} channels, got {shapes}")
    gains, sinks = None, state.get("sinks")
    if "k_norm.weight" in state:
        gains = tuple(_gains(state[f"{name}_norm.weight"], rows) for name, rows in (("q", q), ("k", k)))
    sinks = None if sinks is None else sinks.to(torch.float64, copy=True)
    return Heads(q, k, v, rearrange(o, "m (h d) -> m h d", d=head_dim), rope, gains, sinks)


def join(heads: Heads, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with the projections and sinks of ``heads``, in the dtypes and with the biases that it
    has.
    """
    changed = {"o_proj.weight": rearrange(heads.o, "m h d -> m (h d)")}
    for name, rows in (("q_proj", heads.q), ("k_proj", heads.k), ("v_proj", heads.v)):
        changed[f"{name}.weight"] = rearrange(rows[..., :-1], "h d m -> (h d) m")
        if f"{name}.bias" in state:
            changed[f"{name}.bias"] = rearrange(rows[..., -1], "h d -> (h d)")
    if heads.gains is not None:
        for name, gains in zip(("q_norm.weight", "k_norm.weight"), heads.gains, strict=True):
            if state[name].numel() > gains.shape[1]:  # those of each head, not one row for all
                changed[name] = gains if state[name].dim() == 2 else gains.flatten()
    if heads.sinks is not None:
        changed["sinks"] = heads.sinks
    return {
        name: changed[name].to(value.dtype) if name in changed else value for name, value in state.items()
    }


def _gains(weight: Tensor, rows: Tensor) -> Tensor:
    """The gains of a norm of each head, of all heads as of one vector, or of each head with its own: ``[h,
    d]``.
    """
    return weight.to(torch.float64, copy=True).reshape(-1, rows.shape[1]).expand(rows.shape[:2])


def _rows(state: Mapping[str, Tensor], name: str, head_dim: int) -> Tensor:
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    if weight.dim() != 2 or weight.shape[0] % head_dim:
        raise ValueError(
            f"{name}.weight: expected rows of heads of {head_dim} channels, got {tuple(weight.shape)}"
        )
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    rows = torch.cat((weight, bias[:, None]), -1).double()
    return rearrange(rows, "(h d) m -> h d m", d=head_dim)
