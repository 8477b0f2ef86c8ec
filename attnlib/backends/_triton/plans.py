"""From the shapes of a call to its launches: pure, and remembered, since calls come in few shapes."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import arch_of
from ..operators import Arguments, CachedArguments
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
    """The shapes of a call, and by name what its kernels are launched with."""

    def __init__(self, key: DenseKey, arch: int | None):
        if arch is None:
            arch = arch_of(key.device) if key.device.type == "cuda" else 0
        call = key.arguments
        slopes, cu_q = call.alibi_slopes, call.cu_seqlens_q
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
        main, tail, value = tables.widths(d, e)
        per_batch = slopes is not None and len(Layout(*slopes).shape) == 2
        self.arguments = {
            **self.strides("qb qs qh", self.q), **self.strides("kb kt kg", self.k), **self.strides("vb vt vg", self.v),
            **self.strides("ob os oh", self.out),
            "stride_lb": 0 if self.packed else self.h * self.s, "stride_lh": self.s,
            "stride_slopes": self.h if per_batch else 0,
            "batch": self.batch, "heads": self.h, "kv_heads": self.g,
            "group": self.h // self.g, "GROUP": self.h // self.g,
            "s": self.s, "t": self.t, **scoring(call, self.s + self.t),
            "threshold": math.ceil(call.dropout_p * 2**32), "dropout_scale": 1 / (1 - call.dropout_p),
            "D": d, "D_MAIN": main, "D_TAIL": tail, "E": e, "E_MAIN": value,
            "PRECISION": "tf32" if key.tf32 else "ieee",
        }  # fmt: skip

    def strides(self, names: str, x: Layout) -> dict[str, int]:
        """Of batch, rows and heads; a packed tensor is a batch of one."""
        strides = (0, *x.strides[:2]) if self.packed else x.strides[:3]
        return {f"stride_{name}": n for name, n in zip(names.split(), strides, strict=True)}

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
        main, tail, value = (self.arguments[name] for name in ("D_MAIN", "D_TAIL", "E_MAIN"))
        return (of[first], rows, main), (of[first], rows, tail) if tail else None, (of[second], rows, value)

    def wave(self, heads: int) -> dict[str, int]:
        """How many heads run together."""
        pairs, group = self.pairs(heads), heads // self.g
        fits = pairs if self.packed else tables.heads_per_wave(self.problem, keys=self.t, pairs=pairs, group=group)
        return {"heads_per_wave": fits}


def scoring(call: Arguments | CachedArguments, reach: int) -> dict[str, float | None]:
    """The numbers of a mask and of scores; ``reach`` is a distance beyond which nothing is hidden."""
    left, right = (x if x is None else max(-reach, min(x, reach)) for x in (call.left, call.right))
    prefix = min(call.prefix, reach) or None
    return {"left": left, "right": right, "prefix": prefix, "scale": call.scale, "softcap": call.softcap}


@lru_cache(maxsize=4096)
def forward(key: DenseKey, tiles: LaunchConfig | None = None, arch: int | None = None) -> Launch:
    """The launch on q, k, v, out, lse and the optional tensors; with other ``tiles``, for another chip."""
    from .kernels.forward import forward

    x = DenseShapes(key, arch)
    tiles = tiles or tables.forward(x.problem, keys=x.length)
    programs = x.pairs(x.h) * x.blocks(x.s, tiles.block_m)
    arguments = x.arguments | x.wave(x.h)
    return Launch(forward, programs, arguments, tiles, x.descriptors(tiles, tiles.block_n, "k", "v"))


class Backward(NamedTuple):
    """The launches of a backward, and what its host needs to know.

    ``prepare`` takes out, dout, lse, dlse, lse2 and delta. ``keys`` takes q, k, v, dout, lse2, delta, dk, dv and the
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
    arguments = {
        **x.arguments, **x.strides("dob dos doh", dout), **x.strides("dqb dqs dqh", dq),
        **x.strides("dkb dkt dkg", dk), **x.strides("dvb dvt dvg", dv),
        "stride_sb": 0 if x.packed else x.h * blocks, "stride_sh": blocks,
        "stride_dlb": 0, "stride_dlh": 0, "stride_dls": 0,
    }  # fmt: skip
    if dlse is not None:
        strides = (0, *Layout(*dlse).strides) if x.packed else Layout(*dlse).strides
        arguments |= zip(("stride_dlb", "stride_dlh", "stride_dls"), strides, strict=True)
    return Backward(
        Launch(prepare, rows * x.h * -(-x.s // PREPARED.block_m), arguments, PREPARED),
        Launch(
            backward_keys, x.pairs(x.g) * x.blocks(x.t, of_keys.block_n), arguments | x.wave(x.g), of_keys,
            x.descriptors(of_keys, of_keys.block_m, "q", "dout"),
        ),
        Launch(
            backward_queries, x.pairs(x.h) * blocks, arguments | x.wave(x.h), of_queries,
            x.descriptors(of_queries, of_queries.block_n, "k", "v"),
        ),
        (rows, x.h, blocks),
        of_queries.block_m,
    )  # fmt: skip


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    return Layout(shape, torch.empty(shape, device="meta").stride(), dtype)


def _whole_lines(x: Layout) -> bool:
    """Whether every row of heads begins at a multiple of 16 bytes of the tensor, which descriptors need."""
    return all(n > 0 and n * x.dtype.itemsize % 16 == 0 for n in x.strides[:-1]) and 0 not in x.shape
