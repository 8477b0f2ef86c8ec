"""Attention over a cache by Triton kernels: from layouts to launches, and the operator."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...call import Call
from ...checks import INT32
from ...kv import KVView
from ...prepared import Run
from ...spec import arch_of
from ...watched import are_watched
from ..autograd import refuse_gradients
from ..flops import cached_flops
from ..operators import CACHED, CachedArguments, fake_cached, flat_over_view, outputs
from ..registration import register
from . import decode_tables, schedule
from .decode_tables import ENTRY, DecodeConfig
from .launch import Launch, block_of_rows, on_device
from .plans import Layout, layout, scoring
from .tables import LaunchConfig, power_of_two


class CachedKey(NamedTuple):
    """What decides the launches of a call: its arguments, with layouts in place of tensors, and the device."""

    device: torch.device
    tf32: bool
    aligned: bool  # queries and planes begin at multiples of 16 bytes
    arguments: CachedArguments


class DecodePlan(NamedTuple):
    """The launches of a call. ``decode`` takes :func:`_tensors`, then out, lse and the floats for parts; ``combine``
    those, the schedule, offsets and sinks, if there may be parts; ``floats`` is how many."""

    decode: Launch
    combine: Launch | None
    floats: int


def cached_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    run = torch.ops.attnlib.triton_cached if are_watched(call.q, call.q, call.q) else _cached
    return run(*flat_over_view(call, _schedule_of(call.kv)))


def prepare(call: Call) -> Run | None:
    """What runs a call without optional tensors again, on queries of the same layout."""
    kv, spec, q = call.kv, call.spec, call.q
    if (
        spec.strided or spec.dtype == torch.float32 or _schedule_of(kv) is None
    ):  # torch's settings decide fp32's products
        return None
    if not (q.numel() and kv.lengths.numel()):
        return None
    arguments = flat_over_view(call, _schedule_of(kv))
    plan = cached_plan(key_of(arguments))
    decode = plan.decode.bound(..., *_stored(arguments), ..., ..., ...)
    combine = None
    if plan.combine is not None:
        combine = plan.combine.bound(..., arguments.schedule, arguments.cu_seqlens_q, None, ..., ...)
    shape, lse_shape = (*q.shape[:-1], spec.value_dim), (*q.shape[:-3], q.shape[-2], q.shape[-3])

    def run(q: Tensor, k: None, v: None) -> tuple[Tensor, Tensor]:
        if q.device.index != torch._C._cuda_getDevice():
            return _cached(*arguments._replace(q=q))
        out, lse = q.new_empty(shape), q.new_empty(lse_shape, dtype=torch.float32)
        parts = lse if combine is None else lse.new_empty(plan.floats)
        decode(q, out, lse, parts)
        if combine is not None:
            combine(parts, out, lse)
        return out, lse

    return run


def _schedule_of(kv: KVView) -> Tensor | None:
    """The view's schedule; None if it is one for other layers, or of parts that are no sections, or the reverse."""
    if kv.schedule is None or (kv.schedule.shape[0], kv.schedule.shape[1] == 1) != (kv.layout.heads, kv.split_size > 0):
        return None
    return kv.schedule


def key_of(a: CachedArguments) -> CachedKey:
    """What decides the launches of a call with these arguments."""
    tf32 = a.q.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    apart = any(x is not None and x.data_ptr() & 15 for x in (a.q, a.k, a.v, a.k_tail))
    layouts = CachedArguments(
        layout(a.q), layout(a.k), layout(a.v), layout(a.k_tail), layout(a.k_scale), layout(a.v_scale),
        layout(a.table), layout(a.starts), layout(a.lengths), layout(a.cu_seqlens_q), layout(a.schedule),
        layout(a.alibi_slopes), layout(a.sinks), layout(a.origin),
        a.left, a.right, a.prefix, a.scale, a.softcap, a.split_size,
    )  # fmt: skip
    return CachedKey(a.q.device, tf32, not apart, layouts)


def _stored(a: CachedArguments) -> tuple[Tensor | None, ...]:
    """All tensors but q in the order of the kernel's parameters, each plane being there."""
    planes = (a.k, a.k if a.k_tail is None else a.k_tail, a.value_plane)
    scales = (a.k_scale, a.k_scale if a.v is None else a.v_scale)
    of_queries = (a.cu_seqlens_q, a.alibi_slopes, a.sinks, a.origin)
    return *planes, *scales, a.table, a.starts, a.lengths, *of_queries, a.schedule


