"""The Triton backend: one FlashAttention core for dense and packed calls on a GPU, forward and backward."""

import math
import os

import torch
from torch import Tensor

from ..cache.layout import KVView
from ..kernels import launch
from ..spec import AttentionSpec
from ..terms import Terms
from ._autograd import Attention
from ._schema import BACKWARD, FORWARD, fake_backward, outputs, register, sinks_grad, slopes_grad


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    reasons = []
    if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append(f"needs a CUDA device, got {spec.device}")
    if spec.device == "cuda" and spec.arch < 80:
        reasons.append(f"needs sm_80 or newer, got sm_{spec.arch}")
    if spec.kind == "cached":
        reasons.append("has no kernel for cached attention yet")
        if spec.grad:
            reasons.append("cached attention has no backward; wrap the call in torch.no_grad()")
        return reasons
    if spec.dtype == torch.float64:
        reasons.append("computes in fp32, got fp64")
    widest = launch.WIDEST_BACKWARD if spec.grad else launch.WIDEST
    if spec.head_dim > widest or spec.value_dim > widest:
        what = "a backward" if spec.grad else "tiles"
        reasons.append(f"has {what} for heads of up to {widest}, got {max(spec.head_dim, spec.value_dim)}")
    return reasons


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V."""
    return [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    q, k, v = (x.contiguous() if name in spec.strided else x for name, x in (("q", q), ("k", k), ("v", v)))
    if terms.cu_seqlens_k is terms.cu_seqlens_q:  # torch.compile passes a tensor once
        terms = terms._replace(cu_seqlens_k=None)
    mask = spec.mask
    numbers = (mask.left, mask.right, mask.prefix, terms.scale, terms.softcap, *terms[9:])
    if spec.grad:
        return Attention.apply("triton", q, k, v, *terms[2:9], numbers)
    return torch.ops.attnlib.triton_forward(q, k, v, *terms[2:9], *numbers)


def cached_attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Refused by ``unsupported``."""
    raise NotImplementedError("triton: cached attention has no kernel yet")


