"""The Triton backend: kernels for GPUs from sm_80 on, or interpreted without one."""

import torch

from ...call import Call
from ...prepared import Run
from ...spec import AttentionSpec
from ..operators import NO_BACKWARD
from . import cached, dense
from .cached import cached_attention as cached_attention
from .dense import attention as attention
from .launch import against
from .schedule import new_schedule as new_schedule
from .schedule import update_schedule as update_schedule
from .tables import WIDEST, WIDEST_BACKWARD, WIDEST_VALUE
from .writes import cannot_store as cannot_store
from .writes import write_cache as write_cache


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    reasons = against(spec.dtype, spec.device, spec.arch, interpreted=spec.interpreted)
    if spec.kind == "cached" and spec.grad:
        return [*reasons, NO_BACKWARD]
    if spec.device == "cuda" and spec.arch < 89 and spec.layout and spec.layout.store == torch.float8_e4m3fn:
        reasons.append(f"reads fp8 caches from sm_89 on, got sm_{spec.arch}; store int8")
    largest, widest = max(spec.head_dim, spec.value_dim), WIDEST_BACKWARD if spec.grad else WIDEST
    if largest > widest:
        reasons.append(f"has {'a backward' if spec.grad else 'tiles'} for heads of up to {widest}, got {largest}")
    elif spec.value_dim > WIDEST_VALUE:
        reasons.append(f"has tiles for values of up to {WIDEST_VALUE} channels, got {spec.value_dim}")
    return reasons


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V."""
    return [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]


def prepare(call: Call) -> Run | None:
    """A quicker way to run this call again, on tensors of the same layouts."""
    return dense.prepare(call) if call.kv is None else cached.prepare(call)
