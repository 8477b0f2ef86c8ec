"""Implementations of attention to compare: attnlib, torch's own, other libraries, and textbook attention."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import CAUSAL, FULL, attention, varlen_attention
from .cases import Case
from .peers import flash_attention_4
from .place import Target

PEERS = ("cuDNN", "FA2", "Flex")
FUSED = MappingProxyType(
    {
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "FA2": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA": None,  # the backend that torch chooses
    }
)


class Implementation(NamedTuple):
    """An attention function of q, k and v; ``heads_first`` is True if it expects heads before tokens."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    heads_first: bool


def implementation(name: str, case: Case, place: Target) -> Implementation:
    """Prepare the implementation called ``name`` to run a benchmark case.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the implementation cannot compute the case.
    """
    tokens_first = {
        "ours": _ours,
        "by sequence": _by_sequence,
        "transposed": _transposed,
        "FA4": flash_attention_4,
    }
    makers = tokens_first | {"Flex": _flex, "eager": _eager}
    makers |= {fused: partial(_fused, backend=backend) for fused, backend in FUSED.items()}
    if name not in makers:
        raise ValueError(f"implementation: expected one of {', '.join(makers)}, got {name!r}")
    return Implementation(makers[name](case, place), heads_first=name not in tokens_first)


def _ours(case: Case, place: Target) -> Callable:
    if not case.lengths:
        return lambda q, k, v: attention(q, k, v, mask=case.mask, backend=place.backend)
    offsets = torch.tensor([0, *case.lengths], device=place.device).cumsum(0).to(torch.int32)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "mask": case.mask, "backend": place.backend}
    longest = max(case.lengths)
    return lambda q, k, v: varlen_attention(q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **options)


def _fused(case: Case, place: Target, *, backend: SDPBackend | None) -> Callable:
    """Return torch's fused attention, restricted to one backend unless ``backend`` is None.

    Without a restriction, masks other than full and causal become a mask tensor. Efficient attention takes
    no groups of heads, so every call repeats the keys and values of a group.
    """
    is_plain = case.mask in (FULL, CAUSAL)
    if case.lengths or not (is_plain or backend is None):
        raise NotImplementedError("torch's fused attention: only full or causal batches")
    repeats = case.heads // case.kv_heads if backend == SDPBackend.EFFICIENT_ATTENTION else 1
    options = {"is_causal": case.mask == CAUSAL, "enable_gqa": case.heads > case.kv_heads * repeats}
    if not is_plain:
        at = torch.arange(case.tokens, device=place.device)
        options["attn_mask"] = case.mask.visible(at[:, None], at)
    if backend is None:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, **options)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return call


def _transposed(case: Case, place: Target) -> Callable:
    """Return torch's fused attention for tensors ``[b, t, h, d]``, the layout that projections produce."""
    call = _fused(case, place, backend=None)
    return lambda *tensors: call(*(x.transpose(1, 2) for x in tensors)).transpose(1, 2)


def _by_sequence(case: Case, place: Target) -> Callable:
    """Return a function that calls torch's fused attention separately for each packed sequence."""

    def call(*tensors: Tensor) -> Tensor:
        sequences = zip(*(x.transpose(0, 1)[None].split(case.lengths, 2) for x in tensors), strict=True)
        outs = [scaled_dot_product_attention(*qkv, is_causal=case.mask == CAUSAL) for qkv in sequences]
        return torch.cat(outs, 2)[0].transpose(0, 1)

    return call


def _flex(case: Case, place: Target) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend = torch.compile(flex_attention, dynamic=False)
    reach, prefix, blocks = case.mask.left, case.mask.prefix, None
    size = (None, None, case.tokens, case.tokens)
    if case.mask == CAUSAL:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, *size, device=place.device)
    elif prefix:
        blocks = create_block_mask(lambda b, h, i, j: (i >= j) | (j < prefix), *size, device=place.device)
    elif case.mask != FULL:
        blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= reach), *size, device=place.device)
    return lambda q, k, v: attend(q, k, v, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


def _eager(case: Case, place: Target) -> Callable:
    """Return textbook attention, which computes the whole score matrix."""
    at = torch.arange(case.tokens, device=place.device)
    hidden = None if case.mask == FULL else ~case.mask.visible(at[:, None], at)
    group = case.heads // case.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q * case.dim**-0.5) @ k.transpose(-1, -2)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return call
