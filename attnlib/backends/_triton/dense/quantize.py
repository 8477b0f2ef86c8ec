"""The launches that quantize q, k and v to e4m3 before a forward."""

from typing import NamedTuple

import torch

from ....fp8 import E4M3, Fp8Inputs
from ....internal.checks import INT32
from ...operators import Arguments, readable
from ...operators import quantize as quantized_by_torch
from ..launching.config import LaunchConfig, power_of_two
from ..launching.launch import Launch, cached_plan
from ..launching.layouts import Key, contiguous, key_of, strides

TILE = 4096  # values; not timed


class Quantization(NamedTuple):
    """The launch that finds maxima, the launch that rounds, and the shapes of the three scales."""

    find: Launch
    round: Launch
    scales: tuple[tuple[int, int], ...]


def quantize(a: Arguments) -> Fp8Inputs:
    """Round q, k and v of a call to e4m3, each head by its own scale: two launches, for all three together.

    The bits are the same as with :func:`attnlib.quantize_fp8`.
    """
    if not (a.q.numel() and a.k.numel() and a.v.numel()):
        return quantized_by_torch(a)
    a = readable(a)
    known = plan(key_of(a, a.q, a.k, a.v))
    q, k, v = (torch.empty(x.shape, dtype=E4M3, device=x.device) for x in (a.q, a.k, a.v))
    found = Fp8Inputs(q, k, v, *(a.q.new_empty(x, dtype=torch.float32) for x in known.scales))
    maxima = a.q.new_zeros(sum(b * h for b, h in known.scales), dtype=torch.int32)
    made = {"q_e4m3": q, "k_e4m3": k, "v_e4m3": v}
    made = {name: x.view(torch.uint8) for name, x in made.items()} | found.descales._asdict()
    for launch in (known.find, known.round):
        launch.on(a._asdict() | made | {"maxima": maxima})
    return found


def quantized_key(key: Key) -> Key:
    """Return the key of the forward on the tensors that :func:`quantize` returns."""
    a, (*_, (b, h), (_, g)) = key.layouts, plan(key).scales
    layouts = {name: contiguous(x.shape, E4M3) for name, x in (("q", a.q), ("k", a.k), ("v", a.v))}
    scales = (contiguous(shape, torch.float32) for shape in ((b, h), (b, g), (b, g)))
    layouts |= dict(zip(Fp8Inputs._fields[3:], scales, strict=True))
    return key._replace(aligned=True, arguments=key.arguments._replace(to_fp8=False, **layouts))


@cached_plan
def plan(key: Key) -> Quantization:
    """Return the launches that quantize a call.

    Raises:
        NotImplementedError: the call has too many tiles to count in int32.
    """
    from ..kernels.quantize import quantize

    a = key.layouts
    (s, h, d), (t, g, e) = a.q.shape[-3:], a.v.shape[-3:]
    packed = a.cu_seqlens_q is not None
    batch = a.cu_seqlens_q.shape[0] - 1 if packed else a.q.shape[0]
    widest = max(power_of_two(d), power_of_two(e))
    tiles = LaunchConfig(max(1, TILE // widest), 0, 1, 4)
    rows = tiles.block_m

    def programs(tokens: int, heads: int) -> int:
        return heads * (tokens // rows + batch + 1 if packed else batch * -(-tokens // rows))

    counts = programs(s, h), programs(t, g), programs(t, g)
    if sum(counts) > INT32:
        raise NotImplementedError(f"triton: int32 does not count {sum(counts)} tiles of q, k and v")
    arguments = {
        **strides("bshd", q=a.q), **strides("btgd", k=a.k, v=a.v), "batch": batch, "heads": h, "kv_heads": g,
        "s": s, "t": t, "q_programs": counts[0], "k_programs": counts[1], "D": d, "D_ALL": power_of_two(d),
        "E": e, "E_ALL": power_of_two(e), "NATIVE": key.device.type != "cpu",
    }  # fmt: skip
    find, write = (Launch(quantize, sum(counts), arguments | {"ROUND": on}, tiles) for on in (False, True))
    return Quantization(find, write, ((batch, h), (batch, g), (batch, g)))
