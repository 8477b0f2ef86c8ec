"""A constant channel beside a latent, so large that DeepSeek's norm leaves the latent almost unchanged.

The norm divides by the root mean square of all channels. The constant channel, ``B c``, is so large that this
is about ``B c / sqrt(rank)``, whatever the latent is. Except for a fixed factor, the norm therefore divides
the latent only by c. With biases, c is 1. Without biases, c is the linear function of the inputs that is
closest to 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["exact", "calibrated"]
NORM_EPS = 1e-6  # eps of DeepSeek's latent norm, which ignores config.json's rms_norm_eps
LEAST = 1e-3  # smallest mean of c that is accepted; for inputs with mean 0, no linear function is near 1
RIDGE = 1e-10  # ridge relative to each channel's mean square, or ``eps ** 2`` of the dtype if that is larger


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A large extra latent channel that undoes MLA's latent norm, which the converted layer did not have.

    An RMS norm divides all channels of a token by ``sqrt((size^2 c^2 + |z|^2) / width + eps)``, where z is
    the latent and ``size * c`` the extra channel. ``row`` ``[m + 1]`` computes c, which is 1 or close to 1,
    from the layer's inputs. As ``size`` is large, the divisor is almost the same for every token, and the
    norm's weight cancels it. For c = 1 the relative error is ``|z|^2 / (2 * size^2)``: ``2 ** -32`` for 512
    channels of mean square 1, and ``2 ** -20`` in fp16. ``size`` and ``norm_weight`` are powers of two, so
    they cause no rounding. ``weight_scale``, which is left over, is folded into the weights behind the norm.
    """

    row: Tensor
    size: float
    width: int
    level: float = 1.0

    @classmethod
    def of(cls, row: Tensor, width: int, dtype: torch.dtype) -> "Constant":
        """Return the constant channel with the largest size that ``dtype`` permits.

        In fp16 the size is smaller, since the row, c and latents divided by the norm weight must fit too.
        """
        size = 2.0**20
        if dtype == torch.float16:
            size = 2.0 ** (14 - max(0, math.ceil(row.abs().max().log2().item())))
        return cls(row, size, width)

    @property
    def is_bias(self) -> bool:
        """True if c is 1 for all inputs."""
        return bool(self.row[-1])

    @property
    def norm_weight(self) -> float:
        return 2.0 ** round(math.log2(self.size / self.width**0.5))

    @property
    def weight_scale(self) -> float:
        return self.level * self.size / self.width**0.5 / self.norm_weight

    def factors(self, latents: Tensor, ones: Tensor) -> Tensor:
        """Return the factors ``[n]`` by which the norm changes n latents; 1 means no change.

        The norm's typical factor is not included, because the weights that follow the norm undo it. ``ones``
        ``[n]`` are the values of c for the same tokens.
        """
        others = (latents.square().sum(-1) + self.width * NORM_EPS) / self.size**2
        return self.level * (ones.square() + others).rsqrt()

    def steadied(self, latents: Tensor, ones: Tensor, weights: Tensor) -> "Constant":
        """Reduce the size of this channel to the value for which the norm changes latents least.

        The size never increases. If c is far from constant, a smaller size makes the norm depend more on the
        latents themselves, and avoids division by a c near 0.
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
    """Return the row ``[m + 1]`` that computes the constant: a bias, or :func:`nearest_to_one` without bias.

    Raises:
        ValueError: as :func:`nearest_to_one`.
    """
    if norm == "exact":
        return torch.eye(len(moment), dtype=torch.float64, device=moment.device)[-1]
    return nearest_to_one(moment, dtype)


def nearest_to_one(moment: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the linear function of the inputs that is closest to 1: a row w ``[m + 1]`` without bias.

    It minimises ``E (w x - 1)^2 + eps^2 * sum w_i^2 E x_i^2``; the second term is the error of rounding w to
    ``dtype``.

    Raises:
        ValueError: the inputs have mean 0, so no linear function is near 1.
    """
    squares = moment[:-1, :-1]
    sizes = squares.diagonal().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    squares, mean = squares / sizes / sizes[:, None], moment[:-1, -1] / sizes
    ridge = max(RIDGE, torch.finfo(dtype).eps ** 2)
    row = torch.linalg.solve(
        squares + ridge * torch.eye(len(mean), dtype=mean.dtype, device=mean.device), mean
    )
    if not row @ mean > LEAST:
        raise ValueError(f"{NEEDS_TEXT} inputs of mean 0, which allow no constant; {INSTEAD}")
    return torch.nn.functional.pad(row / sizes, (0, 1))


NEEDS_TEXT = 'norm: "calibrated" needs a calibration on text, got'
INSTEAD = 'use norm="exact"'


def check_text(norm: Norm, *, calibrated: bool) -> None:
    """Raise an error if the norm needs calibration text and there is none.

    Raises:
        ValueError: ``norm="calibrated"`` without a text.
    """
    if norm == "calibrated" and not calibrated:
        raise ValueError(f"{NEEDS_TEXT} weights alone; {INSTEAD}")


def check_biases(norm: Norm, state: Mapping[str, Tensor]) -> None:
    """Raise an error if the layer has nonzero biases and the norm does not support biases.

    Raises:
        NotImplementedError: biases with ``norm="calibrated"``.
    """
    biases = sorted(name for name, value in state.items() if name.endswith("bias") and value.double().any())
    if biases and norm == "calibrated":
        raise NotImplementedError(
            f'{", ".join(biases)}: norm="calibrated" does not support biases; use norm="exact"'
        )
