"""From the shapes of a call to its launches: pure, and remembered, since calls come in few shapes."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import arch_of
from ..operators import Arguments
from . import tables
from .launch import Launch
from .tables import LaunchConfig

PREPARED = LaunchConfig(32, 0, 1, 4)  # the first backward kernel, which has no keys


class Layout(NamedTuple):
    """A tensor without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class DenseKey(NamedTuple):
    """What decides the launches of a call: its arguments, with layouts in place of tensors, and the device."""

    device: torch.device
    tf32: bool
    aligned: bool  # q, k and v begin at multiples of 16 bytes
    arguments: Arguments


def layout(x: Tensor | None) -> tuple | None:
    """The Layout of a tensor, as a plain tuple, which is made in a fifth of the time."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all begin at multiples of 16 bytes."""
    return (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0


def key_of(a: Arguments) -> DenseKey:
    """What decides the launches of a call with these arguments."""
    tf32 = a.q.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    layouts = Arguments(
        layout(a.q), layout(a.k), layout(a.v), layout(a.alibi_slopes), layout(a.sinks), layout(a.key_starts),
        layout(a.key_ends), layout(a.cu_seqlens_q), layout(a.cu_seqlens_k), layout(a.dropout_seed), layout(a.origin),
        a.left, a.right, a.prefix, a.scale, a.softcap, a.dropout_p, a.max_seqlen_q, a.max_seqlen_k,
    )  # fmt: skip
    return DenseKey(a.q.device, tf32, aligned(a.q, a.k, a.v), layouts)


class DenseShapes:
    """What all kernels of a call are launched with, in the order of their parameters."""

    def __init__(self, key: DenseKey, arch: int | None):
        if arch is None:
            arch = arch_of(key.device) if key.device.type == "cuda" else 0
        call = key.arguments
        slopes, sinks, cu_q = call.alibi_slopes, call.sinks, call.cu_seqlens_q
        self.q, self.k, self.v = Layout(*call.q), Layout(*call.k), Layout(*call.v)
        (self.s, self.h, d), (self.t, self.g), e = self.q.shape[-3:], self.k.shape[-3:-1], self.v.shape[-1]
        self.packed = cu_q is not None
        self.batch = Layout(*cu_q).shape[0] - 1 if self.packed else self.q.shape[0]
        self.length = self.t // max(1, self.batch) if self.packed else self.t  # the mean of what is packed
        self.out = _contiguous((*self.q.shape[:-1], e), self.q.dtype)
        self.problem = tables.Problem(
            head_dim=d, value_dim=e, itemsize=self.q.dtype.itemsize, causal=call.right is not None, arch=arch,
            aligned=key.aligned and all(map(_whole_lines, (self.q, self.k, self.v))),
            plain=call.softcap is None and slopes is None and call.dropout_p == 0,
        )  # fmt: skip
        for name, y in (("q", self.q), ("k", self.k), ("v", self.v)):
            if y.strides[-3] >= tables.FARTHEST:
                apart = f"rows of {name} lie {y.strides[-3]} elements apart"
                raise NotImplementedError(f"triton: {apart}; call .contiguous()")
        reach = self.s + self.t  # beyond which nothing is hidden, and int32 is safe
        self.scalars = (
            _clamp(call.left, reach), _clamp(call.right, reach), min(call.prefix, reach), call.scale,
            call.softcap or 1.0, math.ceil(call.dropout_p * 2**32), 1 / (1 - call.dropout_p),
        )  # fmt: skip
        main, tail, value = tables.widths(d, e)
        self.constants = {
            "D": d, "D_MAIN": main, "D_TAIL": tail, "E": e, "E_MAIN": value,
            "LEFT": call.left is not None, "RIGHT": call.right is not None, "PREFIX": call.prefix > 0,
            "STARTS": call.key_starts is not None, "ENDS": call.key_ends is not None, "VARLEN": self.packed,
            "SOFTCAP": call.softcap is not None, "SLOPES": slopes is not None, "SINKS": sinks is not None,
            "DROPOUT": call.dropout_p > 0, "PRECISION": "tf32" if key.tf32 else "ieee",
        }  # fmt: skip
        # Of the LSE by batch and head, and of slopes by batch.
        slopes_stride = self.h if slopes is not None and len(Layout(*slopes).shape) == 2 else 0
        self.scores_strides = (0 if self.packed else self.h * self.s, self.s, slopes_stride)
        self.counts = (self.batch, self.h, self.h // self.g)

    def strides(self, *tensors: Layout) -> tuple[int, ...]:
        """Of batch, rows and heads; a packed tensor is a batch of one."""
        return tuple(n for x in tensors for n in ((0, *x.strides[:2]) if self.packed else x.strides[:3]))

    def blocks(self, length: int, block: int) -> int:
        """Programs along a sequence; packed, along all, with a partial block for each."""
        return length // block + self.batch + 1 if self.packed else -(-length // block)

    def pairs(self, heads: int) -> int:
        return heads if self.packed else self.batch * heads

    def descriptors(self, tiles: LaunchConfig, rows: int, first: str, second: str) -> tuple:
        """Blocks of a tensor like q, its tail, and one like v, as Launch takes them; of q, k, v and dout."""
        if not tiles.tma:
            return None, None, None
        of = {"q": 0, "k": 1, "v": 2, "dout": 3}
        main, tail, value = (self.constants[name] for name in ("D_MAIN", "D_TAIL", "E_MAIN"))
        return (of[first], rows, main), (of[first], rows, tail) if tail else None, (of[second], rows, value)

    def lengths(self, heads: int) -> tuple[int, ...]:
        """Those of q and k, and how many heads run together."""
        pairs, group = self.pairs(heads), heads // self.g
        wave = pairs if self.packed else tables.heads_per_wave(self.problem, keys=self.t, pairs=pairs, group=group)
        return self.s, self.t, wave


@lru_cache(maxsize=4096)
def forward(key: DenseKey, tiles: LaunchConfig | None = None, arch: int | None = None) -> Launch:
    """The launch on q, k, v, out, lse and the optional tensors; with other ``tiles``, for another chip."""
    from .kernels.forward import forward

    x = DenseShapes(key, arch)
    tiles = tiles or tables.forward(x.problem, keys=x.length)
    numbers = (*x.strides(x.q, x.k, x.v, x.out), *x.scores_strides, *x.counts, *x.lengths(x.h), *x.scalars)
    programs = x.pairs(x.h) * x.blocks(x.s, tiles.block_m)
    return Launch(forward, programs, numbers, x.constants, tiles, x.descriptors(tiles, tiles.block_n, "k", "v"))


class Backward(NamedTuple):
    """The launches of a backward, and what its host needs to know.

    ``prepare`` takes q, out, dout, lse, dlse, lse2 and delta. ``keys`` takes q, k, v, dout, lse2, delta, dk, dv and the
    optional tensors but sinks; ``queries`` takes dq and the shares of the slopes' gradient for dk and dv. ``shares`` is
    the shape of those, ``block`` the number of queries behind each of its last dimension.
    """

    prepare: Launch
    keys: Launch
    queries: Launch
    shares: tuple[int, int, int]
    block: int


@lru_cache(maxsize=4096)
def backward(
    key: DenseKey,
    dout: tuple,
    dlse: tuple | None,
    tiles_of_keys: LaunchConfig | None = None,
    tiles_of_queries: LaunchConfig | None = None,
    arch: int | None = None,
) -> Backward:
    """The three launches of a backward; with other tiles than those of the tables, for another chip."""
    from .kernels.backward import backward_keys, backward_queries, prepare

    x, dout = DenseShapes(key, arch), Layout(*dout)
    if max(x.problem.head_dim, x.problem.value_dim) > tables.WIDEST_BACKWARD:  # which a transform did not tell before
        raise NotImplementedError(f"triton: has a backward for heads of up to {tables.WIDEST_BACKWARD}")
    x.problem = x.problem._replace(aligned=x.problem.aligned and _whole_lines(dout))
    of_keys = tiles_of_keys or tables.backward_keys(x.problem, keys=x.length)
    of_queries = tiles_of_queries or tables.backward_queries(x.problem, keys=x.length)
    rows, blocks = 1 if x.packed else x.batch, x.blocks(x.s, of_queries.block_m)
    dk, dv, dq = (_contiguous(y.shape, y.dtype) for y in (x.k, x.v, x.q))
    dlse_strides = (0,) * 3 if dlse is None else (0, *Layout(*dlse).strides) if x.packed else Layout(*dlse).strides
    whole = {"D_ALL": tables.power_of_two(x.constants["D"]), "DLSE": dlse is not None}
    shares_strides = (0 if x.packed else x.h * blocks, blocks)
    return Backward(
        Launch(
            prepare, rows * x.h * -(-x.s // PREPARED.block_m),
            (*x.strides(x.q, x.out, dout), *dlse_strides, x.h, x.s), x.constants | whole, PREPARED,
        ),
        Launch(
            backward_keys, x.pairs(x.g) * x.blocks(x.t, of_keys.block_n),
            (*x.strides(x.q, x.k, x.v, dout, dk, dv), *x.scores_strides, x.batch, x.g, *x.lengths(x.g), *x.scalars),
            x.constants | {"GROUP": x.h // x.g}, of_keys, x.descriptors(of_keys, of_keys.block_m, "q", "dout"),
        ),
        Launch(
            backward_queries, x.pairs(x.h) * blocks,
            (
                *x.strides(x.q, x.k, x.v, dout, dq), *x.scores_strides, *shares_strides,
                *x.counts, *x.lengths(x.h), *x.scalars,
            ),
            x.constants, of_queries, x.descriptors(of_queries, of_queries.block_n, "k", "v"),
        ),
        (rows, x.h, blocks),
        of_queries.block_m,
    )  # fmt: skip


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    return Layout(shape, torch.empty(shape, device="meta").stride(), dtype)


def _whole_lines(x: Layout) -> bool:
    """Whether every row of heads begins at a multiple of 16 bytes of the tensor, which descriptors need."""
    return all(n > 0 and n * x.dtype.itemsize % 16 == 0 for n in x.strides[:-1]) and 0 not in x.shape


def _clamp(bound: int | None, reach: int) -> int:
    return 0 if bound is None else max(-reach, min(bound, reach))
