"""Random choices from one seed: numbers, masks, options, and tensors in every kind of memory."""

from random import Random
from typing import Any

import torch
from torch import Tensor

INT32 = 2**31 - 1
DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "interpreter": (torch.float32, torch.float16),  # which takes bf16 for fp16
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}
LENGTHS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65)
LONG = (97, 100, 127, 128, 129, 200, 257, 511, 512, 513, 700)
DIMS = (1, 2, 3, 5, 7, 8, 16, 16, 24, 32, 33, 40, 64, 64)
WIDE_DIMS = (59, 80, 96, 111, 128, 192, 256)
HEADS = ((1, 1), (2, 2), (3, 3), (2, 1), (3, 1), (4, 2), (6, 2), (6, 3), (5, 1), (9, 3), (16, 1), (8, 4))
ORDERS = ("plain", "plain", "offset", "heads", "tokens", "channels", "wide", "fused", "apart")
SAME = ("same batch", "same token", "same head")


class Draw:
    """Choices of one case; ``device`` is cpu, interpreter or cuda, and says what is possible and how
    large.
    """

    def __init__(self, seed: int, device: str):
        self.random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.place = torch.device("cuda" if device == "cuda" else "cpu")

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def one(self, choices) -> Any:
        return self.random.choice(choices)

    def upto(self, most: int, least: int = 0) -> int:
        return self.random.randint(least, max(least, most))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def dtype(self) -> torch.dtype:
        return self.one(DTYPES[self.device])

    def length(self) -> int:
        return self.one(LONG) if self.device != "interpreter" and self.maybe(0.12) else self.one(LENGTHS)

    def dim(self) -> int:
        return (
            self.one(WIDE_DIMS)
            if self.maybe(0.05 if self.device == "interpreter" else 0.15)
            else self.one(DIMS)
        )

    def band(self, reach: int, *, window: int | None = None) -> dict[str, int]:
        """left, right and prefix of a mask; left below ``window`` if there is one."""
        some = lambda: self.upto(reach, -reach)  # noqa: E731
        kind = self.one(
            ("causal", "causal", "full", "sliding", "sliding", "band", "band", "prefix", "hollow", "far")
        )
        band = {
            "causal": (None, 0, 0),
            "full": (None, None, 0),
            "sliding": (self.upto(reach), 0, 0),
            "band": (some() if self.maybe(0.7) else None, some() if self.maybe(0.7) else None, 0),
            "prefix": (None, some(), self.upto(reach + 3)),
            "hollow": (self.upto(reach), -self.upto(2 * reach) - 1, 0),
            "far": (self.one((None, INT32, -INT32)), self.one((None, INT32, -INT32)), 0),
        }[kind]
        if window is not None:
            left = window - 1 if band[0] is None else min(band[0], window - 1)
            band = (left, band[1], 0)
        return dict(zip(("left", "right", "prefix"), band, strict=True))

    def options(self, b: int, h: int, d: int, *, reach: int) -> dict[str, Any]:
        """Any of scale, softcap, slopes and sinks, as the library takes them; tensors are on the CPU."""
        options: dict[str, Any] = {}
        if self.maybe(0.3):
            options["scale"] = self.one((1, 0.3, 1e-3, 2.0 * d**-0.5))
        if self.maybe(0.25):
            options["softcap"] = self.one((30, 3.0, 0.5, 50.0))
        if self.maybe(0.25):
            shape = (b, h) if self.maybe(0.4) else (h,)
            options["alibi_slopes"] = self._floats(shape, self.one((0.1, 1.0)) if reach < 200 else 0.02)
        if self.maybe(0.25):
            options["sinks"] = self._floats((h,), self.one((1.0, 4.0)))
        return options

    def _floats(self, shape: tuple[int, ...], sigma: float) -> Tensor:
        x = self.normal(*shape) * sigma
        return x.to(self.one((torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)))

    def how(self) -> str:
        """A kind of memory."""
        return self.one(SAME) if self.maybe(0.1) else self.one(ORDERS)

    def arranged(self, x: Tensor, how: str) -> Tensor:
        """``x`` ``[..., tokens, heads, channels]`` on the device, in some strides, with NaN in what lies
        between.

        The ``same`` ones have a stride of 0, so that their values are others.
        """
        dims = x.dim()
        if how in SAME:
            dim = {"same batch": 0, "same token": dims - 3, "same head": dims - 2}[how]
            return x.narrow(dim, 0, min(1, x.shape[dim])).to(self.place).expand(x.shape)
        order = list(range(dims))
        first = {"heads": dims - 2, "channels": dims - 1, "tokens": dims - 3}.get(how)
        if first is not None:
            order.insert({"heads": dims - 3}.get(how, 0), order.pop(first))
        shape = [x.shape[dim] for dim in order]
        if how == "offset":
            flat = torch.full((x.numel() + 3,), torch.nan, dtype=x.dtype, device=self.place)
            view = flat[3:].view(shape)
        elif how == "apart":
            view = torch.full((*shape, 2), torch.nan, dtype=x.dtype, device=self.place)[..., 1]
        elif how in ("wide", "fused"):
            dim, before = (dims - 1, self.upto(9)) if how == "wide" else (dims - 2, self.upto(2))
            shape[dim] += before + self.upto(5)
            wide = torch.full(shape, torch.nan, dtype=x.dtype, device=self.place)
            view = wide.narrow(dim, before, x.shape[dim])
        else:
            view = torch.full(shape, torch.nan, dtype=x.dtype, device=self.place)
        view = view.permute([order.index(dim) for dim in range(dims)])
        return view.copy_(x)

    def strided(self, x: Tensor) -> Tensor:
        """A small tensor on the device, now and then as a column of a wider one."""
        x = x.to(self.place)
        return torch.stack((x, x + 1), -1)[..., 0] if self.maybe(0.3) else x
