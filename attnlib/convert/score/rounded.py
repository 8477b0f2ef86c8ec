"""A paged cache for a model that runs in fp32, with keys and values rounded as those of a 16-bit model."""

import torch
from torch import Tensor, nn

from ...integrations.transformers import PagedCache


class RoundedCache(PagedCache):
    """A paged cache that rounds keys and values to ``dtype`` before it stores them."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        pages: int,
        max_sequences: int,
        storage_dtype: torch.dtype | None,
    ):
        super().__init__(model, pages=pages, max_sequences=max_sequences, storage_dtype=storage_dtype)
        self._dtype = dtype

    def append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Round new keys and values ``[b, g, s, d]``, and store them as :class:`PagedCache` does."""
        return super().append(index, *(x.to(self._dtype).to(x.dtype) for x in (key, value)))
