"""What the operators of the backends share: schemas, shapes of results, two small gradients, and registration."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ._flops import count

NUMBERS = "SymInt? left, SymInt? right, SymInt prefix, float scale, float? softcap"
EXTRAS = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? key_starts, Tensor? key_ends, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? dropout_seed"
)
LIMITS = "float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
FORWARD = f"(Tensor q, Tensor k, Tensor v, {EXTRAS}, {NUMBERS}, {LIMITS}) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, {EXTRAS}, {NUMBERS}, {LIMITS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output ``[..., s, h, e]`` in q's dtype and LSE ``[..., h, s]`` in fp32, or fp64 for fp64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, s, h, _ = q.shape
    return q.new_empty((*batch, s, h, v.shape[-1])), q.new_empty((*batch, h, s), dtype=wide)


def fake_backward(dout, dlse, out, lse, q, k, v, slopes, sinks, *extras):
    """Gradients of q, k, v, and of slopes and sinks, empty where there are none."""
    dslopes, dsinks = (lse.new_empty(0) if t is None else t.new_empty(t.shape) for t in (slopes, sinks))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dslopes, dsinks


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


def register(operators: Iterable[tuple[str, Callable, Callable, Callable | None]]) -> torch.library.Library | None:
    """Make operators, ``(schema, implementation, fake, FLOP formula)``, known to torch; keep what it returns.

    A second copy of the package in one process runs those of the first.
    """
    operators = list(operators)
    names = [schema.partition("(")[0] for schema, *_ in operators]
    if hasattr(torch.ops.attnlib, names[0]):
        for name, (schema, *_) in zip(names, operators, strict=True):
            known = str(getattr(torch.ops.attnlib, name).default._schema)
            if known != str(torch._C.parse_schema(f"attnlib::{schema}")):
                raise ImportError(f"attnlib: another version is loaded in this process, with the operator {known}")
        return None
    library = torch.library.Library("attnlib", "FRAGMENT")
    counted = []
    for name, (schema, run, fake, flops) in zip(names, operators, strict=True):
        library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, run, device)
        torch.library.register_fake(f"attnlib::{name}", fake, lib=library)
        if flops is not None:
            counted.append((getattr(torch.ops.attnlib, name), flops))
    count(counted)
    return library
