"""Who computes a case: ours, torch's attentions, and eager torch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..functional import attention, varlen_attention
from ..mask import CAUSAL, FULL
from .cases import Case
from .place import Place

PEERS = ("cuDNN", "FA2", "Flex")


class Contender(NamedTuple):
    """A function of q, k and v that computes a case, and whether it wants heads before tokens."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_first: bool


def contender(name: str, work: Case, place: Place) -> Contender:
    """Who is called ``name``, made ready for a case.

    Raises:
        ValueError: nobody is.
        NotImplementedError: it cannot compute the case.
    """
    if name == "ours":
        return Contender(_ours(work, place), heads_first=False)
    if name == "by sequence":
        return Contender(_by_sequence(work), heads_first=False)
    if name == "Flex":
        return Contender(_flex(work, place), heads_first=True)
    if name == "eager":
        return Contender(_eager(work, place), heads_first=True)
    backends = {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "FA2": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA": None,
    }
    if name not in backends:
        raise ValueError(f"contender: expected ours, eager, Flex or one of {', '.join(backends)}, got {name!r}")
    return Contender(_sdpa(work, backends[name]), heads_first=True)


def _ours(work: Case, place: Place) -> Callable:
    if not work.lengths:
        return lambda q, k, v: attention(q, k, v, mask=work.mask, backend=place.backend)
    offsets = torch.tensor([0, *work.lengths], device=place.device).cumsum(0).to(torch.int32)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "mask": work.mask, "backend": place.backend}
    longest = max(work.lengths)
    return lambda q, k, v: varlen_attention(q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **options)


def _sdpa(work: Case, backend: SDPBackend | None) -> Callable:
    """torch's fused attention; its dispatcher chooses which if the backend is None."""
    if work.mask not in (FULL, CAUSAL) or work.lengths:
        raise NotImplementedError("torch's fused attention: full or causal batches alone")
    options = {"is_causal": work.mask == CAUSAL, "enable_gqa": work.heads != work.kv_heads}
    if backend is None:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return call


def _by_sequence(work: Case) -> Callable:
    """torch's fused attention on one packed sequence after another."""

    def call(*tensors: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1)[None].split(work.lengths, 2) for x in tensors), strict=True)
        outs = [scaled_dot_product_attention(*part, is_causal=work.mask == CAUSAL) for part in parts]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return call


def _flex(work: Case, place: Place) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention, dynamic=False) if place.device == "cuda" else flex_attention
    reach, blocks = work.mask.left, None
    if work.mask == CAUSAL:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, *(work.tokens,) * 2, device=place.device)
    elif work.mask != FULL:
        blocks = create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j <= reach), None, None, *(work.tokens,) * 2, device=place.device
        )
    return lambda q, k, v: attend(q, k, v, block_mask=blocks, enable_gqa=work.heads != work.kv_heads)


def _eager(work: Case, place: Place) -> Callable:
    """Attention as one would first write it, with its matrix of scores."""
    at = torch.arange(work.tokens, device=place.device)
    hidden = None if work.mask == FULL else ~work.mask.visible(at[:, None], at)
    group = work.heads // work.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q * work.dim**-0.5) @ k.transpose(-1, -2)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return call