class _Call:
    """What all kernels of a call are launched with, in the order of their parameters."""

    def __init__(
        self, q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed,
        left, right, prefix, scale, softcap, dropout_p, max_q, max_k,
    ):  # fmt: skip
        # Small, and read by position alone.
        self.slopes, self.sinks, self.starts, self.ends, self.cu_q, self.cu_k = (
            None if x is None else x.contiguous() for x in (slopes, sinks, starts, ends, cu_q, cu_k)
        )
        self.cu_k = self.cu_q if self.cu_k is None else self.cu_k
        self.seed, self.packed = seed, cu_q is not None
        (self.s, self.h, d), (self.t, self.g), e = q.shape[-3:], k.shape[-3:-1], v.shape[-1]
        self.group = self.h // self.g
        self.batch = cu_q.shape[0] - 1 if self.packed else q.shape[0]
        self.problem = launch.Problem(
            head_dim=d, value_dim=e, itemsize=q.element_size(), causal=right is not None, arch=_arch(q),
            plain=softcap is None and slopes is None and dropout_p == 0,
        )  # fmt: skip
        reach = self.s + self.t  # beyond which nothing is hidden, and int32 is safe
        self.scalars = (
            _clamp(left, reach), _clamp(right, reach), min(prefix, reach), scale, softcap or 1.0,
            math.ceil(dropout_p * 2**32), 1 / (1 - dropout_p),
        )  # fmt: skip
        main, tail = launch.head_split(d)
        self.constants = {
            "D": d, "D_MAIN": main, "D_TAIL": tail, "E": e, "E_MAIN": max(16, 1 << (e - 1).bit_length()),
            "LEFT": left is not None, "RIGHT": right is not None, "PREFIX": prefix > 0,
            "STARTS": starts is not None, "ENDS": ends is not None, "VARLEN": self.packed,
            "SOFTCAP": softcap is not None, "SLOPES": slopes is not None, "DROPOUT": dropout_p > 0,
            "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        }  # fmt: skip
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.stride(-3) >= launch.FARTHEST:
                raise NotImplementedError(
                    f"triton: rows of {name} lie {x.stride(-3)} elements apart; use .contiguous()"
                )

    @property
    def slopes_stride(self) -> int:
        return self.slopes.stride(0) if self.slopes is not None and self.slopes.dim() == 2 else 0

    @property
    def lse_strides(self) -> tuple[int, int]:
        return (0 if self.packed else self.h * self.s), self.s

    def strides(self, *tensors: Tensor) -> list[int]:
        """Of batch, rows and heads; a packed tensor is a batch of one."""
        return [n for x in tensors for n in ((0, *x.stride()[:2]) if self.packed else x.stride()[:3])]

    def blocks(self, length: int, block: int) -> int:
        """Programs along a sequence; packed, along all, with a partial block for each."""
        return length // block + self.batch + 1 if self.packed else -(-length // block)

    def pairs(self, heads: int) -> int:
        return heads if self.packed else self.batch * heads

    def counts(self, heads: int) -> tuple[int, ...]:
        """Batch, heads, group, lengths, and how many heads run together."""
        pairs, group = self.pairs(heads), heads // self.g
        section = pairs if self.packed else launch.section(self.problem, keys=self.t, pairs=pairs, group=group)
        return self.batch, heads, self.group, self.s, self.t, section


def _clamp(bound: int | None, reach: int) -> int:
    return 0 if bound is None else max(-reach, min(bound, reach))


def _tiles(config: launch.LaunchConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip


def _forward(q, k, v, *extras):
    from ..kernels.forward import forward

    out, lse = outputs(q, v)
    x = _Call(q, k, v, *extras)
    config = launch.forward(x.problem, keys=x.t)
    programs = x.pairs(x.h) * x.blocks(x.s, config.block_m)
    if programs:
        with torch.cuda.device_of(q):
            forward[(programs,)](
                q, k, v, out, lse, x.slopes, x.sinks, x.starts, x.ends, x.cu_q, x.cu_k, x.seed,
                *x.strides(q, k, v, out), *x.lse_strides, x.slopes_stride, *x.counts(x.h), *x.scalars,
                **x.constants, SINKS=x.sinks is not None, **_tiles(config),
            )  # fmt: skip
    return out, lse


def _backward(dout, dlse, out, lse, q, k, v, *extras):
    from ..kernels.backward import backward_keys, backward_queries, prepare

    x = _Call(q, k, v, *extras)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (q, k, v))
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    keys, queries = launch.backward_keys(x.problem), launch.backward_queries(x.problem)
    blocks = x.blocks(x.s, queries.block_m)
    dslopes = lse.new_zeros(1 if x.packed else x.batch, x.h, blocks)  # programs beyond the last sequence write nothing
    rows = 1 if x.packed else x.batch
    terms = (x.slopes, x.starts, x.ends, x.cu_q, x.cu_k, x.seed)
    numbers = (*x.lse_strides, x.slopes_stride)
    dlse_strides = (0, 0, 0) if dlse is None else (0, *dlse.stride()) if x.packed else dlse.stride()
    shape = {name: x.constants[name] for name in ("D", "E", "E_MAIN", "SOFTCAP")}
    with torch.cuda.device_of(q):
        if programs := -(-x.s // 32) * rows * x.h:
            prepare[(programs,)](
                q, out, dout, lse, dlse, lse2, delta, *x.strides(q, out, dout), *dlse_strides, x.h, x.s,
                **shape, D_ALL=max(16, 1 << (shape["D"] - 1).bit_length()), DLSE=dlse is not None, BLOCK_M=32,
            )  # fmt: skip
        if programs := x.blocks(x.t, keys.block_n) * x.pairs(x.g):
            backward_keys[(programs,)](
                q, k, v, dout, lse2, delta, dk, dv, *terms, *x.strides(q, k, v, dout, dk, dv), *numbers,
                *x.counts(x.g), *x.scalars, **x.constants, **_tiles(keys),
            )  # fmt: skip
        if programs := blocks * x.pairs(x.h):
            backward_queries[(programs,)](
                q, k, v, dout, lse2, delta, dq, dslopes, *terms, *x.strides(q, k, v, dout, dq), *numbers,
                0 if x.packed else dslopes.stride(0), dslopes.stride(1),
                *x.counts(x.h), *x.scalars, **x.constants, **_tiles(queries),
            )  # fmt: skip
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return dq, dk, dv, slopes_grad(x.slopes, _by_sequence(dslopes, x, queries.block_m)), sinks_grad(x.sinks, lse, delta)


def _by_sequence(dslopes: Tensor, x: _Call, block: int) -> Tensor:
    """The shares of all programs, added up for each sequence and head, ``[b, h]``."""
    if not x.packed or x.slopes is None or x.slopes.dim() == 1:
        return dslopes.sum(-1)
    # Packed sequence n owns programs from cu[n] // block + n on. A product with ones has a fixed order of sums.
    firsts = x.cu_q // block + torch.arange(x.batch + 1, device=x.cu_q.device, dtype=torch.int32)
    at = torch.arange(dslopes.shape[-1], device=firsts.device)[:, None]
    owned = (at >= firsts[:-1]) & (at < firsts[1:])
    return (dslopes[0].double() @ owned.double()).T.to(dslopes.dtype)


def _arch(x: Tensor) -> int:
    major, minor = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    return 10 * major + minor


def _fake_forward(q, k, v, *extras):
    return outputs(q, v)


_library = register(
    ((f"triton_forward{FORWARD}", _forward, _fake_forward), (f"triton_backward{BACKWARD}", _backward, fake_backward))
)
