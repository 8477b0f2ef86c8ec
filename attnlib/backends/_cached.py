"""Attention over a cache by Triton kernels: from layouts to launches, the operator, and the schedule of parts."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.layout import KVView
from ..counts import INT32
from ..kernels import decode_launch
from ..kernels.decode_launch import ENTRY, GRAIN, LEVELS, DecodeConfig
from ..kernels.launch import LaunchConfig, power_of_two
from ..spec import AttentionSpec, arch_of
from ..terms import Terms
from ._autograd import are_watched, refuse_gradients
from ._flops import cached_flops
from ._launch import Launch, block_of_rows, on_device
from ._plans import Layout, layout
from ._schema import NUMBERS, outputs, register

INTERPRETED = 2  # multiprocessors of what is no GPU


class Call(NamedTuple):
    """What decides the launches of a call: devices, layouts, numbers."""

    device: torch.device
    tf32: bool
    aligned: bool
    q: Layout
    k: Layout
    v: Layout | None
    k_tail: Layout | None
    k_scale: Layout | None
    v_scale: Layout | None
    table: Layout
    starts: Layout
    lengths: Layout
    cu_q: Layout | None
    schedule: Layout | None
    slopes: Layout | None
    sinks: Layout | None
    left: int | None
    right: int | None
    prefix: int
    scale: float
    softcap: float | None
    section: int


class Plan(NamedTuple):
    """The launches of a call. ``decode`` takes the operator's tensors, then out, lse and the floats for parts;
    ``combine`` those, the schedule, offsets and sinks, if there may be parts; ``floats`` is how many."""

    decode: Launch
    combine: Launch | None
    floats: int


def attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    q = q.contiguous() if "q" in spec.strided else q
    run = torch.ops.attnlib.triton_cached if are_watched(q, q, q) else _cached
    return run(q, *_given(kv), terms.alibi_slopes, terms.sinks, *_numbers(kv, spec, terms))


def repeated(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> Callable | None:
    """What runs a call without tensor terms again, on queries of the same layout."""
    if spec.strided or spec.dtype == torch.float32 or _given(kv)[9] is None:  # torch's settings decide fp32's products
        return None
    if not (q.numel() and kv.lengths.numel()):
        return None
    tensors, numbers = (*_given(kv), None, None), _numbers(kv, spec, terms)
    plan = cached_plan(_call(q, tensors, numbers))
    decode = plan.decode.bound(..., *_arguments(tensors), ..., ..., ...)
    combine = None if plan.combine is None else plan.combine.bound(..., tensors[9], tensors[8], None, ..., ...)
    shape, lse_shape = (*q.shape[:-1], spec.value_dim), (*q.shape[:-3], q.shape[-2], q.shape[-3])

    def run(q: Tensor) -> tuple[Tensor, Tensor]:
        if q.device.index != torch._C._cuda_getDevice():
            return _cached(q, *tensors, *numbers)
        out, lse = q.new_empty(shape), q.new_empty(lse_shape, dtype=torch.float32)
        parts = lse if combine is None else lse.new_empty(plan.floats)
        decode(q, out, lse, parts)
        if combine is not None:
            combine(parts, out, lse)
        return out, lse

    return run


def _given(kv: KVView) -> tuple:
    """The tensors of a view. One may be passed to an operator once: a latent's value plane and scale are its key's."""
    v, v_scale = (None, None) if kv.layout.is_latent else (kv.v, kv.v_scale)
    schedule = kv.schedule
    if schedule is not None and (schedule.shape[0], schedule.shape[1] == 1) != (kv.layout.heads, kv.section > 0):
        schedule = None  # one for other layers, or of parts that are no sections, or the reverse
    return kv.k, v, kv.k_tail, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q, schedule


def _numbers(kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple:
    mask = spec.mask
    return mask.left, mask.right, mask.prefix, terms.scale, terms.softcap, kv.section


def _call(q: Tensor, tensors: tuple, numbers: tuple) -> tuple:
    """The Call of an operator's arguments, as a plain tuple."""
    tf32 = q.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    planes = [x for x in tensors[:3] if x is not None]
    aligned = not any(x.data_ptr() & 15 for x in (q, *planes))
    return (q.device, tf32, aligned, layout(q), *map(layout, tensors), *numbers)


