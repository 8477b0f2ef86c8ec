"""Attention over a KV cache in Triton: the torch operator, and its launch plans."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....call.cache import Run
from ....call.call import Call
from ....fp8 import Descales
from ....internal.checks import INT32
from ....internal.watched import are_watched
from ....kv import KVView
from ...autograd import register_cached
from ...operators import CachedArguments, flat_over_view, outputs, readable, result_dtype
from ..functions.programs import captured
from ..launching.config import LaunchConfig
from ..launching.launch import Block, Launch, cached_plan
from ..launching.layouts import Key, key_of
from ..launching.replay import Replay, blank
from . import mask_tiles, schedule, selected
from . import tables as decode_tables
from .shapes import DecodeShapes


class DecodePlan(NamedTuple):
    """The launches of a decode call.

    Attributes:
        decode: the launch that writes the output and LSE, or partial results if sequences are split.
        variant: the name of the kernels, which ``explain`` prints.
        combine: the launch that combines the partial results of splits; None if nothing is split.
        floats: the size of the buffer for partial results, in fp32 values.
        sparse: classifies the tiles of a mask function before ``decode`` runs; None without a mask function.
        listing: the launch that writes the visible blocks of lists of selected keys before ``decode`` runs;
            None without lists.
        lists: the size of the buffer for these blocks, in int32 values.
    """

    decode: Launch
    variant: str
    combine: Launch | None = None
    floats: int = 0
    sparse: mask_tiles.OverCache | None = None
    listing: Launch | None = None
    lists: int = 0


class Cached:
    """The operator for attention over a cache, registered as ``{name}_cached``.

    ``hopper`` allows the dedicated Hopper kernels.
    """

    def __init__(self, name: str, *, hopper: bool):
        self.name, self.hopper = f"{name}_cached", hopper
        self._library = register_cached(name, self.run)

    def attention(self, call: Call) -> tuple[Tensor, Tensor]:
        """Run a call: return its attention over the cache and the LSE."""
        run = getattr(torch.ops.attnlib, self.name) if are_watched(call.q, call.q, call.q) else self.run
        return run(*flat_over_view(call, _schedule_of(call.kv)))

    def variant(self, call: Call) -> str:
        """Return the name of the kernels that run a call: "plain" or "Hopper"."""
        a = flat_over_view(call, _schedule_of(call.kv))
        return decode_plan(self.key(_with_schedule(a))).variant

    def prepare(self, call: Call) -> Run | None:
        """Return a function that repeats a call on new queries of the same layout, or None if impossible.

        Of the optional tensors, only the descale of the queries may change between calls.
        """
        kv, spec, q, given = call.kv, call.spec, call.q, _schedule_of(call.kv)
        # Calls in fp32 are not cached: torch's setting for the precision of products may change between
        # calls.
        if (
            spec.strided
            or spec.dtype == torch.float32
            or given is None
            or not (q.numel() and kv.lengths.numel())
        ):
            return None
        a = flat_over_view(call, given)
        plan = decode_plan(self.key(a))
        a = a._replace(q=None, q_descale=None)  # the cached call must not keep this call's tensors alive
        launches = [plan.decode] if plan.combine is None else [plan.decode, plan.combine]
        launch = Replay(launches, _tensors(a), "q", "out", "lse", "split", "q_descale")
        lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        blank_out = blank((*q.shape[:-1], spec.value_dim), result_dtype(q.dtype), q.device)
        blank_lse = blank(lse_shape, torch.float32, q.device) if call.lse else None
        # Kernels always write an LSE. If the caller does not need it, it goes behind the partial results.
        # It is aligned there, because the number of rows before it is a multiple of 16.
        size = plan.floats if call.lse else plan.floats + math.prod(lse_shape)
        blank_room, beyond = blank((size,), torch.float32, q.device), 4 * plan.floats

        def run(
            q: Tensor, k: None, v: None, descales: Descales | None = None
        ) -> tuple[Tensor, Tensor | None]:
            out, room = torch.empty_like(blank_out), torch.empty_like(blank_room)
            lse, at = None if blank_lse is None else torch.empty_like(blank_lse), room.data_ptr()
            at_lse = at + beyond if lse is None else lse.data_ptr()
            scale = None if descales is None else descales.q_descale
            if launch.on(
                (q.data_ptr(), out.data_ptr(), at_lse, at, 0 if scale is None else scale.data_ptr())
            ):
                return out, lse
            return self.run(*a._replace(q=q, q_descale=scale))

        return run

    def key(self, a: CachedArguments) -> Key:
        """Return the key of a call in the cache of launch plans."""
        return decode_key(a)._replace(hopper=self.hopper)

    def run(self, *arguments) -> tuple[Tensor, Tensor]:
        """Run the operator: return out and lse."""
        a = readable(CachedArguments(*arguments))
        out, lse = outputs(a.q, a.value_plane)
        if not (out.numel() and a.lengths.numel()):
            return out.zero_(), lse.fill_(-torch.inf)
        a = _with_schedule(a)
        plan = decode_plan(self.key(a))
        tensors = _tensors(a) | {"out": out, "lse": lse, "split": lse.new_empty(plan.floats)} | captured(a)
        if plan.sparse is not None:
            tensors["states"] = a.q.new_empty(plan.sparse.states, dtype=torch.int8)
            tensors["runs"] = a.q.new_empty(plan.sparse.runs, dtype=torch.int32)
            plan.sparse.launch.on(tensors)
        if plan.listing is not None:
            tensors["lists"] = a.q.new_empty(plan.lists, dtype=torch.int32)
            plan.listing.on(tensors | {"key_starts": a.starts, "key_ends": None, "block_ids": None})
        plan.decode.on(tensors)
        if plan.combine is not None:
            plan.combine.on(tensors)
        return out, lse


def _schedule_of(kv: KVView) -> Tensor | None:
    """Return the schedule of a view, or None if the schedule does not fit the view.

    It must have as many KV heads, and must have splits of a fixed size if and only if the view has them.
    """
    if kv.schedule is None or (kv.schedule.shape[0], kv.schedule.shape[1] == 1) != (
        kv.layout.heads,
        kv.split_size > 0,
    ):
        return None
    return kv.schedule


def decode_key(a: CachedArguments) -> Key:
    """Return the key of a call in the cache of launch plans."""
    return key_of(a, a.q, a.k, a.v, a.k_rope, a.k_scale, a.v_scale)


def _tensors(a: CachedArguments) -> dict[str, Tensor | None]:
    """Return the tensor arguments of the kernels by name.

    Some caches lack a tensor, such as scales; kernels then take another tensor or None in its place.
    """
    tail, scale = a.k if a.k_rope is None else a.k_rope, a.k_scale if a.v is None else a.v_scale
    none = dict.fromkeys(("states", "runs", "cu_seqlens_k"))
    return a._asdict() | {"k_rope": tail, "v": a.value_plane, "v_scale": scale} | none


def _with_schedule(a: CachedArguments) -> CachedArguments:
    """Compute a schedule for a call whose view has none, unless lists are split instead of sequences."""
    if a.schedule is not None or a.selected is not None:
        return a
    limit = min(INT32, a.table.shape[1] * a.k.shape[1])
    made = schedule.new_schedule(
        a.k.shape[2], a.lengths.shape[0], a.q.device, limit=limit, split_size=a.split_size
    )
    schedule.update_schedule(made, a.starts, a.lengths, limit=limit, reach=None, split_size=a.split_size)
    return a._replace(schedule=made)


def _kernel(x: DecodeShapes) -> Callable:
    """Return the decode kernel of a call."""
    from ..kernels.decode import decode

    if x.hopper is None:
        return decode
    from ..kernels.hopper.gqa_decode.kernel import decode_gqa
    from ..kernels.hopper.mla_decode.kernel import decode_mla

    return decode_mla if x.case.latent else decode_gqa


def _blocks(x: DecodeShapes, arguments: dict) -> dict[str, Block]:
    """Return, for each kernel parameter that is a TMA descriptor, the block that it loads.

    The generic kernel loads all channels of a key, and its rotary tail if there is one. The dedicated Hopper
    kernels load half the channels of a latent, or 64 channels of keys and values.
    """
    own, rows = x.hopper is not None, x.tiles.block_n
    pairs, width = own and x.case.itemsize == 1, arguments["D_MAIN"] // 2 if own else arguments["D_MAIN"]
    if own and not x.case.latent:
        plane = Block("k", rows, 64, gluon=True, pairs=pairs, together=x.heads)
        named = {"k": plane, "v": plane}
        if pairs:
            scale = Block("k_scale", rows, x.heads, of_heads=False, gluon=True)
            named |= {"k_scale": scale, "v_scale": scale}
        return {f"{name}_desc": block._replace(tensor=name) for name, block in named.items()}
    tail = Block("k_rope", rows, arguments["D_TAIL"], of_heads=False, gluon=own)
    blocks = {"tail_desc": tail} if x.case.tail else {}
    if pairs and x.tiles.block_m > 16:  # rows_64.py loads 8-bit latents through pointers to convert them
        return blocks
    if pairs:
        blocks["scale_desc"] = Block("k_scale", 1, rows, of_heads=False, gluon=True)
    return blocks | {"k_desc": Block("k", rows, width, of_heads=False, gluon=own, pairs=pairs)}


@cached_plan
def decode_plan(key: Key) -> DecodePlan:
    """Return the launches of a call, from the cache of launch plans."""
    from ..kernels.split_kv import combine

    x = DecodeShapes(key)
    if x.a.selected is not None:
        return DecodePlan(**selected.plan(x)._asdict())
    tiles, arguments = x.tiles, x.arguments()
    width = arguments["E_MAIN"]
    early, blocks = arguments["EARLY"], _blocks(x, arguments) if tiles.tma else {}
    sparse = mask_tiles.OverCache(x) if x.sparse else None
    arguments |= {} if sparse is None else sparse.arguments
    launch = Launch(_kernel(x), x.programs, arguments, tiles, blocks, early=early)
    variant = "plain" if x.hopper is None else "Hopper"
    if not x.scheduled:
        return DecodePlan(launch, variant, sparse=sparse)
    queries, slots = x.blocks * tiles.block_m if x.packed else x.s * x.group, x.b
    # The number of splits per sequence if all sequences have the same length.
    splits = x.long_splits if x.long_splits > 1 else x.capacity // max(1, x.b)
    together, at_once, channels = decode_tables.joined(
        splits, width, x.b * x.g * queries * (x.long_splits == 1)
    )
    # In a batch this large few sequences are split, so a few programs with many query rows each suffice.
    rows = queries if x.b >= x.capacity else together
    if x.long_splits > 1:
        rows, slots = decode_tables.TOGETHER, slots + x.long_slots
    groups = -(-queries // max(1, rows))  # explain also plans calls without queries, which never run
    arguments |= {
        "GROUPS": groups, "ROWS": rows, "WIDTH": channels, "TILES": width // channels, "AT_ONCE": at_once,
        "TOGETHER": together,
    }  # fmt: skip
    programs = slots * x.g * groups * (width // channels)
    joined = Launch(combine, programs, arguments, LaunchConfig(tiles.block_m, 0, 1, 4), early=early)
    return DecodePlan(launch, variant, joined, x.lines * (width + 1), sparse)
