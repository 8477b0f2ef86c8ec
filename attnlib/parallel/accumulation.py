"""Accumulators that sum up partial attention results and gradients in fp32 (in fp64 for fp64 inputs)."""

import torch
from torch import Tensor


class PartialAttention:
    """The output and LSE of a rank's queries over all keys that have been processed so far."""

    def __init__(self, q: Tensor):
        self._q, self._wide = q, torch.promote_types(q.dtype, torch.float32)
        self.out: Tensor | None = None

    def begin(self, v: Tensor) -> None:
        """Record the width and dtype of ``v``, which the output will have."""
        self._width, self._dtype = v.shape[-1], v.dtype

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Merge in the output and LSE that the slice ``queries`` has over further keys."""
        if self.out is None and out.shape[:-1] == self._q.shape[:-1]:  # the first result covers all queries
            self.out, self.lse = out.to(self._wide), lse.to(self._wide)
            return
        self._allocate()
        known, found = self.lse[..., queries], self.out[..., queries, :, :]
        both = torch.logaddexp(known, lse)
        share = torch.exp(lse - both).masked_fill(both == -torch.inf, 0)
        found.lerp_(out.to(found.dtype), share.mT.unsqueeze(-1))
        known.copy_(both)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, in the dtype of the values, and the LSE; both include the sinks."""
        self._allocate()
        if sinks is not None:
            both = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)[:, None])
            self.out *= torch.exp(self.lse - both).mT.unsqueeze(-1)
            self.lse = both
        return self.out.to(self._dtype), self.lse

    def _allocate(self) -> None:
        if self.out is None:
            shape = self._q.shape[:-1]
            self.out = self._q.new_zeros(*shape, self._width, dtype=self._wide)
            self.lse = self._q.new_full(shape, -torch.inf, dtype=self._wide).mT.contiguous()


class Sum:
    """The sum of gradients of parts of ``x``, in the dtype ``wide``; a single gradient keeps its dtype."""

    def __init__(self, x: Tensor, wide: torch.dtype):
        self._x, self._wide = x, wide
        self._found: Tensor | None = None

    def add(self, tokens: slice, part: Tensor) -> None:
        """Add ``part``, a gradient of the tokens in the slice ``tokens``."""
        if self._found is None and part.shape == self._x.shape:
            self._found = part
        elif self._found is None:
            self._found = part.new_zeros(self._x.shape)
            self._found[..., tokens, :, :] = part
        else:
            self._found = self._found.to(self._wide)
            self._found[..., tokens, :, :] += part

    def result(self) -> Tensor:
        """Return the sum, or zeros if nothing was added."""
        return self._x.new_zeros(self._x.shape) if self._found is None else self._found
