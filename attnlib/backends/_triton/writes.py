"""Cache writes by a Triton kernel: their operator, their plans, and the same write again with less ado."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ...checks import INT32
from ...kv import KVView
from ...rope import Angles, _check_rotation
from ...spec import arch_of, is_interpreted
from ...watched import are_watched
from ..registration import register
from .launch import Launch, against_interpreter
from .plans import Layout, layout
from .tables import LaunchConfig, power_of_two

Again = Callable[[Tensor, Tensor | None, Angles | None], None]

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


def write_cache(kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None) -> Again | None:
    """Store tokens in the planes in place, rotated and quantised on the way; slots outside the planes are skipped.

    Returns what writes other tensors of the same layouts to the same slots, where nobody watches this call.
    """
    latent = kv.layout.is_latent
    planes = (kv.k, kv.k_tail, kv.k_scale, None) if latent else (kv.k, kv.v, kv.k_scale, kv.v_scale)
    cos = sin = None
    if angles is not None:
        _check_rotation(k if not latent else v if v is None else v.unsqueeze(-2), angles)
        cos, sin = angles.cos, angles.sin
    given = (k, v, cos, sin, slots)
    k, v = _with_whole_rows(k), _with_whole_rows(v)
    if angles is not None and (cos.stride() != sin.stride() or cos.stride(-1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    tensors, flags = (k, v, cos, sin, slots.contiguous()), (angles is not None and angles.interleaved, latent)
    if not _free(k, v, cos):
        torch.ops.attnlib.triton_write(*planes, *tensors, *flags)
        return None
    _write(*planes, *tensors, *flags)
    copied = any(x is not y for x, y in zip(tensors, given, strict=True))
    return None if copied else _again(planes, tensors, flags)


def _again(planes: tuple, tensors: tuple, flags: tuple) -> Again:
    slots, stored = tensors[-1], tuple(map(_as_bytes, planes))
    launch = plan(slots.device, *map(layout, (*stored, *tensors)), *flags)

    def again(k: Tensor, v: Tensor | None, angles: Angles | None) -> None:
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        if _free(k, v, cos) and _at_home(slots):
            launch(*stored, k, v, cos, sin, slots)
        else:
            torch.ops.attnlib.triton_write(*planes, k, v, cos, sin, slots, *flags)

    return again


def _free(k: Tensor, v: Tensor | None, cos: Tensor | None) -> bool:
    """Whether the dispatcher may be skipped."""
    return k.is_meta or not are_watched(k, k if v is None else v, k if cos is None else cos)


def _at_home(x: Tensor) -> bool:
    return not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()


def _as_bytes(plane: Tensor | None) -> Tensor | None:
    """fp8 planes as bytes, since Triton takes none of them before sm_89."""
    return plane.view(torch.uint8) if plane is not None and plane.dtype == torch.float8_e4m3fn else plane


def _with_whole_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@lru_cache(maxsize=4096)
def plan(
    device: torch.device, k: tuple, v: tuple | None, k_scale: tuple | None, v_scale: tuple | None,
    new_k: tuple, new_v: tuple | None, cos: tuple | None, sin: tuple | None, slots: tuple,
    interleaved: bool, latent: bool,
) -> Launch:  # fmt: skip
    """The launch of a write on a device, by the layouts of the operator's tensors.

    Raises:
        ValueError: the new tokens are not those of the planes and slots.
        NotImplementedError: int32 cannot count them, or the tokens of the planes.
    """
    from .kernels.cache_write import write

    k, new_k = Layout(*k), Layout(*new_k)
    pages, page_size, heads, d = k.shape
    e = v[0][-1] if v else 0
    lead = new_k.shape[: -1 if latent else -2]
    rows = prod(lead) * heads
    for new, width in ((new_k, d), *([(Layout(*new_v), e)] if new_v else [])):
        expected = (*lead, width) if latent else (*lead, heads, width)
        if new.shape != expected or len(lead) not in (1, 2) or prod(slots[0]) * heads != rows:
            raise ValueError(f"k, v: expected {expected} for {prod(slots[0])} slots, got {tuple(new.shape)}")
    tokens = [_strides(x, len(lead), heads=not latent) for x in (new_k, new_v)]
    pairs = cos[0][-1] if cos else 0
    widest = max(power_of_two(d), power_of_two(e))
    values = next(tile for most, tile in TILES if most is None or rows * widest <= most)
    stored, places = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}, ("page", "place", "head")
    arguments = {}
    for name, x in stored.items():
        arguments |= {f"{name}_{place}": n for place, n in zip(places, x[1] if x else (0, 0, 0), strict=False)}
    for name, strides in (("new_k", tokens[0]), ("new_v", tokens[1])):
        arguments |= {f"{name}_{place}": n for place, n in zip(("b", "s", "head"), strides, strict=True)}
    angles_b, angles_s = _angle_strides(cos, len(lead))
    arguments |= {
        "angles_b": angles_b, "angles_s": angles_s, "rows": rows, "heads": heads, "s": lead[-1],
        "page_size": page_size, "slots": pages * page_size,
        "D": d, "D_ALL": power_of_two(d), "E": e, "E_ALL": power_of_two(e),
        "PAIRS_K": 0 if latent else pairs, "PAIRS_V": pairs if latent else 0, "INTERLEAVED": interleaved,
    }  # fmt: skip
    tiles = LaunchConfig(max(1, values // widest), 0, 1, WARPS)
    programs = -(-rows // tiles.block_m)
    if max(programs * tiles.block_m, pages * page_size) > INT32:
        raise NotImplementedError(f"triton: int32 counts neither {rows} rows nor {pages * page_size} slots of a cache")
    launch = Launch(write, programs, arguments, tiles)
    launch.options["enable_fp_fusion"] = False  # rotations round every product, as those of rope do
    return launch


def _strides(new: tuple | None, lead: int, *, heads: bool) -> tuple[int, ...]:
    """Of batch, tokens and heads; packed tokens are a batch of one."""
    if new is None:
        return 0, 0, 0
    strides = new[1][:-1] if heads else (*new[1][:-1], 0)
    return strides if lead == 2 else (0, *strides)


def _angle_strides(cos: tuple | None, lead: int) -> tuple[int, int]:
    """Of batch and tokens; angles of one batch entry are those of all."""
    if cos is None:
        return 0, 0
    shape, strides, _ = cos
    return (strides[0] if lead == 2 == len(shape) - 1 and shape[0] > 1 else 0), strides[-2]


def _write(k, v, k_scale, v_scale, new_k, new_v, cos, sin, slots, interleaved, latent):
    tensors = (_as_bytes(k), _as_bytes(v), k_scale, v_scale, new_k, new_v, cos, sin, slots)
    launch = plan(slots.device, *map(layout, tensors), interleaved, latent)
    with nullcontext() if _at_home(k) else torch.cuda.device(k.device):
        launch(*tensors)


def _fake_write(*arguments):
    return None


_library = register(
    (
        (
            "triton_write(Tensor(a!) k, Tensor(b!)? v, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor new_k, "
            "Tensor? new_v, Tensor? cos, Tensor? sin, Tensor slots, bool interleaved, bool latent) -> ()",
            _write,
            _fake_write,
            None,
        ),
    )
)
