"""How a latent passes DeepSeek's norm: beside one channel that is nearly constant, and too large to see
others beside.

The norm divides by the size of all channels. Beside the constant ``B c`` that is ``B c / sqrt(rank)`` and
hardly anything else, so that the others come out as they are, divided by c. With biases c is 1. Without them
it is made of the inputs: the linear function of these that is nearest to 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["exact", "calibrated"]
NORM_EPS = 1e-6  # of a latent, whatever config.json says of the other norms
LEAST = 1e-3  # of a 1 that inputs without a mean do not have
RIDGE = 1e-10  # of each channel's mean square, where a dtype rounds less


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A channel c of the latent, ``row`` ``[m + 1]``, which is stored ``size`` times as large; ``width`` of
    them all.

    The norm divides by ``sqrt((size^2 c^2 + |z|^2) / width + eps)``; for c = 1 that is off by ``|z|^2 / (2 *
    size^2)``, relatively: for a mean square of 1 over 512 channels 2 ** -32, in fp16 2 ** -20. Size and gain
    are powers of two, and lose nothing in any dtype; ``rest``, 0.7 to 1.5 times ``level``, belongs to the
    weights behind the norm.
    """

    row: Tensor
    size: float
    width: int
    level: float = 1.0

    @classmethod
    def of(cls, row: Tensor, width: int, dtype: torch.dtype) -> "Constant":
        """The largest that is good in this dtype: fp16 also has to hold the row, c, and latents divided by
        the gain.
        """
        size = 2.0**20
        if dtype == torch.float16:
            size = 2.0 ** (14 - max(0, math.ceil(row.abs().max().log2().item())))
        return cls(row, size, width)

    @property
    def is_bias(self) -> bool:
        """Whether it is 1 whatever the inputs."""
        return bool(self.row[-1])

    @property
    def gain(self) -> float:
        return 2.0 ** round(math.log2(self.size / self.width**0.5))

    @property
    def rest(self) -> float:
        return self.level * self.size / self.width**0.5 / self.gain

    def factors(self, latents: Tensor, ones: Tensor) -> Tensor:
        """What the norm, and what undoes it, multiply latents ``[n, r]`` by whose c are ``ones``: ``[n]``."""
        others = (latents.square().sum(-1) + self.width * NORM_EPS) / self.size**2
        return self.level * (ones.square() + others).rsqrt()

    def steadied(self, latents: Tensor, ones: Tensor, weights: Tensor) -> "Constant":
        """That of half this size, a quarter or less, if the norm changes latents less beside it.

        Where c is poor the latents' own size does better, and nothing is divided by a c that is nearly 0.
        """
        sizes, best, least = weights * latents.square().sum(-1), self, math.inf
        for halvings in range(round(math.log2(self.size)) + 1):
            smaller = replace(self, size=self.size / 2**halvings)
            factors = smaller.factors(latents, ones)
            level = sizes @ factors / (sizes @ factors.square())
            changed = (sizes @ (level * factors - 1).square()).item()
            if changed < least:
                best, least = replace(smaller, level=level.item()), changed
        return best


def constant_row(norm: Norm, moment: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of inputs ``[m + 1]`` for the constant: the bias alone, or what :func:`nearest_to_one` has without
    it.

    Raises:
        ValueError: as :func:`nearest_to_one`.
    """
    if norm == "exact":
        return torch.eye(len(moment), dtype=torch.float64, device=moment.device)[-1]
    return nearest_to_one(moment, dtype)


def nearest_to_one(moment: Tensor, dtype: torch.dtype) -> Tensor:
    """The w ``[m + 1]``, with 0 for the bias, with the least ``E (w x - 1)^2``.

    What rounding to ``dtype`` adds to that, ``eps^2 * sum w_i^2 E x_i^2``, is counted in.

    Raises:
        ValueError: inputs have no mean, so that nothing is near.
    """
    squares = moment[:-1, :-1]
    sizes = squares.diagonal().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    squares, mean = squares / sizes / sizes[:, None], moment[:-1, -1] / sizes
    ridge = max(RIDGE, torch.finfo(dtype).eps ** 2)
    row = torch.linalg.solve(
        squares + ridge * torch.eye(len(mean), dtype=mean.dtype, device=mean.device), mean
    )
    if not row @ mean > LEAST:
        raise ValueError(f"{NEEDS_TEXT} inputs of mean 0, of which no constant can be made; {INSTEAD}")
    return torch.nn.functional.pad(row / sizes, (0, 1))


NEEDS_TEXT = 'norm: "calibrated" needs a calibration on text, got'
INSTEAD = 'use norm="exact"'


def check_text(norm: Norm, *, calibrated: bool) -> None:
    """Refuse a norm that is made of a text without one.

    Raises:
        ValueError: there is none.
    """
    if norm == "calibrated" and not calibrated:
        raise ValueError(f"{NEEDS_TEXT} weights alone; {INSTEAD}")


def check_biases(norm: Norm, state: Mapping[str, Tensor]) -> None:
    """Refuse biases in ``state`` that are not 0 and have no place beside this norm.

    Raises:
        NotImplementedError: there are some.
    """
    biases = sorted(name for name, value in state.items() if name.endswith("bias") and value.double().any())
    if biases and norm == "calibrated":
        raise NotImplementedError(
            f'{", ".join(biases)}: norm="calibrated" has no place for a bias; use norm="exact"'
        )