def _cached(*arguments):
    a = CachedArguments(*arguments)
    out, lse = outputs(a.q, a.value_plane)
    if not (out.numel() and a.lengths.numel()):
        return out.zero_(), lse.fill_(-torch.inf)
    with on_device(a.q):
        a = _readable(a)
        plan = cached_plan(key_of(a))
        parts = lse.new_empty(plan.floats)
        plan.decode(a.q, *_stored(a), out, lse, parts)
        if plan.combine is not None:
            plan.combine(parts, a.schedule, a.cu_seqlens_q, a.sinks, out, lse)
    return out, lse


def _readable(a: CachedArguments) -> CachedArguments:
    """The arguments with a schedule, and slopes and sinks as kernels read them, by position alone."""
    slopes, sinks = (x if x is None else x.contiguous() for x in (a.alibi_slopes, a.sinks))
    if a.schedule is not None:
        return a if slopes is sinks is None else a._replace(alibi_slopes=slopes, sinks=sinks)
    limit = min(INT32, a.table.shape[1] * a.k.shape[1])
    made = schedule.new_schedule_for(a.lengths.shape[0], a.k.shape[2], a.q.device, limit=limit, split_size=a.split_size)
    schedule.update_schedule(made, a.starts, a.lengths, limit=limit, reach=None, split_size=a.split_size)
    return a._replace(schedule=made, alibi_slopes=slopes, sinks=sinks)


