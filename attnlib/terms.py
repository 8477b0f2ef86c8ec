"""Terms: what a call computes with beside q, k, v and the mask, and the checks of their values."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .counts import INT32
from .shapes import bind, is_strided, refuse_tensor

FP32 = torch.finfo(torch.float32)
TENSORS = ("alibi_slopes", "sinks", "key_starts", "key_ends", "cu_seqlens_q", "cu_seqlens_k", "dropout_seed")


class Terms(NamedTuple):
    """The terms of a call, as :func:`attnlib.attention` and its siblings describe them."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    key_starts: Tensor | None = None
    key_ends: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    dropout_p: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


def check(terms: Terms, sizes: dict[str, int], device: torch.device) -> Terms:
    """``terms`` with the scale and the dropout seed filled in; ``sizes`` are those of q, k and v.

    Raises:
        ValueError, TypeError: naming the term, what was expected and what came.
    """
    scale, softcap = terms[:2]
    scale = max(sizes["d"], 1) ** -0.5 if scale is None else _positive("scale", scale)
    softcap = None if softcap is None else _positive("softcap", softcap)
    if not (
        terms.alibi_slopes is None
        and terms.sinks is None
        and terms.key_starts is None
        and terms.key_ends is None
        and terms.cu_seqlens_q is None
    ):
        _check_tensors(terms, sizes)
    seed = terms.dropout_seed
    if seed is not None or terms.dropout_p != 0:
        seed = _seed(terms, device)
    return Terms(scale, softcap, *terms[2:8], seed, *terms[9:])


def read_offsets(
    cu_q: Tensor, cu_k: Tensor | None, *, queries: int, keys: int, max_q: int | None, max_k: int | None
) -> tuple[list[int], list[int]]:
    """The offsets of packed queries and keys, read on the host and checked; ``cu_k`` None means the same as ``cu_q``.

    Raises:
        ValueError: they do not start at 0, decrease, pass the last token, or hold a longer sequence than promised.
    """
    rows = _offsets("cu_seqlens_q", cu_q, queries, "max_seqlen_q", max_q)
    return rows, _offsets("cu_seqlens_k", cu_q if cu_k is None else cu_k, keys, "max_seqlen_k", max_k)


def _offsets(name: str, cu_seqlens: Tensor, tokens: int, limit_name: str, limit: int | None) -> list[int]:
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name}: expected offsets that start at 0 and never decrease, got {offsets}")
    if offsets[-1] > tokens:
        raise ValueError(f"{name}: expected offsets up to {tokens} tokens, got {offsets[-1]}")
    if limit is not None and lengths and max(lengths) > limit:
        raise ValueError(f"{limit_name}: expected at least the longest sequence, {max(lengths)}, got {limit}")
    return offsets


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name}: expected a Python number, got {type(value).__name__}; reading a tensor would wait for it"
        )
    # As fp32, a greater number would be inf and a smaller one 0, and their products NaN. (Not isfinite, which
    # torch.compile cannot trace on a float that varies.)
    if not FP32.tiny <= value <= FP32.max:
        raise ValueError(f"{name}: expected a finite fp32 number above 0, got {value}")
    return 1.0 * value  # an int may be too large for torch


def _check_tensors(terms: Terms, sizes: dict[str, int]) -> None:
    named = []
    if (cu := terms.cu_seqlens_q) is not None:
        _check_packed(terms)
        sizes = {**sizes, "b": cu.shape[0] - 1}
    for name, dims in (("alibi_slopes", "h"), ("sinks", "h"), ("key_starts", "b"), ("key_ends", "b")):
        x = getattr(terms, name)
        if x is None:
            continue
        if not is_strided(x):
            refuse_tensor(name, x)
        if dims == "h" and not x.is_floating_point():
            raise TypeError(f"{name}: expected a float dtype, got {x.dtype}")
        if dims == "b" and x.dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {x.dtype}")
        per_sequence = name == "alibi_slopes" and x.dim() == 2
        named.append((name, x, "bh" if per_sequence else dims))
    bind(*named, known=sizes)


def _check_packed(terms: Terms) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        x = getattr(terms, name)
        if not is_strided(x) or x.dtype != torch.int32:
            raise TypeError(f"{name}: expected an int32 tensor, got {_kind(x)}")
        if x.dim() != 1 or x.shape[0] < 1:
            raise ValueError(f"{name}: expected [b + 1] offsets, got {tuple(x.shape)}")
    if terms.cu_seqlens_q.shape != terms.cu_seqlens_k.shape:
        got = (tuple(terms.cu_seqlens_q.shape), tuple(terms.cu_seqlens_k.shape))
        raise ValueError(f"cu_seqlens_k: expected as many offsets as cu_seqlens_q, got {got[1]} and {got[0]}")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        limit = getattr(terms, name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(limit).__name__}")
        if limit is not None and not 0 <= limit <= INT32:
            raise ValueError(f"{name}: expected a length from 0 to {INT32}, got {limit}")


def _seed(terms: Terms, device: torch.device) -> Tensor:
    p, seed = terms.dropout_p, terms.dropout_seed
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"dropout_p: expected a Python number, got {type(p).__name__}")
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {p}")
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if not is_strided(seed) or seed.dtype != torch.int64 or seed.shape != (1,):
        raise TypeError(f"dropout_seed: expected an int64 tensor [1], got {_kind(seed)}")
    return seed


def _kind(x: object) -> str:
    if is_strided(x):
        return f"{x.dtype} {tuple(x.shape)}"
    return "one that is not strided" if isinstance(x, Tensor) else type(x).__name__
