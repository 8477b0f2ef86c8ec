"""``python tests/bench/compute_dtype_speed.py [64 128 256]``: forwards in e4m3 and in bf16, on a GPU.

Two sequences of 8k tokens, 2,048 query channels, as many KV heads or a quarter of them. All calls take turns.
The e4m3 column has whole calls: rounding q, k and v, then the kernel, which has a column of its own.
"""

import sys
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from attnlib import CAUSAL, FULL, attention, quantize_fp8
from attnlib.bench.place import cuda
from attnlib.masks.band import Mask

TOKENS, CHANNELS, SEQUENCES = 8192, 2048, 2
E4M3 = torch.float8_e4m3fn
COLUMNS = ("bf16", "e4m3", "its kernel", "quantize_fp8", "bf16, both passes", "e4m3, both passes")


def trained(tensors: list[Tensor], dout: Tensor, mask: Mask, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """A forward and a backward."""
    return torch.autograd.grad(attention(*tensors, mask=mask, compute_dtype=dtype), tensors, dout)


def milliseconds(d: int, groups: int, mask: Mask) -> dict[str, float]:
    """The time of every column: the median of three rounds."""
    place, h = cuda(), CHANNELS // d
    tensors = [
        torch.randn(SEQUENCES, TOKENS, n, d, device="cuda", dtype=torch.bfloat16)
        for n in (h, h // groups, h // groups)
    ]
    x, leaves = quantize_fp8(*tensors)._asdict(), [y.detach().requires_grad_() for y in tensors]
    call = partial(attention, *tensors, mask=mask)
    train = partial(trained, leaves, torch.randn_like(tensors[0]), mask)
    actions = (
        *(call, partial(call, compute_dtype=E4M3), partial(attention, **x, mask=mask)),
        *(partial(quantize_fp8, *tensors), partial(train, None), partial(train, E4M3)),
    )
    rounds = [[1e3 * place.seconds(action) for action in actions] for _ in range(3)]
    return dict(zip(COLUMNS, map(median, zip(*rounds, strict=True)), strict=True))


def rows(dims: list[int]) -> Iterator[str]:
    """The lines of the table."""
    yield f"| ms | {' | '.join(COLUMNS)} | forward, bf16 / e4m3 | both passes |"
    yield f"|---|{'---:|' * (len(COLUMNS) + 2)}"
    for d in dims:
        for groups in (1, 4):
            for name, mask in (("full", FULL), ("causal", CAUSAL)):
                taken = milliseconds(d, groups, mask)
                bf16, e4m3, *_, both_bf16, both_e4m3 = taken.values()
                cells = " | ".join(f"{x:.3f}" for x in taken.values())
                kind = "GQA" if groups > 1 else "MHA"
                yield f"| d{d} {name}, {kind} | {cells} | {bf16 / e4m3:.2f}x | {both_bf16 / both_e4m3:.2f}x |"


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for line in rows([int(d) for d in sys.argv[1:]] or [64, 128, 256]):
        print(line, flush=True)