class DecodeShapes:
    """What both kernels of a call are launched with."""

    def __init__(self, key: CachedKey, tiles: DecodeConfig | None, arch: int):
        self.key, x = key, key.arguments
        self.q, self.k = Layout(*x.q), Layout(*x.k)
        self.latent, self.packed = x.v is None, x.cu_seqlens_q is not None
        self.v = self.k if self.latent else Layout(*x.v)
        self.tail = Layout(*x.k_tail) if x.k_tail else None
        (_, self.page_size, self.g, self.d), self.e = self.k.shape, self.v.shape[-1]
        self.b, self.columns = Layout(*x.table).shape
        self.s, self.h = self.q.shape[-3:-1]
        self.group = self.h // self.g
        self.tokens = -(-self.s // max(1, self.b)) if self.packed else self.s  # of a sequence, on the mean
        self.one = not self.packed and self.s == 1
        self.native = arch > 0
        problem = self._problem(arch)
        self.tiles = tiles or (decode_tables.fixed if x.split_size else decode_tables.decode)(problem)
        self.tf32 = key.tf32 and decode_tables.may_use_tf32(problem)
        self.blocks = -(-self.tokens * self.group // self.tiles.block_m)
        self.level = 0 if x.split_size else decode_tables.level(self.tiles, self.blocks)
        self.room = max(1, decode_tables.room(schedule.processors(key.device), self.g) >> self.level)
        self.slots = decode_tables.slots(self.b, self.room)
        self.scheduled = self.tokens <= decode_tables.LONG or self.b < self.room
        if x.split_size:
            self.slots = self.b * -(-self.columns * self.page_size // x.split_size)
            self.scheduled = self.b * self.g * self.blocks < schedule.processors(key.device) * self.tiles.resident
        self.main, self.tail_width, self.width = decode_tables.widths_of(
            self.d, self.tail.shape[-1] if self.tail else 0, self.e
        )
        out = (*self.q.shape[:-1], self.e)
        strides = torch.empty(out, device="meta").stride()
        self.of_out = (0, *strides[:2]) if self.packed else strides[:3]
        self.of_lse = (0, self.s) if self.packed else (self.h * self.s, self.s)
        self.stride = Layout(*x.schedule).shape[2] * ENTRY * self.level

    def _problem(self, arch: int) -> decode_tables.Problem:
        planes = (self.k, self.tail) if self.tail else (self.k,)
        return decode_tables.Problem(
            rows=decode_tables.rows(self.s, self.b, self.group) if self.packed else self.s * self.group,
            head_dim=self.d,
            tail=self.tail.shape[-1] if self.tail else 0,
            value_dim=self.e,
            itemsize=4 if self.q.dtype.itemsize > 2 else self.k.dtype.itemsize,
            latent=self.latent,
            one=self.one,
            page_size=0 if self.columns == 1 else self.page_size,
            arch=arch,
            aligned=self.key.aligned and all(map(_in_rows, planes)),
        )

    def splits(self) -> int:
        """Programs of a schedule, of which each has a split of a sequence."""
        return (self.slots + self.packed) * self.g * self.blocks  # packed, one more slot for what follows the last

    def programs(self) -> int:
        """Of the decode kernel."""
        blocks = self.b * self.blocks
        if self.packed:
            blocks = self.s * self.group // self.tiles.block_m + self.b + 1  # with a partial block for each
        if not self.scheduled:
            return blocks * self.g
        return self.splits() + (-(-blocks // self.blocks) * self.blocks * self.g if self.packed else 0)

    def arguments(self) -> dict:
        """By name, what both kernels are launched with."""
        x, tiles = self.key.arguments, self.tiles
        rest = self.tail.shape[-1] if self.tail else 0
        capacity = self.columns * self.page_size
        scales = [Layout(*y).strides if y else (0, 0, 0) for y in (x.k_scale, x.k_scale if self.latent else x.v_scale)]
        per_batch = x.alibi_slopes is not None and len(Layout(*x.alibi_slopes).shape) == 2
        return {
            **_named("qb qs qh", (0, *self.q.strides[:2]) if self.packed else self.q.strides[:3]),
            **_named("kp kt kg", self.k.strides[:3]), **_named("tp tt tg", (self.tail or self.k).strides[:3]),
            **_named("vp vt vg", self.v.strides[:3]),
            **_named("ksp kst ksg", scales[0]), **_named("vsp vst vsg", scales[1]),
            **_named("ob os oh", self.of_out), **_named("lb lh", self.of_lse),
            "stride_table": Layout(*x.table).strides[0], "stride_slopes": self.h if per_batch else 0,
            "pages": self.k.shape[0], "batch": self.b, "group": self.group, "s": self.s, "slots": self.slots,
            "schedule_offset": self.stride, "limit": min(INT32, capacity), **scoring(x, capacity + self.s),
            "D": self.d + rest, "D_MAIN": self.main, "D_TAIL": self.tail_width, "TAIL": 0 if rest else self.main,
            "E": self.e, "E_MAIN": self.width, "LATENT": self.latent, "ONE": self.one, "SCHEDULED": self.scheduled,
            "SPLIT_SIZE": x.split_size, "FULL": tiles.tma or not (self.one or x.split_size), "NATIVE": self.native,
            "PAGE": 0 if self.columns == 1 else self.page_size, "KV_HEADS": self.g,
            "EDGE": decode_tables.EDGE if tiles.tma else tiles.block_n,
            "BLOCKS": self.blocks if self.scheduled or not self.packed else 1,
            "TF32": self.tf32,
        }  # fmt: skip


@lru_cache(maxsize=4096)
def cached_plan(key: CachedKey, tiles: DecodeConfig | None = None, arch: int | None = None) -> DecodePlan:
    """The launches of a call; with other ``tiles`` than the tables', for another chip."""
    from .kernels.decode import decode

    if arch is None:
        arch = arch_of(key.device) if key.device.type == "cuda" else 0
    x = DecodeShapes(key, tiles, arch)
    tiles, blocks = x.tiles, (None, None)
    if tiles.tma:
        blocks = ((1, tiles.block_n, x.main), (2, tiles.block_n, x.tail_width) if x.tail else None)
    config = LaunchConfig(tiles.block_m, tiles.block_n, tiles.stages, tiles.warps, tiles.tma)
    launch = Launch(decode, x.programs(), x.arguments(), config, blocks, block_of_rows)
    if not x.scheduled:
        return DecodePlan(launch, None, 0)
    return DecodePlan(launch, _combine(x), x.splits() * tiles.block_m * (x.width + 1))


def _combine(x: DecodeShapes) -> Launch:
    from .kernels.split_kv import combine

    few = x.room // max(1, x.b) <= 8  # parts of a sequence, if all are alike
    channels = x.width if few or x.width <= 128 else 64
    rows = x.blocks * x.tiles.block_m if x.packed else x.s * x.group
    together = rows if x.b >= x.room else 1  # where few sequences will have parts, few programs
    groups, tiles = -(-rows // together), x.width // channels
    arguments = x.arguments() | {
        "lines": x.splits() * x.tiles.block_m, "GROUPS": groups, "ROWS": together, "WIDTH": channels, "TILES": tiles,
        "MAX_SPLITS": power_of_two(x.room + 1), "AT_ONCE": 16 if channels > 64 else 64,
    }  # fmt: skip
    return Launch(combine, x.b * x.g * groups * tiles, arguments, LaunchConfig(x.tiles.block_m, 0, 1, 4))


def _in_rows(plane: Layout) -> bool:
    """Whether descriptors can load a plane: as rows of a multiple of 16 bytes, one after the other."""
    _, size, g, width = plane.shape
    return plane.strides[:3] == (size * g * width, g * width, width) and width * plane.dtype.itemsize % 16 == 0


def _named(names: str, strides: tuple[int, ...]) -> dict[str, int]:
    return {f"stride_{name}": n for name, n in zip(names.split(), strides, strict=True)}


_library = register(((f"triton_cached{CACHED}", _cached, fake_cached, cached_flops),))
if _library is not None:
    refuse_gradients("triton_cached", _library)
