"""The scores of index queries for index keys in Triton: the operator and its launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from ....call.spec import arch_of, is_interpreted
from ....fp8 import E4M3
from ....internal.checks import INT32
from ...flops import index_flops
from ...registration import Operator, register
from ..launching import layouts
from ..launching.config import LaunchConfig, fitting, power_of_two
from ..launching.launch import Launch, against, cached_plan
from ..launching.layouts import Key, key_of, strides
from .tables import ROOMY

# Each table lists (widest index head, tiles of rows and keys); a row is an index head of a query. With 4k
# queries, 32k keys and 64 heads of 128, SUMMED computes 620 TFLOP/s, and the first tiles of LARGE 492 (bf16,
# H100, 2026-11-28). The others are not timed.
WIDEST = 256
SUMMED = LaunchConfig(256, 64, 2, 4)  # for sums over heads of up to 128 channels (sm_100: 248 bytes spill)
LARGE = ((128, LaunchConfig(128, 128, 3, 8)), (WIDEST, LaunchConfig(128, 64, 2, 8)))
SMALL = ((128, LaunchConfig(64, 64, 2, 4)), (WIDEST, LaunchConfig(64, 32, 2, 4)))
FP32 = ((128, LaunchConfig(32, 32, 1, 8)), (WIDEST, LaunchConfig(16, 32, 1, 8)))
POOLED = 128  # most keys of a block, and most channels, of which a tile fits into 99 KB of shared memory
MOST_HEADS = 128  # in a tile, whose rows are whole queries
SPAN = 32  # tiles of keys of a program, which loads its queries once
NAME = "triton_index_scores"
TENSORS = "Tensor q, Tensor k, Tensor? weights, Tensor ends, Tensor? starts, Tensor? table, Tensor? k_scale"
SCHEMA = f"({TENSORS}, float scale, bool relu, bool by_head, SymInt pool, SymInt tokens) -> Tensor"


class IndexArguments(NamedTuple):
    """The arguments of the operator: queries ``[b, s, HI, dI]``, keys ``[b, t, dI]``, weights ``[b, s, HI]``.

    A query sees the keys before its number in ``ends`` int32 ``[b, s]``, from number ``starts`` int32 ``[b]``
    on. ``by_head``: heads are not summed up. Of each ``pool`` keys, the result has the largest score. In a
    cache, keys are ``[pages, page, dI]``, with a scale ``[pages, page]`` each if they are in fp8, and
    ``table`` ``[b, n]`` has the pages of the ``tokens`` tokens of each sequence.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None
    ends: Tensor
    starts: Tensor | None
    table: Tensor | None
    k_scale: Tensor | None
    scale: float
    relu: bool
    by_head: bool
    pool: int
    tokens: int


def against_index_scores(queries: Tensor, keys: Tensor) -> list[str]:
    """Return the reasons why the kernel cannot compute the scores of these queries and keys."""
    device, (heads, width) = queries.device, queries.shape[-2:]
    interpreted = device.type == "cpu" and is_interpreted()
    reasons = against(queries.dtype, device.type, arch_of(device), interpreted=interpreted)
    if keys.dtype not in (queries.dtype, E4M3):
        reasons.append(f"needs queries and keys of one dtype, got {queries.dtype} and {keys.dtype}")
    elif keys.dtype == E4M3 and 0 < arch_of(device) < 89:
        reasons.append(f"reads keys in e4m3 from sm_89 on, got sm_{arch_of(device)}")
    if heads > MOST_HEADS:
        reasons.append(f"takes up to {MOST_HEADS} index heads, got {heads}")
    if width > WIDEST:
        reasons.append(f"takes index heads of up to {WIDEST} channels, got {width}")
    return reasons


def can_pool(queries: Tensor, size: int) -> bool:
    """True if the kernel can return the largest scores of ``queries`` for blocks of ``size`` keys."""
    most = POOLED if queries.dtype.itemsize == 2 else FP32[0][1].block_n  # larger tiles of fp32 spill
    return size & (size - 1) == 0 and size <= most and queries.shape[-1] <= POOLED


def _run(*given) -> Tensor:
    a = IndexArguments(*given)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.q, a.k))
    weights = None if a.weights is None else a.weights.float().contiguous()
    starts = None if a.starts is None else a.starts.int().contiguous()
    a = a._replace(q=q, k=k, weights=weights, ends=a.ends.int().contiguous(), starts=starts)
    result = _allocated(a)
    if result.numel():
        plan(key_of(a, q, k)).on(a._asdict() | {"result": result})
    return result


def _allocated(a: IndexArguments) -> Tensor:
    """Allocate fp32 scores ``[b, s, c, t]``, or of blocks of keys."""
    (b, s, heads, _), blocks = a.q.shape, -(-a.tokens // a.pool)
    return a.q.new_empty((b, s, heads if a.by_head else 1, blocks), dtype=torch.float32)


def _fake(*given) -> Tensor:
    return _allocated(IndexArguments(*given))


@cached_plan
def plan(key: Key) -> Launch:
    """Return the launch that computes the scores of a call.

    Raises:
        NotImplementedError: the call has too many tiles to count in int32.
    """
    from ..kernels.index_scores import index_scores

    a = key.layouts
    (b, s, heads, d), t = a.q.shape, a.tokens
    pages, page_size, _ = a.k.shape
    paged = a.table is not None and a.table.shape[1] > 1
    heads, groups = (1, heads) if a.by_head else (heads, 1)
    padded = 1 << (heads - 1).bit_length()
    table = FP32 if a.q.dtype.itemsize > 2 else LARGE if arch_of(key.device) in ROOMY else SMALL
    tiles = fitting(table, d)
    if table is LARGE and arch_of(key.device) == 90 and d <= 128 and heads > 1 and a.pool <= SUMMED.block_n:
        tiles = SUMMED
    tiles = tiles._replace(block_m=max(padded, min(tiles.block_m, power_of_two(s * padded))))
    if heads == 1:  # tiles of 128 x 128 scores spill (sm_90, triton 3.7.1)
        tiles = tiles._replace(block_n=min(64, tiles.block_n))
    tiles = tiles._replace(block_n=max(a.pool, tiles.block_n))
    blocks = b * groups * -(-s // (tiles.block_m // padded))
    span = SPAN * tiles.block_n
    while span > tiles.block_n and blocks * -(-t // span) < 2 * layouts.processors(key.device):
        span //= 2
    if (programs := blocks * -(-t // span)) > INT32:
        raise NotImplementedError(f"triton: int32 does not count {programs} tiles of index scores")
    arguments = {
        **strides("bsh", q=a.q._replace(strides=a.q.strides[:3])),
        **strides("bt", k=a.k._replace(strides=a.k.strides[:2])),
        **strides("bt", x=a.k_scale), "stride_table": 0 if a.table is None else a.table.strides[0],
        "pages": pages, "PAGE": page_size if paged else 0,
        "s": s, "t": t, "groups": groups, "span": span, "scale": a.scale,
        "HEADS": heads, "HEADS_ALL": padded, "D": d, "D_ALL": power_of_two(d), "RELU": a.relu, "POOL": a.pool,
        "PRECISION": "tf32" if key.tf32 else "ieee",
    }  # fmt: skip
    return Launch(index_scores, programs, arguments, tiles)


LIBRARY = register(Operator(NAME + SCHEMA, _run, _fake, index_flops))


def index_scores(*arguments) -> Tensor:
    """Return the scores ``[b, s, c, t]`` of :class:`IndexArguments`: ``c`` is 1, or HI with ``by_head``."""
    return torch.ops.attnlib.triton_index_scores(*arguments)
