"""Cache writes in Triton: the torch operator, its launch plans, and repeated writes that bypass it."""

from math import inf, prod

import torch
from torch import Tensor

from ....call.cache import Write
from ....call.spec import arch_of, is_interpreted
from ....internal.checks import INT32
from ....internal.watched import are_watched
from ....kv import KVView
from ....rope.rope import Angles, check_rotation
from ...operators import WRITE, WriteArguments, fake_write
from ...registration import Operator, register
from ..launching.config import LaunchConfig, fitting, power_of_two
from ..launching.launch import Launch, against, cached_plan
from ..launching.layouts import Key, key_of, strides
from ..launching.replay import Replay

# Each entry has the largest number of values in a write, and the number of values per tile; not timed.
TILES = ((1 << 20, 512), (inf, 2048))


def cannot_store(dtype: torch.dtype, device: torch.device) -> list[str]:
    """Return the reasons why this backend cannot write tokens of this dtype on this device."""
    return against(dtype, device.type, arch_of(device), interpreted=device.type == "cpu" and is_interpreted())


def write_cache(
    kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None
) -> Write | None:
    """Rotate and quantize tokens, and write them to the cache in place; slots out of range are skipped.

    Returns a function that writes other tensors of the same layouts to the same slots. Returns None if the
    call cannot be cached: a compiler, mode or profiler observes it, or an argument had to be copied.
    """
    a = given = _arguments(kv, k, v, slots, angles)
    if angles is not None:
        check_rotation(k if not a.latent else v if v is None else v.unsqueeze(-2), angles)
        if a.cos.stride() != a.sin.stride() or a.cos.stride(-1) != 1:
            a = a._replace(cos=a.cos.contiguous(), sin=a.sin.contiguous())
    return _put(a, given)


def write_index(kv: KVView, index: Tensor, slots: Tensor) -> Write | None:
    """Write index keys to the cache in place, as :func:`write_cache` writes keys."""
    a = WriteArguments(
        kv.index, None, kv.index_scale, None, index, None, None, None, slots, interleaved=False, latent=False
    )
    return _put(a, a)


def _put(a: WriteArguments, given: WriteArguments) -> Write | None:
    """Write tokens to the cache, and return a function that repeats the write, or None.

    ``given`` are the arguments of the caller; if ``a`` has copies of some, the write cannot be repeated.
    """
    a = a._replace(
        new_k=_with_whole_rows(a.new_k), new_v=_with_whole_rows(a.new_v), slots=a.slots.contiguous()
    )
    if _is_followed(a.new_k, a.new_v, a.cos):
        torch.ops.attnlib.triton_write(*a)
        return None
    _write(*a)
    return _prepared(a) if all(x is y for x, y in zip(a, given, strict=True)) else None


def _arguments(
    kv: KVView, k: Tensor, v: Tensor | None, slots: Tensor, angles: Angles | None
) -> WriteArguments:
    latent, cos, sin, interleaved = kv.layout.is_latent, None, None, False
    planes = (kv.k, kv.k_rope, kv.k_scale, None) if latent else (kv.k, kv.v, kv.k_scale, kv.v_scale)
    if angles is not None:
        cos, sin, interleaved = angles.cos, angles.sin, angles.interleaved
    return WriteArguments(*planes, k, v, cos, sin, slots, interleaved, latent)


def _prepared(a: WriteArguments) -> Write:
    stored = _as_bytes(a)
    launch = Replay([plan(key_of(stored, a.slots))], stored._asdict(), "new_k", "new_v", "cos", "sin")
    # A cached write must not keep the tensors of its first call alive.
    a = a._replace(new_k=None, new_v=None, cos=None, sin=None)

    def write(k: Tensor, v: Tensor | None, angles: Angles | None) -> None:
        cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
        run = torch.ops.attnlib.triton_write
        if not _is_followed(k, v, cos):
            at_v, at_cos = 0 if v is None else v.data_ptr(), 0 if cos is None else cos.data_ptr()
            if launch.on((k.data_ptr(), at_v, at_cos, 0 if sin is None else sin.data_ptr())):
                return
            run = _write
        run(*a._replace(new_k=k, new_v=v, cos=cos, sin=sin))

    return write


def _is_followed(k: Tensor, v: Tensor | None, cos: Tensor | None) -> bool:
    """True if a mode, transform or profiler observes the call, so it must go through torch's dispatcher."""
    return are_watched(k, k if v is None else v, k if cos is None else cos)


def _as_bytes(a: WriteArguments) -> WriteArguments:
    """Return the arguments, with fp8 tensors viewed as uint8: Triton supports fp8 only from sm_89 on."""
    fp8 = {
        name: x
        for name in ("k", "v")
        if (x := getattr(a, name)) is not None and x.dtype == torch.float8_e4m3fn
    }
    return a._replace(**{name: x.view(torch.uint8) for name, x in fp8.items()}) if fp8 else a


def _with_whole_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


@cached_plan
def plan(key: Key) -> Launch:
    """Return the launch of a write.

    Raises:
        ValueError: the shapes of the new tokens do not match the cache or the slots.
        NotImplementedError: the cache or the new tokens have too many rows to count in int32.
    """
    from ..kernels.cache_write import write

    a = key.layouts
    (pages, page_size, heads, d), e = a.k.shape, a.v.shape[-1] if a.v else 0
    lead = a.new_k.shape[: -1 if a.latent else -2]
    for x, width in ((a.new_k, d), (a.new_v, e)):
        expected = (*lead, width) if a.latent else (*lead, heads, width)
        if x and (x.shape != expected or prod(lead) != prod(a.slots.shape) or len(lead) not in (1, 2)):
            raise ValueError(
                f"k, v: expected {expected} for {prod(a.slots.shape)} slots, got {tuple(x.shape)}"
            )
    rows, pairs = prod(lead) * heads, a.cos.shape[-1] if a.cos else 0
    widest = max(power_of_two(d), power_of_two(e))
    tiles = LaunchConfig(max(1, fitting(TILES, rows * widest) // widest), 0, 1, 4)
    programs = -(-rows // tiles.block_m)
    if max(programs * tiles.block_m, pages * page_size) > INT32:
        raise NotImplementedError(
            f"triton: int32 counts neither {rows} rows nor {pages * page_size} slots of a cache"
        )
    early = arch_of(key.device) == 90
    arguments = {
        **strides("ptgd", k=a.k, v=a.v), **strides("ptg", ks=a.k_scale, vs=a.v_scale),
        **strides("bsp", a=a.cos), "stride_nkh": 0, "stride_nvh": 0,
        **strides("bsd" if a.latent else "bshd", nk=a.new_k, nv=a.new_v), "rows": rows, "heads": heads,
        "s": lead[-1], "page_size": page_size, "slots": pages * page_size, "D": d, "D_ALL": power_of_two(d),
        "E": e, "E_ALL": power_of_two(e), "PAIRS_K": 0 if a.latent else pairs,
        "PAIRS_V": pairs if a.latent else 0, "INTERLEAVED": a.interleaved, "EARLY": early,
    }  # fmt: skip
    if a.cos and a.cos.shape[0] == 1:  # the whole batch shares its angles
        arguments["stride_ab"] = 0
    launch = Launch(write, programs, arguments, tiles, early=early)
    launch.options["enable_fp_fusion"] = False  # round after every product, as the rope module does
    return launch


def _write(*arguments):
    a = _as_bytes(WriteArguments(*arguments))
    plan(key_of(a, a.slots)).on(a._asdict())


_library = register(Operator(f"triton_write{WRITE}", _write, fake_write))
