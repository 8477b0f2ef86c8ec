"""FlashAttention-2's backward in one pass, kept only for comparison: it adds dq up in memory, by fp32
atomics.

Its five products a tile are two fewer than those of the two passes in
:mod:`attnlib.backends._triton.kernels.backward`, and the order of its sums, hence the last bits of dq, change
from run to run. Plain self-attention alone: full or causal, as many KV heads as query heads, one head
dimension, a power of two. ``python tests/kernels/atomics.py`` times both on a GPU.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, attention_with_lse
from attnlib import attention as two_passes
from attnlib.backends._triton.kernels.backward import prepare
from attnlib.backends._triton.kernels.band import tile_at, tiles_of
from attnlib.backends._triton.kernels.scores import LOG2E
from attnlib.backends._triton.kernels.tile import (
    ChannelBlocks,
    Channels,
    Rows,
    TilePlace,
    load_tile,
    store_tile,
)
from attnlib.backends._triton.launching.config import LaunchConfig

# By bytes of a number, and by the widest head; more keys mean fewer additions. sm_90, compiled by triton 3.6
# and 3.7.
LARGE = (
    (2, 64, LaunchConfig(64, 128, 2, 8)),
    (
        2,
        128,
        LaunchConfig(64, 128, 2, 8),
    ),  # spills 144 to 264 bytes; 32 x 128 none, but leaves the wgmma instructions
    (4, 128, LaunchConfig(32, 64, 1, 8)),
)
SMALL = (
    (2, 64, LaunchConfig(64, 64, 2, 4)),
    (2, 128, LaunchConfig(64, 64, 2, 8)),
    (4, 128, LaunchConfig(16, 32, 1, 4)),
)
# Each with the shape of q, k and v, and their dtype. The last is small: fp32 products are not for the matrix
# units.
CASES = (
    ("d64 full 8k", (2, 8192, 32, 64), FULL, torch.bfloat16),
    ("d64 causal 8k", (2, 8192, 32, 64), CAUSAL, torch.bfloat16),
    ("d128 full 8k", (2, 8192, 16, 128), FULL, torch.bfloat16),
    ("d128 causal 8k", (2, 8192, 16, 128), CAUSAL, torch.bfloat16),
    ("d64 full 8k, fp32", (4, 8192, 1, 64), FULL, torch.float32),
)
ROUNDS = 3


@triton.jit(do_not_specialize=["heads", "s"])
def backward_once(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, heads, s, scale,
    D: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv and adds to dq (fp32, zeros before, not scaled yet), all ``[b, s, h, d]`` and
    contiguous.

    One program for each block of keys, head and sequence; tiles are transposed, ``[BLOCK_N, BLOCK_M]``.
    """
    along = tl.cdiv(s, BLOCK_N)
    pair, n0 = (tl.program_id(0) // along).to(tl.int64), tl.program_id(0) % along * BLOCK_N
    base, row = (pair // heads * s * heads + pair % heads) * D, heads * D
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    place = TilePlace(pair // heads, 0, pair % heads)
    channels: tl.constexpr = Channels(D, D, 0)
    q_rows, dout_rows = Rows(q_ptr, s * row, row, D), Rows(dout_ptr, s * row, row, D)
    k_rows, v_rows = Rows(k_ptr, s * row, row, D), Rows(v_ptr, s * row, row, D)
    dk_rows, dv_rows = Rows(dk_ptr, s * row, row, D), Rows(dv_ptr, s * row, row, D)
    k = load_tile(k_rows, place, n0, n0 + n < s, channels, True).main
    v = load_tile(v_rows, place, n0, n0 + n < s, channels, True).main
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)

    low, all_low = 0, 0
    if CAUSAL:
        low, all_low = n0, n0 + BLOCK_N - 1
    all_low = tl.where(n0 + BLOCK_N > s, s, all_low)
    tiles = tiles_of(low, s, all_low, s, BLOCK_M, BLOCK_M)
    for MASKED in tl.static_range(2):
        for tile in tl.range(0, tiles.masked if MASKED else tiles.full, num_stages=STAGES):
            m0 = tile_at(tile, tiles, MASKED, BLOCK_M, BLOCK_M)
            inside = m0 + m < s
            q = load_tile(q_rows, place, m0, inside, channels, True).main
            dout = load_tile(dout_rows, place, m0, inside, channels, True).main
            lse2 = tl.load(lse2_ptr + pair * s + m0 + m, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + pair * s + m0 + m, mask=inside, other=0.0)
            weights = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * (scale * LOG2E) - lse2[None, :])
            if MASKED:
                seen = inside[None, :] & (n0 + n < s)[:, None]
                if CAUSAL:
                    seen = seen & ((n0 + n)[:, None] <= (m0 + m)[None, :])
                weights = tl.where(seen, weights, 0.0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)
            ds = (weights * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            at = dq_ptr + base + tl.cast(m0, tl.int64) * row + (m[:, None] * row + d[None, :])
            tl.atomic_add(at, tl.dot(ds.T, k, input_precision=PRECISION), mask=inside[:, None], sem="relaxed")

    valid = n0 + n < s
    store_tile(dk_rows, place, n0, valid, ChannelBlocks(dk, dk), scale, valid[:, None], channels)
    store_tile(dv_rows, place, n0, valid, ChannelBlocks(dv, dv), 1.0, valid[:, None], channels)


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, tiles: tuple = LARGE) -> Tensor:
    """:func:`attnlib.attention` on the Triton backend, with the backward in one pass.

    Raises:
        NotImplementedError: not the plain self-attention that this is for.
    """
    d, itemsize = q.shape[-1], q.element_size()
    config = next((config for size, widest, config in tiles if size == itemsize and d <= widest), None)
    if (
        mask not in (FULL, CAUSAL)
        or not q.shape == k.shape == v.shape
        or config is None
        or d not in (16, 32, 64, 128)
    ):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise NotImplementedError(
            f"one pass: for full or causal attention of equal heads alone, got {mask} of {shapes}"
        )
    return _OnePass.apply(q.contiguous(), k.contiguous(), v.contiguous(), mask, config)


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, config):
        out, lse = attention_with_lse(q, k, v, mask=mask, backend="triton")
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.config = mask, config
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        (b, s, h, d), dout, config = q.shape, dout.contiguous(), ctx.config
        dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        strides = q.stride()[:3]
        with torch.cuda.device_of(q):
            prepare[(-(-s // 32) * b * h,)](
                out, dout, lse, None, lse2, delta, *strides, *strides, 0, 0, 0, h, s, E=d, E_MAIN=d,
                BLOCK_M=32,
            )  # fmt: skip
            backward_once[(-(-s // config.block_n) * b * h,)](
                q, k, v, dout, lse2, delta, dq, dk, dv, h, s, d**-0.5,
                D=d, CAUSAL=ctx.mask == CAUSAL, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                STAGES=config.stages, PRECISION="ieee", num_warps=config.warps, num_stages=config.stages,
            )  # fmt: skip
        return dq.mul_(d**-0.5).to(q.dtype), dk, dv, None, None


WAYS = MappingProxyType(
    {
        "two passes": partial(two_passes, backend="triton"),
        "one pass, large tiles": partial(attention, tiles=LARGE),
        "one pass, small tiles": partial(attention, tiles=SMALL),
    }
)


def milliseconds(
    shape: tuple[int, ...],
    mask: Mask,
    dtype: torch.dtype,
    device: str,
    clock: Callable = triton.testing.do_bench,
) -> dict[str, float]:
    """Of each backward, the median of rounds in turns, after checking that all give the same gradients."""
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = {name: way(*leaves, mask=mask) for name, way in WAYS.items()}
    calls = {
        name: partial(torch.autograd.grad, out, leaves, dout, retain_graph=True) for name, out in outs.items()
    }
    expected, *others = (call() for call in calls.values())
    for found in others:
        for x, y in zip(found, expected, strict=True):
            assert (x - y).float().norm() < 1e-2 * y.float().norm()
    taken = [
        {name: clock(call, rep=150, return_mode="median") for name, call in calls.items()}
        for _ in range(ROUNDS)
    ]
    return {name: median(round_[name] for round_ in taken) for name in calls}


def main() -> None:
    """Print the backward's milliseconds as a Markdown table, and how much faster two passes are than each."""
    print(f"| ms | {' | '.join(WAYS)} |\n|---|{'---:|' * len(WAYS)}")
    for name, shape, mask, dtype in CASES:
        first, *others = milliseconds(shape, mask, dtype, "cuda").values()
        print(f"| {name} | {first:.3g} | {' | '.join(f'{x:.3g} ({x / first:.2f}x)' for x in others)} |")


if __name__ == "__main__":
    main()
