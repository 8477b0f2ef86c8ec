"""The Triton backend: kernels for GPUs from sm_80 on, which also run in Triton's interpreter."""

import torch
from torch import Tensor

from ...call.cache import Run
from ...call.call import Call, PieceGradients
from ...call.spec import AttentionSpec
from ...call.statistic import Statistic
from ...fp8 import E4M3
from ...internal import watched
from .decode.operators import Cached
from .decode.peers import peer_memory
from .decode.schedule import new_schedule, update_schedule
from .decode.writes import cannot_store, write_cache, write_index
from .dense import selected
from .dense.index_scores import against_index_scores as against_index_scores
from .dense.index_scores import can_pool as can_pool
from .dense.index_scores import index_scores as index_scores
from .dense.operators import Dense
from .dense.statistics import Statistics
from .dense.tables import WIDE, WIDEST, WIDEST_VALUE
from .launching import launch
from .launching.launch import against


class TritonBackend:
    """A backend of Triton kernels whose operators are registered under ``name``; see ``dispatch.Backend``.

    With ``hopper``, calls on Hopper may use the dedicated Hopper kernels.
    """

    cannot_store = staticmethod(cannot_store)
    write_cache, write_index = staticmethod(write_cache), staticmethod(write_index)
    new_schedule, update_schedule = staticmethod(new_schedule), staticmethod(update_schedule)
    peer_memory = staticmethod(peer_memory)

    def __init__(self, name: str, *, hopper: bool):
        self.dense, self.cached = Dense(name, hopper=hopper), Cached(name, hopper=hopper)
        self.statistics = Statistics(name)

    def unsupported(self, spec: AttentionSpec) -> list[str]:
        """Return the reasons why this backend cannot run ``spec``."""
        layout = spec.layout
        # The GPU must support the dtype in which the kernels multiply matrices.
        dtype = layout.dtype if layout is not None and layout.rope_dim else spec.dtype
        reasons = against(dtype, spec.device, spec.arch, interpreted=spec.interpreted)
        if spec.without_backward:
            return [*reasons, *spec.without_backward]
        if spec.selected is not None:
            reasons += selected.unsupported(spec)
        if spec.device == "cuda" and spec.arch < 89:
            if layout is not None and layout.storage_dtype == E4M3:
                reasons.append(f"reads fp8 caches from sm_89 on, got sm_{spec.arch}; store int8")
            elif spec.dtype == E4M3:
                reasons.append(f"takes fp8 inputs from sm_89 on, got sm_{spec.arch}; use bf16")
            elif spec.compute_dtype == E4M3:
                reasons.append(f"computes in e4m3 from sm_89 on, got sm_{spec.arch}; leave out compute_dtype")
        if (largest := max(spec.head_dim, spec.value_dim)) > WIDEST:
            reasons.append(f"has kernels for heads of up to {WIDEST}, got {largest}")
        elif spec.value_dim > WIDEST_VALUE:
            reasons.append(f"has kernels for values of up to {WIDEST_VALUE} channels, got {spec.value_dim}")
        elif spec.grad and spec.dtype == torch.float32 and spec.device == "cuda" and largest > WIDE:
            # It would take 130 KB of shared memory and spill 2 KB per thread.
            reasons.append(f"has a backward in fp32 for heads of up to {WIDE}, got {largest}; use bf16")
        return reasons

    def slow(self, spec: AttentionSpec) -> list[str]:
        """Return the reasons why this backend would copy K or V."""
        return [
            f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided
        ]

    def failures(self, spec: AttentionSpec) -> list[str]:
        """Return a line for each private function of torch or Triton that failed its trial, with the cost."""
        return [*watched.failures(), *(launch.failures(spec.arch) if spec.device == "cuda" else [])]

    def variant(self, call: Call) -> str:
        """Return the name of the kernels that run a call."""
        if call.spec.statistic:
            return "plain"
        return self.dense.variant(call) if call.kv is None else self.cached.variant(call)

    def attention(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return dense or packed attention and its LSE."""
        return self.dense.attention(call)

    def cached_attention(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return attention over a cache and its LSE."""
        return self.cached.attention(call)

    def statistic(self, call: Call, wanted: Statistic) -> Tensor:
        """Return a quantity that is computed from the scores of a dense or packed call."""
        return self.statistics.statistic(call, wanted)

    def gradients(self, call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
        """Return what ``call``, a chunk of a larger call, contributes to the gradients of that larger call.

        ``dout``, ``out`` and ``lse`` belong to the larger call, and have only the queries of the chunk.
        """
        return self.dense.operators.chunk_gradients(call, dout, out, lse)

    def prepare(self, call: Call) -> Run | None:
        """Return a faster function that repeats this call on tensors of the same layouts, or None."""
        return self.dense.prepare(call) if call.kv is None else self.cached.prepare(call)


backend = TritonBackend("triton", hopper=True)
plain = TritonBackend("triton_generic", hopper=False)
