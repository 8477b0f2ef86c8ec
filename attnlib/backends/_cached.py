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


class Plan(NamedTuple):
    """The launches of a call. ``decode`` takes the operator's tensors, then out, lse and the floats for parts;
    ``combine`` those, the schedule and offsets, if there may be parts; ``floats`` is how many."""

    decode: Launch
    combine: Launch | None
    floats: int


def attention(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    q = q.contiguous() if "q" in spec.strided else q
    return torch.ops.attnlib.triton_cached(q, *_given(kv), terms.alibi_slopes, terms.sinks, *_numbers(spec, terms))


def repeated(q: Tensor, kv: KVView, spec: AttentionSpec, terms: Terms) -> Callable | None:
    """What runs a call without tensor terms again, on queries of the same layout."""
    if spec.strided or spec.dtype == torch.float32 or _given(kv)[9] is None:  # torch's settings decide fp32's products
        return None
    if not (q.numel() and kv.lengths.numel()):
        return None
    tensors, numbers = (*_given(kv), None, None), _numbers(spec, terms)
    plan = cached_plan(_call(q, tensors, numbers))
    decode = plan.decode.bound(..., *_arguments(tensors), ..., ..., ...)
    combine = None if plan.combine is None else plan.combine.bound(..., tensors[9], tensors[8], ..., ...)
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
    if schedule is not None and schedule.shape[0] != kv.layout.heads:  # one for other layers
        schedule = None
    return kv.k, v, kv.k_tail, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q, schedule


def _numbers(spec: AttentionSpec, terms: Terms) -> tuple:
    mask = spec.mask
    return mask.left, mask.right, mask.prefix, terms.scale, terms.softcap


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
            schedule = new_schedule(lengths.shape[0], k.shape[2], q.device)
            limit = min(INT32, tensors[5].shape[1] * k.shape[1])
            update_schedule(schedule, starts, lengths, limit=limit, reach=None)
        tensors = (*tensors[:9], schedule, *(None if x is None else x.contiguous() for x in (slopes, sinks)))
        plan = cached_plan(_call(q, tensors, numbers))
        parts = lse.new_empty(plan.floats)
        plan.decode(q, *_arguments(tensors), out, lse, parts)
        if plan.combine is not None:
            plan.combine(parts, schedule, tensors[8], out, lse)
    return out, lse


@lru_cache(maxsize=4096)
def cached_plan(call: tuple, tiles: DecodeConfig | None = None, arch: int | None = None) -> Plan:
    """The launches of a call; with other ``tiles`` than the tables', for another chip."""
    from ..kernels.decode import combine, decode

    x = Call(*call)
    if arch is None:
        arch = arch_of(x.device) if x.device.type == "cuda" else 0
    q, k = Layout(*x.q), Layout(*x.k)
    latent, packed = x.v is None, x.cu_q is not None
    v = k if latent else Layout(*x.v)
    (pages, page_size, g, d), e = k.shape, v.shape[-1]
    tail_width = x.k_tail[0][-1] if x.k_tail else 0
    b, columns = x.table[0]
    s, h = q.shape[-3:-1]
    group = h // g
    tokens = -(-s // max(1, b)) if packed else s  # of a sequence, on the mean
    page_size = 0 if columns == 1 else page_size
    problem = decode_launch.Problem(
        tokens * group,
        d,
        tail_width,
        e,
        k.dtype.itemsize,
        latent,
        not packed and s == 1,
        page_size,
        arch,
        x.aligned and all(_in_rows(y) for y in (k, x.k_tail and Layout(*x.k_tail)) if y),
    )
    tiles = tiles or decode_launch.decode(problem)
    blocks = -(-tokens * group // tiles.block_m)
    level = decode_launch.level(tiles, blocks)
    room = max(1, decode_launch.room(processors(x.device), g) >> level)
    scheduled = tokens <= decode_launch.LONG or b < room
    slots = decode_launch.slots(b, room)
    programs = (slots + packed if scheduled else s * group // tiles.block_m + b + 1 if packed else b) * g
    programs *= blocks if scheduled or not packed else 1
    main, tail, width = decode_launch.widths_of(d, tail_width, e)
    lines = programs * tiles.block_m
    clear = tiles.tma or (not latent and (packed or s > 1))
    constants = {
        "D": d + tail_width if x.k_tail else d, "D_MAIN": main, "D_TAIL": tail, "TAIL": 0 if x.k_tail else main,
        "E": e, "E_MAIN": width, "LATENT": latent, "SCALED": x.k_scale is not None, "LEFT": x.left is not None,
        "RIGHT": x.right is not None, "PREFIX": x.prefix > 0, "VARLEN": packed, "ONE": not packed and s == 1,
        "SOFTCAP": x.softcap is not None, "SLOPES": x.slopes is not None, "SINKS": x.sinks is not None,
        "SCHEDULED": scheduled, "CLEAR": clear, "COLUMNS": tiles.columns, "PAGE": page_size, "KV_HEADS": g,
        "EDGE": decode_launch.EDGE if tiles.tma else tiles.block_n, "BLOCKS": blocks if scheduled or not packed else 1,
        "PRECISION": "tf32" if x.tf32 else "ieee",
    }  # fmt: skip
    reach = columns * k.shape[1] + s  # beyond which nothing is hidden
    bounds = (_clamp(x.left, reach), _clamp(x.right, reach), min(x.prefix, reach))
    out = Layout((*q.shape[:-1], e), torch.empty((*q.shape[:-1], e), device="meta").stride(), q.dtype)
    of_out = (0, *out.strides[:2]) if packed else out.strides[:3]
    of_lse = (0, s) if packed else (h * s, s)
    planes = (k, Layout(*x.k_tail) if x.k_tail else k, v)
    scales = (x.k_scale, x.k_scale if latent else x.v_scale)
    stride = x.schedule[0][2] * ENTRY * level
    numbers = (
        *((0, *q.strides[:2]) if packed else q.strides[:3]), *(n for y in planes for n in y.strides[:3]),
        *(n for y in scales for n in (y[1] if y else (0, 0, 0))), pages, x.table[1][0], *of_out, *of_lse,
        h if x.slopes and len(x.slopes[0]) == 2 else 0, b, group, s, slots, stride,
        min(INT32, columns * k.shape[1]), *bounds, x.scale, x.softcap or 1.0,
    )  # fmt: skip
    config = LaunchConfig(tiles.block_m, tiles.block_n, tiles.stages, tiles.warps, tiles.tma)
    described = ((1, tiles.block_n, main), (2, tiles.block_n, tail) if tail else None) if tiles.tma else (None, None)
    first = Launch(decode, programs, numbers, constants, config, described, block_of_rows)
    if not scheduled:
        return Plan(first, None, 0)
    most = power_of_two(room + 1)
    channels = width if room // max(1, b) <= 8 or width <= 128 else 64  # few parts are expected, or it is narrow
    rows = blocks * tiles.block_m if packed else s * group
    together = rows if b >= room else 1  # where few sequences will have parts, few programs
    groups = -(-rows // together)
    constants |= {
        "GROUPS": groups,
        "ROWS": together,
        "WIDTH": channels,
        "MOST": most,
        "SOME": 16 if channels > 64 else 64,
        "TILES": width // channels,
    }
    numbers = (lines, *of_out, *of_lse, b, group, s, stride)
    second = Launch(
        combine, b * g * groups * (width // channels), numbers, constants, LaunchConfig(tiles.block_m, 0, 1, 4)
    )
    return Plan(first, second, lines * (width + 1))


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


def new_schedule(rows: int, heads: int, device: torch.device) -> Tensor:
    """Room for a schedule of up to ``rows`` sequences, ``[heads, levels, slots, 8]``, which all KV heads share."""
    slots = decode_launch.slots(rows, decode_launch.room(processors(device), heads))
    return torch.empty(LEVELS, slots, ENTRY, dtype=torch.int32, device=device).expand(heads, -1, -1, -1)


def update_schedule(schedule: Tensor, starts: Tensor, lengths: Tensor, *, limit: int, reach: int | None) -> None:
    """Cut sequences of these starts and lengths (at most ``limit``; the last ``reach`` tokens of them) into parts."""
    heads, _, slots, _ = schedule.shape
    room = decode_launch.room(processors(schedule.device), heads)
    launch = _schedule_plan(lengths.shape[0], slots, room, limit, limit if reach is None else reach)
    with on_device(schedule):
        launch(starts, lengths, schedule)


@lru_cache(maxsize=4096)
def _schedule_plan(rows: int, slots: int, room: int, limit: int, reach: int) -> Launch:
    from ..kernels.decode import schedule

    lanes = power_of_two(rows)
    constants = {"ROWS": lanes, "PARTS": max(1, 128 // lanes), "GRAIN": GRAIN}
    return Launch(schedule, LEVELS, (rows, slots, room, limit, reach, 0), constants, LaunchConfig(0, 0, 1, 4))


def _fake_cached(q, k, v, *rest):
    return outputs(q, k if v is None else v)


_library = register(
    (
        (
            "triton_cached(Tensor q, Tensor k, Tensor? v, Tensor? k_tail, Tensor? k_scale, Tensor? v_scale, "
            "Tensor table, Tensor starts, Tensor lengths, Tensor? cu_seqlens_q, Tensor? schedule, "
            f"Tensor? alibi_slopes, Tensor? sinks, {NUMBERS}) -> (Tensor, Tensor)",
            _cached,
            _fake_cached,
            cached_flops,
        ),
    )
)
