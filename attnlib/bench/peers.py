"""Other libraries to compare with, if they are installed: FlashAttention-4 and FlashInfer."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from types import MappingProxyType

import torch
from torch import Tensor

from .. import CAUSAL, FULL, KVLayout
from .cases import Case
from .place import Target

PACKAGES = MappingProxyType({"FA4": "flash-attn-4", "FlashInfer": "flashinfer-python"})
PAGE, LATENT_PAGE = 16, 64  # FlashInfer's tokens per page, for keys and values and for latents
WORKSPACE = 512 << 20  # FlashInfer gets this many bytes for partial results


def versions() -> dict[str, str]:
    """Return the versions of installed libraries by column, e.g. ``{"FA4": "flash-attn-4 4.0.0"}``."""
    pairs = PACKAGES.items()
    return {
        name: f"{package} {found.version}" for name, package in pairs for found in distributions(name=package)
    }


def present(names: Iterable[str]) -> list[str]:
    """Return the names of the implementations whose library is installed, or that need none."""
    absent = PACKAGES.keys() - versions().keys()
    return [name for name in names if name not in absent]


def flash_attention_4(case: Case, place: Target) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return FlashAttention-4's function of q, k and v for a benchmark case; tokens come before heads."""
    from flash_attn.cute import flash_attn_func

    if case.mask not in (FULL, CAUSAL) or case.lengths:
        raise NotImplementedError("FA4: only full or causal batches")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, causal=case.mask == CAUSAL)
        return out[0] if isinstance(out, tuple) else out  # some versions return the LSE, too

    return call


def flashinfer(layout: KVLayout, q: Tensor, keys: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a call that decodes one token per sequence with FlashInfer, from pages in random order."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, tokens = keys[0].shape[:2]
    size = LATENT_PAGE if layout.is_latent else PAGE
    order = torch.randperm(batch * tokens // size, device=q.device)
    pages = [x.unflatten(1, (-1, size)).flatten(0, 1) for x in keys]
    planes = [torch.empty_like(x).index_copy_(0, order, x) for x in pages]
    sequences = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    starts, table, q = sequences * (tokens // size), order.int(), q[:, 0]  # [b, h, d]
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
    heads, dtypes = q.shape[1], {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    if layout.is_latent:
        split = [x.contiguous() for x in q.split((layout.dim, layout.rope_dim), -1)]
        lengths = torch.full_like(starts[1:], tokens)
        latent = BatchMLAPagedAttentionWrapper(workspace)
        sizes = heads, layout.dim, layout.rope_dim, size
        latent.plan(
            sequences, starts, table, lengths, *sizes, causal=False, sm_scale=q.shape[-1] ** -0.5, **dtypes
        )
        return lambda: latent.run(*split, *planes)[:, None]
    grouped = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=heads != layout.heads)
    grouped.plan(
        starts, table, torch.full_like(starts[1:], size), heads, layout.heads, layout.dim, size, **dtypes
    )
    return lambda: grouped.run(q, tuple(planes))[:, None]
