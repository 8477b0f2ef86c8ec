"""Values that no argument, or only some argument, should take; and the words in which contracts are
restated.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlib import CAUSAL, Angles, KVLayout, Mask, MaskFunction, Rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT32 = 2**31 - 1


class Subclass(Tensor):
    """A tensor by inheritance alone."""


def junk() -> dict[str, Any]:
    """Values for any argument, by name; each is wrong for most of them and right for a few."""
    plain = (
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        2**31,
        2**63,
        2**70,
        10**400,
        0.0,
        0.5,
        2.5,
        -1.0,
        1e300,
        1e-300,
    )
    plain += (
        math.nan,
        math.inf,
        -math.inf,
        1j,
        "",
        "causal",
        b"bytes",
        [],
        [1, 2],
        (),
        (2, 3),
        {},
        {1: 2},
        {None: 4},
    )
    values = {repr(value)[:20]: value for value in plain}
    values |= {"an object": object(), "a type": int, "a function": len, "a range": range(2)}
    values |= {"np.int64": np.int64(2), "np.float32": np.float32(0.5), "np.float64": np.float64(0.5)}
    values |= {"np.bool": np.bool_(True), "an array": np.zeros(3)}
    values |= {"0-d float": torch.tensor(1.0), "0-d int": torch.tensor(2), "0-d bool": torch.tensor(True)}
    values |= {"1-d": torch.zeros(3), "4-d": torch.zeros(2, 3, 4, 5), "meta": torch.zeros(3, device="meta")}
    values |= {"a dtype": torch.float32, "an int dtype": torch.int64, "a device": torch.device("cpu")}
    values |= {"a mask": CAUSAL, "a rope": Rope(4), "a layout": KVLayout.grouped(2, 8)}
    return values | {"angles": Rope(4).angles(torch.arange(3))}


def variants(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors one change away from ``x``: of its rank, size, dtype, layout, device, type or values."""
    yield from {"a slice": x[..., 1:], "fewer": x[1:], "none": x[:0], "one more dim": x[None]}.items()
    yield from {"flat": x.flatten(), "a sum": x.sum(), "turned": x.flip(0), "negative": -x}.items()
    yield from {"one dim less": x[0], "doubled": torch.cat((x, x)), "zeros": torch.zeros_like(x)}.items()
    for dtype in (
        *DTYPES,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ):
        yield str(dtype), x.to(dtype)
    yield "meta", x.to("meta")
    yield "strided", torch.stack((x, x), -1)[..., 0]
    yield "expanded", x[:1].expand_as(x)
    yield "a subclass", x.clone().as_subclass(Subclass)
    yield "sparse", x.to_sparse()
    yield "nested", torch.nested.nested_tensor([x], layout=torch.jagged)
    yield "nested, strided", torch.nested.nested_tensor([x])
    if x.is_floating_point():
        yield "with gradient", x.clone().requires_grad_()
        yield "a parameter", nn.Parameter(x.clone())
        yield "mkldnn", x.float().to_mkldnn()
        yield from {"nan": x * math.nan, "inf": x * math.inf, "huge": x * 1e30, "tiny": x * 1e-30}.items()
    else:
        yield from {"far": x + 1000, "greatest": torch.full_like(x, INT32)}.items()


def values_for(legal: Any) -> dict[str, Any]:
    """Everything to try for an argument whose legal value is given."""
    return junk() | (dict(variants(legal)) if isinstance(legal, Tensor) else {})


def none_or(x: Any, test) -> bool:
    return x is None or test(x)


def is_bool(x: Any) -> bool:
    return isinstance(x, bool)


def is_int(x: Any, least: float = -INT32, most: float = INT32) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def is_number(x: Any, above: float = 0.0) -> bool:
    """A Python number that fp32 holds as finite and more than ``above``."""
    return isinstance(x, int | float) and not isinstance(x, bool) and max(above, 1.2e-38) < x < 3.4e38


def is_tensor(x: Any, *dtypes: torch.dtype) -> bool:
    """A strided tensor on the CPU, of one of these dtypes (none: of those of attention)."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.device.type != "cpu":
        return False
    return x.dtype in (dtypes or DTYPES)


def is_mask(x: Any) -> bool:
    return isinstance(x, Mask | MaskFunction)


def is_angles(x: Any) -> bool:
    return isinstance(x, Angles)


def finite(args: dict[str, Any]) -> bool:
    """Whether every number in every float tensor is finite, and small enough to be multiplied in fp16."""
    floats = [
        x for x in args.values() if isinstance(x, Tensor) and x.is_floating_point() and x.device.type == "cpu"
    ]
    return all(bool((x.detach().double().abs() < 1e3).all()) for x in floats)
