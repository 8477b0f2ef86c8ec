"""What the operators of the backends share: pieces of schemas, the shapes of outputs, and registration."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

NUMBERS = "SymInt? left, SymInt? right, SymInt prefix, float scale, float? softcap"
EXTRAS = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? key_starts, Tensor? key_ends, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? dropout_seed"
)
LIMITS = "float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k"


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output ``[..., s, h, e]`` in q's dtype and LSE ``[..., h, s]`` in fp32, or fp64 for fp64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=wide)


def register(operators: Iterable[tuple[str, Callable, Callable]]) -> torch.library.Library | None:
    """Make operators, ``(schema, implementation, fake)``, known to torch; keep what it returns.

    A second copy of the package in one process runs those of the first.
    """
    operators = list(operators)
    names = [schema.partition("(")[0] for schema, _, _ in operators]
    if hasattr(torch.ops.attnlib, names[0]):
        for name, (schema, _, _) in zip(names, operators, strict=True):
            known = str(getattr(torch.ops.attnlib, name).default._schema)
            if known != str(torch._C.parse_schema(f"attnlib::{schema}")):
                raise ImportError(f"attnlib: another version is loaded in this process, with the operator {known}")
        return None
    library = torch.library.Library("attnlib", "FRAGMENT")
    for name, (schema, run, fake) in zip(names, operators, strict=True):
        library.define(schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, run, device)
        torch.library.register_fake(f"attnlib::{name}", fake, lib=library)
    return library
