"""Cache writes by a Triton kernel: their operator, their plans, and the same write again with less ado."""

from math import prod

import torch
from torch import Tensor

from ...checks import INT32
from ...kv import KVView
from ...prepared import Write
from ...rope import Angles, check_rotation
from ...spec import arch_of, is_interpreted
from ...watched import are_watched
from ..operators import WRITE, WriteArguments, fake_write
from ..registration import Operator, register
from .launch import Launch, against_interpreter, is_current, on_device, remembered
from .plans import Key, Layout, key_of, named_strides
from .tables import LaunchConfig, power_of_two

# Values of a tile, by how many there are in all; not timed.
TILES = ((1 << 20, 512), (None, 2048))
WARPS = 4


def cannot_store(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Why this backend cannot write tokens of this dtype on this device."""
    reasons = ["computes in fp32, got fp64"] if dtype == torch.float64 else []
    if device.type == "cuda":
        return reasons if arch_of(device) >= 80 else [*reasons, f"needs sm_80 or newer, got sm_{arch_of(device)}"]
    interpreted = device.type == "cpu" and is_interpreted()
    return [*reasons, *against_interpreter(dtype, device.type, interpreted=interpreted)]


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> Write | None:
    """Store tokens in the planes in place, rotated and quantised on the way; slots outside the planes are skipped.

    Returns what writes other tensors of the same layouts to the same slots, where nobody watches this call.
    """
    a = given = _arguments(kv, k, v, slots, angles)
    if angles is not None:
        check_rotation(k if not a.latent else v if v is None else v.unsqueeze(-2), angles)
        if a.cos.stride() != a.sin.stride() or a.cos.stride(-1) != 1:
            a = a._replace(cos=a.cos.contiguous(), sin=a.sin.contiguous())
    a = a._replace(new_k=_with_whole_rows(k), new_v=_with_whole_rows(v), slots=slots.contiguous())
    if _is_followed(a.new_k, a.new_v, a.cos):
        torch.ops.attnlib.triton_write(*a)
        return None
    _write(*a)
    return _prepared(a) if all(x is y for x, y in zip(a, given, strict=True)) else None


def _arguments(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> WriteArguments:
    latent, cos, sin, interleaved = kv.layout.is_latent, None, None, False
    planes = (kv.k, kv.k_tail, kv.k_scale, None) if latent else (kv.k, kv.v, kv.k_scale, kv.v_scale)
    if angles is not None:
        cos, sin, interleaved = angles.cos, angles.sin, angles.interleaved
    return WriteArguments(*planes, k, v, cos, sin, slots, interleaved, latent)


def _prepared(a: WriteArguments) -> Write:
    stored = _as_bytes(a)
    launch = plan(key_of(stored, a.slots)).bound(stored, "new_k", "new_v", "cos", "sin")
    a = a._replace(new_k=None, new_v=None, cos=None, sin=None)  # what is prepared keeps no tensor of a call

    def write(k: Tensor, v: Tensor | None, angles: Angles | None) -> None:
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        if is_current(a.slots) and not _is_followed(k, v, cos):
            launch(k, v, cos, sin)
        else:
            torch.ops.attnlib.triton_write(*a._replace(new_k=k, new_v=v, cos=cos, sin=sin))

    return write


def _is_followed(k: Tensor, v: Tensor | None, cos: Tensor | None) -> bool:
    """Whether the dispatcher may not be skipped."""
    return not k.is_meta and are_watched(k, k if v is None else v, k if cos is None else cos)


def _as_bytes(a: WriteArguments) -> WriteArguments:
    """fp8 planes as bytes, since Triton takes none of them before sm_89."""
    fp8 = {name: x for name in ("k", "v") if (x := getattr(a, name)) is not None and x.dtype == torch.float8_e4m3fn}
    return a._replace(**{name: x.view(torch.uint8) for name, x in fp8.items()}) if fp8 else a


def _with_whole_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@remembered
def plan(key: Key) -> Launch:
    """The launch of a write.

    Raises:
        ValueError: the new tokens are not those of the planes and slots.
        NotImplementedError: int32 cannot count them, or the tokens of the planes.
    """
    from .kernels.cache_write import write

    a = key.arguments
    k, new_k, slots = Layout(*a.k), Layout(*a.new_k), Layout(*a.slots)
    pages, page_size, heads, d = k.shape
    e = Layout(*a.v).shape[-1] if a.v else 0
    lead = new_k.shape[: -1 if a.latent else -2]
    rows = prod(lead) * heads
    for new, width in ((new_k, d), *([(Layout(*a.new_v), e)] if a.new_v else [])):
        expected = (*lead, width) if a.latent else (*lead, heads, width)
        if new.shape != expected or len(lead) not in (1, 2) or prod(slots.shape) * heads != rows:
            raise ValueError(f"k, v: expected {expected} for {prod(slots.shape)} slots, got {tuple(new.shape)}")
    pairs = Layout(*a.cos).shape[-1] if a.cos else 0
    widest = max(power_of_two(d), power_of_two(e))
    values = next(tile for limit, tile in TILES if limit is None or rows * widest <= limit)
    tiles = LaunchConfig(max(1, values // widest), 0, 1, WARPS)
    programs = -(-rows // tiles.block_m)
    if max(programs * tiles.block_m, pages * page_size) > INT32:
        raise NotImplementedError(f"triton: int32 counts neither {rows} rows nor {pages * page_size} slots of a cache")
    arguments = {
        **_strides(a, len(lead)), "rows": rows, "heads": heads, "s": lead[-1],
        "page_size": page_size, "slots": pages * page_size,
        "D": d, "D_ALL": power_of_two(d), "E": e, "E_ALL": power_of_two(e),
        "PAIRS_K": 0 if a.latent else pairs, "PAIRS_V": pairs if a.latent else 0, "INTERLEAVED": a.interleaved,
    }  # fmt: skip
    launch = Launch(write, programs, arguments, tiles)
    launch.options["enable_fp_fusion"] = False  # rotations round every product, as those of rope do
    return launch


def _strides(a: WriteArguments, lead: int) -> dict[str, int]:
    """By name: of planes; of new tokens, of which packed ones are a batch of one; and of angles."""
    found, planes = {}, {"kp kt kg": a.k, "vp vt vg": a.v, "ksp kst ksg": a.k_scale, "vsp vst vsg": a.v_scale}
    for names, x in planes.items():
        found |= named_strides(names, Layout(*x).strides[:3] if x else (0, 0, 0))
    for names, x in {"nkb nks nkh": a.new_k, "nvb nvs nvh": a.new_v}.items():
        of_x = Layout(*x).strides if x else (0,) * 4
        strides = (*of_x[:lead], 0 if a.latent else of_x[lead])
        found |= named_strides(names, (0,) * (3 - len(strides)) + strides)
    of_angles = Layout(*a.cos) if a.cos else Layout((1,), (0, 0), torch.float32)  # those of one batch entry are all's
    varies = lead == 2 == len(of_angles.shape) - 1 and of_angles.shape[0] > 1
    return found | named_strides("ab as", (of_angles.strides[0] if varies else 0, of_angles.strides[-2]))


def _write(*arguments):
    a = _as_bytes(WriteArguments(*arguments))
    with on_device(a.slots):
        plan(key_of(a, a.slots))(a)


_library = register(Operator(f"triton_write{WRITE}", _write, fake_write))
