"""Rotary position embeddings: an immutable description (Rope) that computes angles at any position."""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..internal.checks import INT32
from ..internal.signatures import kind
from .axes import Axes
from .rotation import Angles as Angles
from .rotation import check_rotation as check_rotation
from .rotation import check_strided
from .rotation import rotate as rotate
from .scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    ProportionalScaling,
    Scaling,
    YaRNScaling,
    check_number,
)


@kind
@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first ``dim`` channels of a head (Su et al., 2021, arXiv 2104.09864).

    Channel pair ``c`` of a token at position ``i`` (the paper's ``m``) rotates by
    ``i * theta ** (-2 * c / dim)`` radian; a ``scaling`` rule slows it down. A Rope holds only numbers, no
    tensors. It computes angles when they are needed, at any position and on the device of the positions, so
    there is no table that could be too short or on the wrong device.

    With ``axes``, a token has one position for each axis (as in Qwen2-VL), and each channel pair rotates by
    one of them; see :class:`Axes`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``dim`` is odd or not positive, ``theta`` is not positive and finite, or is too small for
            the scaling, or ``axes`` do not fit ``dim`` or the scaling.

    >>> llama3 = attnlib.scaling.Llama3Scaling(8.0, 1.0, 4.0, original_max_position=8192)
    >>> rope = Rope(dim=64, theta=500_000.0, scaling=llama3)
    >>> rope.angles(torch.arange(10)).convention
    'half:64'
    """

    dim: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False
    axes: Axes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"rope.dim: expected an int, got {self.dim!r}")
        if not 2 <= self.dim <= INT32 or self.dim % 2:
            raise ValueError(f"rope.dim: expected a positive even number of channels, got {self.dim}")
        check_number("rope.theta", self.theta, above=0)
        if not isinstance(self.scaling, Scaling | None):
            known = ", ".join(kind.__name__ for kind in get_args(Scaling))
            raise TypeError(f"rope.scaling: expected {known} or None, got {self.scaling!r}")
        if not isinstance(self.interleaved, bool):
            raise TypeError(f"rope.interleaved: expected a bool, got {self.interleaved!r}")
        if isinstance(self.scaling, NTKScaling | DynamicNTKScaling) and self.dim == 2:
            raise ValueError(
                "rope.dim: expected at least 4 channels with an NTK scaling (one pair has no base), got 2"
            )
        if isinstance(self.scaling, YaRNScaling) and self.theta <= 1:
            raise ValueError(f"rope.theta: expected more than 1 with YaRN, got {self.theta}")
        if isinstance(self.scaling, LongRoPEScaling) and 2 * len(self.scaling.short_factor) != self.dim:
            pairs = len(self.scaling.short_factor)
            raise ValueError(
                f"rope.scaling: expected {self.dim // 2} factors, one for each pair, got {pairs}"
            )
        if self.axes is not None:
            self._check_axes(self.axes)

    def _check_axes(self, axes: Axes) -> None:
        if not isinstance(axes, Axes):
            raise TypeError(f"rope.axes: expected Axes such as Axes((16, 24, 24), 'blocks'), got {axes!r}")
        if sum(axes.sections) != self.dim // 2:
            raise ValueError(
                f"rope.axes: expected sections that add up to {self.dim // 2}, the channel pairs of dim="
                f"{self.dim}, got {axes.sections}, which add up to {sum(axes.sections)}"
            )
        if axes.order == "ladders" and not isinstance(self.scaling, LinearScaling | Llama3Scaling | None):
            raise ValueError(
                "rope.scaling: expected LinearScaling, Llama3Scaling or None with a frequency ladder for "
                f"each axis, got {type(self.scaling).__name__}, which is defined for one ladder of all pairs"
            )

    @property
    def needs_length(self) -> bool:
        """True if the angles depend on the length of the sequence."""
        scaling = self.scaling
        chooses = isinstance(scaling, LongRoPEScaling) and scaling.short_factor != scaling.long_factor
        return chooses or isinstance(scaling, DynamicNTKScaling)

    @property
    def amplitude(self) -> float:
        """The factor that YaRN and LongRoPE apply to both rotated q and rotated k; 1 for other rules.

        Scores contain the square of the factor. Angles do not include the factor, so layers apply the square:
        a layer that rotates whole heads multiplies ``scale`` by ``amplitude ** 2``, and a layer that rotates
        only some channels multiplies these channels of q. Stored keys therefore never contain the factor.
        Hugging Face multiplies cos and sin by ``amplitude`` instead.
        """
        scaling = self.scaling
        if not isinstance(scaling, YaRNScaling | LongRoPEScaling):
            return 1.0
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        if isinstance(scaling, LongRoPEScaling):
            return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position))
        if scaling.mscale and scaling.mscale_all_dim:
            return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
        return _mscale(scaling.factor, 1.0)

    @property
    def latent_scale(self) -> float:
        """DeepSeek's factor on the softmax scale: ``mscale(factor, mscale_all_dim) ** 2``.

        It is 1 if the rope has no ``mscale_all_dim``. It applies to rotated and unrotated channels, in
        addition to ``amplitude``. MultiHeadLatentAttention applies it; other layers apply only ``amplitude``.
        """
        if isinstance(self.scaling, YaRNScaling) and self.scaling.mscale_all_dim:
            return _mscale(self.scaling.factor, self.scaling.mscale_all_dim) ** 2
        return 1.0

    def inverse_frequencies(
        self, *, length: int | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """Return by how many radians each channel pair rotates per position, fp32 ``[dim / 2]``.

        The scaling rule is already applied, and frequencies are in the order of the axes. The numbers are the
        same on every device. They differ from those of Hugging Face transformers on a CPU by at most 4 units
        in the last place, and nearly all are equal.

        Raises:
            TypeError: ``length`` is not an int.
            ValueError: the scaling rule needs a ``length`` and none is given, or it needs none and one is.
        """
        self._check_length(length)
        frequencies = self._scaled_frequencies(length, device)
        return frequencies if self.axes is None else self.axes.reordered(frequencies)

    def _scaled_frequencies(self, length: int | None, device: torch.device | str | None) -> Tensor:
        scaling = self.scaling
        exponents = _quotient(torch.arange(0, self.dim, 2, dtype=torch.float32, device=device), self.dim)
        # We compute powers and quotients in fp64 and round them to fp32, so all devices get the same result.
        # Computed in fp32, they would differ by a few units in the last place between devices and compilers,
        # and at position 100_000 one such unit becomes 0.01 radian.
        wavelengths = (self._base(length) ** exponents.double()).float()
        frequencies = (1.0 / wavelengths.double()).float()
        if isinstance(scaling, LinearScaling):
            return _quotient(frequencies, scaling.factor)
        if isinstance(scaling, Llama3Scaling):
            turns = scaling.original_max_position / (2 * math.pi / frequencies)
            smooth = _quotient(
                turns - scaling.low_freq_factor, scaling.high_freq_factor - scaling.low_freq_factor
            )
            smooth = smooth.clamp(0, 1)
            return _quotient((1 - smooth) * frequencies, scaling.factor) + smooth * frequencies
        if isinstance(scaling, YaRNScaling):
            low, high = yarn_ramp(self, scaling)
            pairs = torch.arange(self.dim // 2, dtype=torch.float32, device=device)
            smooth = 1 - _quotient(pairs - low, high - low).clamp(0, 1)
            return 1.0 / (1.0 * scaling.factor * wavelengths) * (1 - smooth) + frequencies * smooth
        if isinstance(scaling, LongRoPEScaling):
            is_long = length is not None and length > scaling.original_max_position
            factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, device=device)
            return (1.0 / (factors * wavelengths).double()).float()
        if isinstance(scaling, ProportionalScaling):
            turning = int(scaling.share * self.dim // 2)
            slowed = _quotient(frequencies, scaling.factor)
            return torch.cat((slowed[:turning], torch.zeros_like(slowed[turning:])))
        return frequencies

    def angles(self, positions: Tensor, *, length: int | None = None) -> Angles:
        """Return the angles at integer ``positions`` of any shape, computed in fp32.

        With axes, ``positions`` are ``[axes, ...]``; text has equal positions on all axes. The angles are a
        pure rotation, without ``amplitude``. ``length`` is the sequence length for which DynamicNTKScaling
        and LongRoPEScaling choose their factors; it must exceed the greatest position. All other rules raise
        an error if you pass it. Negative positions rotate backwards. An angle is an fp32 product, so its
        error is about ``position * 2 ** -24`` radian, and positions beyond ``2 ** 24`` are rounded.

        Raises:
            TypeError: positions are not integers, or ``length`` is not an int.
            ValueError: the scaling rule needs a ``length`` and none is given, or it needs none and one is; or
                positions do not begin with the dimension of the axes.
        """
        check_strided("positions", positions, "an integer tensor")
        if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
            raise TypeError(
                f"positions: expected an integer tensor, got {positions.dtype}; cast it with positions.long()"
            )
        if self.axes is not None and positions.shape[:1] != (n := len(self.axes.sections),):
            raise ValueError(
                f"positions: expected [axes={n}, ...], one position for each axis of the rope, got "
                f"{tuple(positions.shape)}; text has equal positions on all axes: "
                f"positions.expand({n}, *positions.shape)"
            )
        frequencies = self.inverse_frequencies(length=length, device=positions.device)
        phases = self._per_pair(positions).float() * frequencies
        return Angles(phases.cos(), phases.sin(), self.interleaved)

    def _per_pair(self, positions: Tensor) -> Tensor:
        """Return the position of each channel pair, ``[..., dim / 2]``, or ``[..., 1]`` without axes."""
        return positions.unsqueeze(-1) if self.axes is None else self.axes.per_pair(positions)

    def _base(self, length: int | None) -> float:
        """Return the base of the frequencies: ``theta``, or a larger base with an NTK scaling rule."""
        factor = self._ntk_factor(length)
        base = 1.0 * self.theta  # a float, since torch refuses ints beyond 64 bits
        return base if factor is None else base * factor ** (self.dim / (self.dim - 2))

    def _ntk_factor(self, length: int | None) -> float | None:
        scaling = self.scaling
        if not isinstance(scaling, DynamicNTKScaling):
            return scaling.factor if isinstance(scaling, NTKScaling) else None
        original = scaling.original_max_position
        return scaling.factor * max(length, original) / original - (scaling.factor - 1)

    def _check_length(self, length: int | None) -> None:
        if not self.needs_length:
            if length is not None:
                raise ValueError(
                    "length: only DynamicNTKScaling and LongRoPEScaling depend on it, and scaling="
                    f"{self.scaling}; leave length out"
                )
            return
        if length is None:
            raise ValueError(
                f"length: {type(self.scaling).__name__} needs the length that the angles are for, got None; "
                "compute rope.angles(positions, length=n) and give the Angles to the layer"
            )
        if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
            raise TypeError(f"length: expected an int, got {length!r}")
        if length > INT32:
            raise ValueError(f"length: expected at most {INT32}, got {length}")


def _quotient(x: Tensor, divisor: float) -> Tensor:
    """Divide fp32 ``x`` by ``divisor`` in fp64, and round the quotient to fp32.

    GPUs divide less exactly in fp32, because they multiply by a rounded reciprocal.
    """
    return (x.double() / torch.full_like(x, 1.0 * divisor).double()).float()


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's ``sqrt(1 / t)`` (equation 22), whose logarithm DeepSeek multiplies by ``weight``."""
    return 0.1 * weight * math.log(factor) + 1.0


def yarn_ramp(rope: Rope, yarn: YaRNScaling) -> tuple[float, float]:
    """Return the channel pairs, as fractional numbers, between which YaRN changes from unscaled to scaled.

    Frequencies of pairs up to the first number are unscaled; from the second one on, they are divided by the
    factor.
    """

    def pair(turns: float) -> float:
        """Return the (fractional) channel pair that makes ``turns`` full turns over the original length."""
        return (
            rope.dim
            * math.log(yarn.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The last pair is dim / 2 - 1, but published checkpoints were trained with the bound dim - 1.
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high + 0.001 if low == high else high