def _arguments(tensors: tuple) -> tuple:
    """The operator's tensors but q as the kernel takes them, each of its planes being there."""
    k, v, k_tail, k_scale, v_scale, table, starts, lengths, cu_q, schedule, slopes, sinks = tensors
    planes = (k, k if k_tail is None else k_tail, k if v is None else v)
    return (*planes, k_scale, k_scale if v is None else v_scale, table, starts, lengths, cu_q, slopes, sinks, schedule)


def _cached(q, *extras):
    tensors, numbers = extras[:12], extras[12:]
    k, v, *_, starts, lengths, _, schedule, slopes, sinks = tensors
    out, lse = outputs(q, k if v is None else v)
    if not (out.numel() and lengths.numel()):
        return out.zero_(), lse.fill_(-torch.inf)
    with on_device(q):
        if schedule is None:
            limit, section = min(INT32, tensors[5].shape[1] * k.shape[1]), numbers[-1]
            schedule = new_schedule(lengths.shape[0], k.shape[2], q.device, limit=limit, section=section)
            update_schedule(schedule, starts, lengths, limit=limit, reach=None, section=section)
        tensors = (*tensors[:9], schedule, *(None if x is None else x.contiguous() for x in (slopes, sinks)))
        plan = cached_plan(_call(q, tensors, numbers))
        parts = lse.new_empty(plan.floats)
        plan.decode(q, *_arguments(tensors), out, lse, parts)
        if plan.combine is not None:
            plan.combine(parts, schedule, tensors[8], tensors[11], out, lse)
    return out, lse


