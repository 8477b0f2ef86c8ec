"""The operators of the backends: what they take and give.

torch's dispatcher wants one flat list. Its order is written here alone: everybody else names the fields.
"""

from types import MappingProxyType
from typing import NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from ..call import Call, Packing, Score
from ..mask import Mask

TYPES = MappingProxyType({Tensor: "Tensor", int: "SymInt", float: "float"})


class Arguments(NamedTuple):
    """What a forward operator takes, in the order of its schema; the tensors come first."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_starts: Tensor | None
    key_ends: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout_seed: Tensor | None
    origin: Tensor | None
    left: int | None
    right: int | None
    prefix: int
    scale: float
    softcap: float | None
    dropout_p: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def mask(self) -> Mask:
        """Which keys are visible."""
        return Mask(self.left, self.right, self.prefix)

    @property
    def score(self) -> Score:
        """How a visible pair's score comes from q·k."""
        return Score(self.scale, self.softcap, self.alibi_slopes, self.sinks)

    @property
    def packing(self) -> Packing:
        """Where the sequences of a packed call begin; keys where queries do, if nothing else is said."""
        cu_k = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        return Packing(self.cu_seqlens_q, cu_k, self.max_seqlen_q, self.max_seqlen_k)


class CachedArguments(NamedTuple):
    """What an operator over a cache takes. A latent's value plane and scale are its key's: None here."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    k_tail: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor | None
    schedule: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    origin: Tensor | None
    left: int | None
    right: int | None
    prefix: int
    scale: float
    softcap: float | None
    split_size: int

    @property
    def mask(self) -> Mask:
        """Which keys are visible."""
        return Mask(self.left, self.right, self.prefix)

    @property
    def score(self) -> Score:
        """How a visible pair's score comes from q·k."""
        return Score(self.scale, self.softcap, self.alibi_slopes, self.sinks)

    @property
    def value_plane(self) -> Tensor:
        """The plane that values are read from."""
        return self.k if self.v is None else self.v


def flat(call: Call) -> Arguments:
    """A checked call on tensors as operators take it, in tensors whose channels lie side by side."""
    q, k, v, mask, score, packing, dropout = call.q, call.k, call.v, call.mask, call.score, call.packing, call.dropout
    if call.spec.strided:
        q, k, v = (x.contiguous() if name in call.spec.strided else x for name, x in zip("qkv", (q, k, v), strict=True))
    cu_q, cu_k, max_q, max_k = (None,) * 4 if packing is None else packing
    origin = call.origin.table(call.sequences, q.device)
    return Arguments(
        q, k, v, score.alibi_slopes, score.sinks, call.key_starts, call.key_ends, cu_q, cu_k, dropout.seed, origin,
        mask.left, mask.right, mask.prefix, score.scale, score.softcap, dropout.p, max_q, max_k,
    )  # fmt: skip


def flat_over_view(call: Call, schedule: Tensor | None = None) -> CachedArguments:
    """A checked call over a view as operators take it."""
    kv, mask, score = call.kv, call.mask, call.score
    q = call.q.contiguous() if call.spec.strided else call.q
    v, v_scale = (None, None) if kv.layout.is_latent else (kv.v, kv.v_scale)
    return CachedArguments(
        q, kv.k, v, kv.k_tail, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q, schedule,
        score.alibi_slopes, score.sinks, call.origin.table(call.sequences, q.device),
        mask.left, mask.right, mask.prefix, score.scale, score.softcap, kv.split_size,
    )  # fmt: skip


def _typed(fields: type[NamedTuple]) -> str:
    """The fields as a schema declares them."""
    hints = get_type_hints(fields)
    return ", ".join(f"{_type(hints[name])} {name}" for name in fields._fields)


def _type(hint: type) -> str:
    optional = get_args(hint)
    return f"{TYPES[optional[0]]}?" if optional else TYPES[hint]


FORWARD = f"({_typed(Arguments)}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_typed(Arguments)}) -> ({', '.join(['Tensor'] * 5)})"
CACHED = f"({_typed(CachedArguments)}) -> (Tensor, Tensor)"


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output ``[..., s, h, e]`` in q's dtype and LSE ``[..., h, s]`` in fp32, or fp64 for fp64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, s, h, _ = q.shape
    return q.new_empty((*batch, s, h, v.shape[-1])), q.new_empty((*batch, h, s), dtype=wide)


def fake_forward(*arguments) -> tuple[Tensor, Tensor]:
    """What a forward gives, without values."""
    a = Arguments(*arguments)
    return outputs(a.q, a.v)


def fake_backward(dout, dlse, out, lse, *arguments) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, and of slopes and sinks, empty where there are none, without values."""
    a = Arguments(*arguments)
    dslopes, dsinks = (lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in (a.alibi_slopes, a.sinks))
    return a.q.new_empty(a.q.shape), a.k.new_empty(a.k.shape), a.v.new_empty(a.v.shape), dslopes, dsinks


def fake_cached(*arguments) -> tuple[Tensor, Tensor]:
    """What attention over a cache gives, without values."""
    a = CachedArguments(*arguments)
    return outputs(a.q, a.value_plane)


def slopes_grad(slopes: Tensor | None, per_sequence: Tensor) -> Tensor:
    """The gradient in the slopes' own shape; empty where there are none."""
    if slopes is None:
        return per_sequence.new_empty(0)
    return (per_sequence.sum(0) if slopes.dim() == 1 else per_sequence).to(slopes.dtype)


def sinks_grad(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key whose value is zero, so its gradient is its probability times ``0 - delta``."""
    if sinks is None:
        return lse.new_empty(0)
    grad = torch.where(lse.isinf(), 0, -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta)
    return grad.transpose(0, -2).flatten(1).sum(1).to(sinks.dtype)


def option_grads(a: Arguments, dslopes: Tensor | None, lse: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of the slopes and the sinks in their own shapes; empty where there are none.

    ``dslopes`` is per sequence, ``[b, h]``, and ``delta`` is ``rowsum(out * dout) - dlse`` like the LSE; each may be
    None where there is no option to need it.
    """
    slopes = lse.new_empty(0) if a.alibi_slopes is None else slopes_grad(a.alibi_slopes, dslopes)
    return slopes, sinks_grad(a.sinks, lse, delta)
