"""torch's memory-efficient attention on GPUs, for calls that attnlib's kernels do not support.

Its functions here take the arguments of torch's fused CPU attention, so :mod:`.fused` can call either.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...call.spec import AttentionSpec
from ...masks.band import CAUSAL, FULL

EFFICIENT = "torch's memory-efficient attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LINE = 16  # bytes: rows of tensors must start at multiples of these
BOTTOM_RIGHT = 2  # torch's number for a causal mask whose last query sees the last key
ROWS = 32  # torch pads the LSE to a multiple of these


def takes(dtype: torch.dtype, *widths: int) -> bool:
    """True if torch's kernels take this dtype, and heads of these widths."""
    return dtype in DTYPES and all(width * dtype.itemsize % LINE == 0 for width in widths)


def may_take(spec: AttentionSpec) -> bool:
    """True if a call with this spec runs on torch's kernels, unless it has more queries than keys."""
    others = spec.statistic or spec.score or spec.dropout or spec.kind == "cached"
    others = others or spec.functions is not None or spec.selected is not None
    dtype = spec.compute_dtype or spec.dtype
    takes_all = takes(dtype, spec.head_dim, spec.value_dim) and spec.mask in (CAUSAL, FULL)
    return spec.device == "cuda" and takes_all and not others


def operators() -> tuple[Callable, Callable]:
    """Return torch's private operators: the forward and the backward."""
    return torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward


def forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output ``[b, h, s, e]`` and LSE ``[b, h, s]`` for q ``[b, h, s, d]`` and k ``[b, g, t, d]``.

    If there are fewer KV heads than query heads, sequences run one after another, without a copy of K or V.
    """
    g = k.shape[1]
    if q.shape[1] != g:
        each = [
            forward(_grouped(a, g), *_shared(a, b, c), dropout, causal, scale=scale)
            for a, b, c in zip(q, k, v, strict=True)
        ]
        out, lse = (torch.stack([x.flatten(0, 1) for x in part]) for part in zip(*each, strict=True))
        return out, lse
    rows = map(_tokens_first, (q, k, v))
    run, _ = operators()
    # The Nones are a bias, offsets of packed sequences and their lengths.
    out, lse, *_ = run(*rows, *(None,) * 5, dropout, BOTTOM_RIGHT * causal, True, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[2]]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool,
    *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv, in the shapes of q, k and v."""
    g = k.shape[1]
    if q.shape[1] != g:
        each = []
        for do, a, b, c, o, row in zip(dout, q, k, v, out, lse, strict=True):
            do, shared, o, row = _grouped(do, g), _shared(a, b, c), _grouped(o, g), _grouped(row, g)
            dq, dk, dv = backward(do, _grouped(a, g), *shared, o, row, dropout, causal, scale=scale)
            each.append((dq.flatten(0, 1), dk.sum(1), dv.sum(1)))
        dq, dk, dv = map(torch.stack, zip(*each, strict=True))
        return dq, dk, dv
    s, t, (_, run) = q.shape[2], k.shape[2], operators()
    dout, q, k, v = map(_tokens_first, (dout, q, k, v))
    out = out.transpose(1, 2).contiguous()  # torch computes the distance of its rows from its shape
    lse, unused = pad(lse, (0, -s % ROWS), value=torch.inf).contiguous(), q.new_zeros((), dtype=torch.int64)
    dropped = dropout, unused, unused  # the probability, and the state of the generator
    grads = run(
        dout, q, k, v, None, out, None, None, s, t, lse, *dropped, BOTTOM_RIGHT * causal, False, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
    return dq, dk, dv


def _grouped(x: Tensor, g: int) -> Tensor:
    """Return the heads of a sequence by KV head: ``[h, ...]`` -> ``[g, f, ...]``, a view."""
    return x.unflatten(0, (g, -1))


def _shared(q: Tensor, *keys: Tensor) -> list[Tensor]:
    """Return keys or values ``[g, t, *]`` for each query head of a sequence, ``[g, f, t, *]``, as views."""
    return [x.unsqueeze(1).expand(-1, q.shape[0] // x.shape[0], -1, -1) for x in keys]


def _tokens_first(x: Tensor) -> Tensor:
    """Return ``[b, h, s, d]`` as ``[b, s, h, d]``: a view if its rows are aligned, else a copy."""
    x = x.transpose(1, 2)
    starts = (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1]))
    return x if x.stride(-1) == 1 and all(n % LINE == 0 for n in starts) else x.contiguous()
