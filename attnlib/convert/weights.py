"""Weights of a grouped-query layer, split by heads for conversions, and joined into a state dict."""

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

    Shapes: q ``[h, d, m + 1]``, k and v ``[g, d, m + 1]``, o ``[m, h, d]``. The last column of q, k and v is
    the bias (0 if the layer has none); it is multiplied by the constant 1 at the end of a
    :class:`Calibration`'s inputs. Conversions do not use the bias of o. ``gains`` are the weights of q_norm
    ``[h, d]`` and k_norm ``[g, d]``; in most models all heads share one row. ``rope`` determines which
    channels are rotated, and in which pairs. ``gates`` are the rows of an output gate, ``[h, 1, m + 1]`` or
    ``[h, d, m + 1]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    rope: Rope | None
    gains: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None
    gates: Tensor | None = None

    @property
    def rotated(self) -> int:
        """The number of channels in each head that rope rotates; they come before the others."""
        return 0 if self.rope is None else self.rope.dim

    @property
    def group(self) -> int:
        """The number of query heads that share one KV head."""
        return len(self.q) // len(self.k)

    def pairs(self, rows: Tensor) -> Tensor:
        """Return the rotated channels of rows ``[..., d, m]`` as complex pairs ``[..., p / 2, m]``."""
        interleaved = self.rope is not None and self.rope.interleaved
        return pairs_of(rows[..., : self.rotated, :], interleaved=interleaved)


def pairs_of(rows: Tensor, *, interleaved: bool) -> Tensor:
    """Return channels ``[..., p, m]`` as complex ``[..., p / 2, m]``, paired as in :func:`attnlib.rotate`."""
    channels = "(pair part)" if interleaved else "(part pair)"
    return torch.complex(*rearrange(rows, f"... {channels} m -> part ... pair m", part=2))


def rows_of(pairs: Tensor, *, interleaved: bool) -> Tensor:
    """Return complex pairs ``[..., p / 2, m]`` as channels ``[..., p, m]``: the inverse of ``pairs_of``."""
    channels = "(pair part)" if interleaved else "(part pair)"
    return rearrange([pairs.real, pairs.imag], f"part ... pair m -> ... {channels} m")


def split(state: Mapping[str, Tensor], *, head_dim: int, rope: Rope | None) -> Heads:
    """Split a state dict of :class:`attnlib.GroupedQueryAttention` into heads, which are copies.

    Parameter names are those of transformers.

    Raises:
        ValueError: the weights do not belong to a grouped-query layer, or are not finite.
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"{name}: expected finite weights, got NaN or infinity")
    q, k, v = (_rows(state, name, head_dim) for name in PROJECTIONS[:3])
    o = state["o_proj.weight"].to(torch.float64, copy=True)
    if len(q) % len(k) or k.shape != v.shape or o.shape[-1] != len(q) * head_dim:
        shapes = ", ".join(f"{name} {tuple(state[f'{name}.weight'].shape)}" for name in PROJECTIONS)
        raise ValueError(f"state: expected projections of heads of {head_dim} channels, got {shapes}")
    gains, sinks, gates = None, state.get("sinks"), state.get("g_proj.weight")
    if "k_norm.weight" in state:
        gains = tuple(_gains(state[f"{name}_norm.weight"], rows) for name, rows in (("q", q), ("k", k)))
    sinks = None if sinks is None else sinks.to(torch.float64, copy=True)
    gates = None if gates is None else _rows(state, "g_proj", len(gates) // len(q))
    return Heads(q, k, v, rearrange(o, "m (h d) -> m h d", d=head_dim), rope, gains, sinks, gates)


def join(heads: Heads, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the projections, sinks and gates of ``heads``, in the dtypes of ``state``.

    A bias is included only if ``state`` has it.
    """
    changed = {"o_proj.weight": rearrange(heads.o, "m h d -> m (h d)")}
    projections = {"q_proj": heads.q, "k_proj": heads.k, "v_proj": heads.v, "g_proj": heads.gates}
    for name, rows in projections.items():
        if rows is None:
            continue
        changed[f"{name}.weight"] = rearrange(rows[..., :-1], "h d m -> (h d) m")
        if f"{name}.bias" in state:
            changed[f"{name}.bias"] = rearrange(rows[..., -1], "h d -> (h d)")
    if heads.gains is not None:
        for name, gains in zip(("q_norm.weight", "k_norm.weight"), heads.gains, strict=True):
            if state[name].numel() > gains.shape[1]:  # each head has its own norm weights
                changed[name] = gains if state[name].dim() == 2 else gains.flatten()
    if heads.sinks is not None:
        changed["sinks"] = heads.sinks
    return {
        name: changed[name].to(value.dtype) if name in changed else value for name, value in state.items()
    }


def _gains(weight: Tensor, rows: Tensor) -> Tensor:
    """Return norm weights as ``[h, d]``, from ``[d]`` (shared by all heads), ``[h * d]`` or ``[h, d]``."""
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