class _Shapes:
    """What both kernels of a call are launched with."""

    def __init__(self, x: Call, tiles: DecodeConfig | None, arch: int):
        self.call = x
        self.q, self.k = Layout(*x.q), Layout(*x.k)
        self.latent, self.packed = x.v is None, x.cu_q is not None
        self.v = self.k if self.latent else Layout(*x.v)
        self.tail = Layout(*x.k_tail) if x.k_tail else None
        (_, self.page_size, self.g, self.d), self.e = self.k.shape, self.v.shape[-1]
        self.b, self.columns = x.table[0]
        self.s, self.h = self.q.shape[-3:-1]
        self.group = self.h // self.g
        self.tokens = -(-self.s // max(1, self.b)) if self.packed else self.s  # of a sequence, on the mean
        self.one = not self.packed and self.s == 1
        self.native = arch > 0
        problem = self._problem(arch)
        self.tiles = tiles or (decode_launch.fixed if x.section else decode_launch.decode)(problem)
        self.tf32 = x.tf32 and decode_launch.may_use_tf32(problem)
        self.blocks = -(-self.tokens * self.group // self.tiles.block_m)
        self.level = 0 if x.section else decode_launch.level(self.tiles, self.blocks)
        self.room = max(1, decode_launch.room(processors(x.device), self.g) >> self.level)
        self.slots = decode_launch.slots(self.b, self.room)
        self.scheduled = self.tokens <= decode_launch.LONG or self.b < self.room
        if x.section:
            self.slots = self.b * -(-self.columns * self.page_size // x.section)
            self.scheduled = self.b * self.g * self.blocks < processors(x.device) * self.tiles.resident
        self.main, self.tail_width, self.width = decode_launch.widths_of(
            self.d, self.tail.shape[-1] if self.tail else 0, self.e
        )
        out = (*self.q.shape[:-1], self.e)
        strides = torch.empty(out, device="meta").stride()
        self.of_out = (0, *strides[:2]) if self.packed else strides[:3]
        self.of_lse = (0, self.s) if self.packed else (self.h * self.s, self.s)
        self.stride = x.schedule[0][2] * ENTRY * self.level

    def _problem(self, arch: int) -> decode_launch.Problem:
        planes = (self.k, self.tail) if self.tail else (self.k,)
        return decode_launch.Problem(
            rows=decode_launch.rows(self.s, self.b, self.group) if self.packed else self.s * self.group,
            head_dim=self.d,
            tail=self.tail.shape[-1] if self.tail else 0,
            value_dim=self.e,
            itemsize=4 if self.q.dtype.itemsize > 2 else self.k.dtype.itemsize,
            latent=self.latent,
            one=self.one,
            page_size=0 if self.columns == 1 else self.page_size,
            arch=arch,
            aligned=self.call.aligned and all(map(_in_rows, planes)),
        )

    def parts(self) -> int:
        """Programs of a schedule, of which each has a part of a sequence."""
        return (self.slots + self.packed) * self.g * self.blocks  # packed, one more slot for what follows the last

    def programs(self) -> int:
        """Of the decode kernel."""
        blocks = self.b * self.blocks
        if self.packed:
            blocks = self.s * self.group // self.tiles.block_m + self.b + 1  # with a partial block for each
        if not self.scheduled:
            return blocks * self.g
        return self.parts() + (-(-blocks // self.blocks) * self.blocks * self.g if self.packed else 0)

    def constants(self) -> dict:
        """Of the decode kernel; of those, ``combine`` takes what it knows."""
        x, tiles = self.call, self.tiles
        rest = self.tail.shape[-1] if self.tail else 0
        return {
            "D": self.d + rest, "D_MAIN": self.main, "D_TAIL": self.tail_width, "TAIL": 0 if rest else self.main,
            "E": self.e, "E_MAIN": self.width, "LATENT": self.latent, "SCALED": x.k_scale is not None,
            "LEFT": x.left is not None, "RIGHT": x.right is not None, "PREFIX": x.prefix > 0, "VARLEN": self.packed,
            "ONE": self.one, "SOFTCAP": x.softcap is not None, "SLOPES": x.slopes is not None,
            "SINKS": x.sinks is not None, "SCHEDULED": self.scheduled,
            "SECTION": x.section, "CLEAR": tiles.tma or not (self.one or x.section),
            "NATIVE": self.native,
            "PAGE": 0 if self.columns == 1 else self.page_size, "KV_HEADS": self.g,
            "EDGE": decode_launch.EDGE if tiles.tma else tiles.block_n,
            "BLOCKS": self.blocks if self.scheduled or not self.packed else 1,
            "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip

    def numbers(self) -> tuple:
        """Of the decode kernel."""
        x, q = self.call, self.q
        capacity = self.columns * self.page_size
        reach = capacity + self.s  # beyond which nothing is hidden
        scales = (x.k_scale, x.k_scale if self.latent else x.v_scale)
        return (
            *((0, *q.strides[:2]) if self.packed else q.strides[:3]),
            *(n for y in (self.k, self.tail or self.k, self.v) for n in y.strides[:3]),
            *(n for y in scales for n in (y[1] if y else (0, 0, 0))), self.k.shape[0], x.table[1][0],
            *self.of_out, *self.of_lse, self.h if x.slopes and len(x.slopes[0]) == 2 else 0,
            self.b, self.group, self.s, self.slots, self.stride, min(INT32, capacity),
            _clamp(x.left, reach), _clamp(x.right, reach), min(x.prefix, reach), x.scale, x.softcap or 1.0,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def cached_plan(call: tuple, tiles: DecodeConfig | None = None, arch: int | None = None) -> Plan:
    """The launches of a call; with other ``tiles`` than the tables', for another chip."""
    from ..kernels.decode import decode

    device = call[0]
    if arch is None:
        arch = arch_of(device) if device.type == "cuda" else 0
    x = _Shapes(Call(*call), tiles, arch)
    tiles, blocks = x.tiles, (None, None)
    if tiles.tma:
        blocks = ((1, tiles.block_n, x.main), (2, tiles.block_n, x.tail_width) if x.tail else None)
    config = LaunchConfig(tiles.block_m, tiles.block_n, tiles.stages, tiles.warps, tiles.tma)
    launch = Launch(decode, x.programs(), x.numbers(), x.constants(), config, blocks, block_of_rows)
    if not x.scheduled:
        return Plan(launch, None, 0)
    return Plan(launch, _combine(x), x.parts() * tiles.block_m * (x.width + 1))


def _combine(x: _Shapes) -> Launch:
    from ..kernels.parts import combine

    few = x.room // max(1, x.b) <= 8  # parts of a sequence, if all are alike
    channels = x.width if few or x.width <= 128 else 64
    rows = x.blocks * x.tiles.block_m if x.packed else x.s * x.group
    together = rows if x.b >= x.room else 1  # where few sequences will have parts, few programs
    groups, tiles = -(-rows // together), x.width // channels
    constants = x.constants() | {
        "GROUPS": groups, "ROWS": together, "WIDTH": channels, "TILES": tiles,
        "MOST": power_of_two(x.room + 1), "SOME": 16 if channels > 64 else 64,
    }  # fmt: skip
    numbers = (x.parts() * x.tiles.block_m, *x.of_out, *x.of_lse, x.b, x.group, x.s, x.stride)
    return Launch(combine, x.b * x.g * groups * tiles, numbers, constants, LaunchConfig(x.tiles.block_m, 0, 1, 4))


def _in_rows(plane: Layout) -> bool:
    """Whether descriptors can load a plane: as rows of a multiple of 16 bytes, one after the other."""
    _, size, g, width = plane.shape
    return plane.strides[:3] == (size * g * width, g * width, width) and width * plane.dtype.itemsize % 16 == 0


def _clamp(bound: int | None, reach: int) -> int:
    return 0 if bound is None else max(-reach, min(bound, reach))


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED


def new_schedule(rows: int, heads: int, device: torch.device, *, limit: int = 0, section: int = 0) -> Tensor:
    """Room for a schedule of up to ``rows`` sequences, ``[heads, levels, slots, 8]``, which all KV heads share; or for
    parts of a ``section`` each, of at most ``limit`` tokens a sequence."""
    levels, slots = LEVELS, decode_launch.slots(rows, decode_launch.room(processors(device), heads))
    if section:
        levels, slots = 1, rows * -(-limit // section)
    return torch.empty(levels, slots, ENTRY, dtype=torch.int32, device=device).expand(heads, -1, -1, -1)


def update_schedule(
    schedule: Tensor, starts: Tensor, lengths: Tensor, *, limit: int, reach: int | None, section: int = 0
) -> None:
    """Cut sequences of these starts and lengths (at most ``limit``; the last ``reach`` tokens of them) into parts."""
    heads, levels, slots, _ = schedule.shape
    room = slots if section else decode_launch.room(processors(schedule.device), heads)
    numbers = (lengths.shape[0], slots, room, limit, limit if reach is None else reach)
    with on_device(schedule):
        _schedule_plan(schedule.device, numbers, levels, section or GRAIN)(starts, lengths, schedule)


@lru_cache(maxsize=4096)
def _schedule_plan(device: torch.device, numbers: tuple, levels: int, grain: int) -> Launch:
    from ..kernels.parts import schedule

    lanes = power_of_two(numbers[0])
    constants = {"ROWS": lanes, "PARTS": max(1, 128 // lanes), "GRAIN": grain}
    return Launch(schedule, levels, numbers, constants, LaunchConfig(0, 0, 1, 4))


def _fake_cached(q, k, v, *rest):
    return outputs(q, k if v is None else v)


_library = register(
    (
        (
            "triton_cached(Tensor q, Tensor k, Tensor? v, Tensor? k_tail, Tensor? k_scale, Tensor? v_scale, "
            "Tensor table, Tensor starts, Tensor lengths, Tensor? cu_seqlens_q, Tensor? schedule, "
            f"Tensor? alibi_slopes, Tensor? sinks, {NUMBERS}, int section) -> (Tensor, Tensor)",
            _cached,
            _fake_cached,
            cached_flops,
        ),
    )
)
if _library is not None:
    refuse_gradients("triton_cached", _library)
