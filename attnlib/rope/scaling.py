"""Rope scaling rules for longer contexts, and a factor on queries that grows with position (Temperature).

The rules only hold parameters; :class:`Rope` does the arithmetic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..internal.checks import check_count
from ..internal.signatures import kind

FP32 = torch.finfo(torch.float32)


@kind
@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear position interpolation: divide positions by ``factor`` (Chen et al., 2023, arXiv 2306.15595).

    Raises:
        TypeError: ``factor`` is not a number.
        ValueError: ``factor`` is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("LinearScaling.factor", self.factor, least=1)


@kind
@dataclass(frozen=True, slots=True)
class NTKScaling:
    """NTK-aware rope scaling: replace ``theta`` by ``theta * factor ** (dim / (dim - 2))`` at all lengths.

    The slowest channel pair then rotates ``factor`` times slower, and the fastest pair as before.

    Raises:
        TypeError: ``factor`` is not a number.
        ValueError: ``factor`` is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("NTKScaling.factor", self.factor, least=1)


@kind
@dataclass(frozen=True, slots=True)
class DynamicNTKScaling:
    """NTK-aware rope scaling that becomes stronger as the sequence gets longer.

    Angles depend on the sequence length, so this rule does not work with a cache: keys rotated for one length
    are wrong for the next. Up to ``original_max_position`` tokens (``max_position_embeddings`` in a Hugging
    Face config) nothing is scaled. For longer sequences, the rule is the same as
    ``NTKScaling(factor * length / original_max_position - (factor - 1))``.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``factor`` is below 1, or ``original_max_position`` is not positive.
    """

    factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        check_number("DynamicNTKScaling.factor", self.factor, least=1)
        check_count("DynamicNTKScaling.original_max_position", self.original_max_position, least=1)


@kind
@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1 scaling: divide low frequencies by ``factor``, keep high ones, and interpolate between them.

    A frequency is low if its channel pair makes fewer than ``low_freq_factor`` full turns over
    ``original_max_position`` positions, and high if the pair makes more than ``high_freq_factor`` turns.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or ``high_freq_factor`` is not above ``low_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        check_number("Llama3Scaling.factor", self.factor, least=1)
        check_number("Llama3Scaling.low_freq_factor", self.low_freq_factor, above=0)
        check_number("Llama3Scaling.high_freq_factor", self.high_freq_factor, above=0)
        check_count("Llama3Scaling.original_max_position", self.original_max_position, least=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@kind
@dataclass(frozen=True, slots=True)
class YaRNScaling:
    """YaRN rope scaling (Peng et al., 2023, arXiv 2309.00071), with DeepSeek's two mscale parameters.

    The rule depends on how many full turns a channel pair makes over ``original_max_position`` (the paper's
    L) positions. With more than ``beta_fast`` (beta) turns, its frequency does not change; with fewer than
    ``beta_slow`` (alpha) turns, it is divided by ``factor`` (s). In between, frequencies follow a
    ramp; ``truncate`` rounds the ramp's ends outward to whole pairs.

    ``Rope.amplitude`` is the paper's ``sqrt(1 / t)``, or ``attention_factor`` if you pass one. As in Hugging
    Face configs, an mscale of 0 counts as missing. ``Rope.amplitude`` uses the mscale parameters only if both
    are given; ``Rope.latent_scale`` uses only ``mscale_all_dim``. Layers apply these factors
    themselves, so pass their ``scale`` without them.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or ``beta_fast`` is below ``beta_slow``.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_number("YaRNScaling.factor", self.factor, least=1)
        check_count("YaRNScaling.original_max_position", self.original_max_position, least=1)
        check_number("YaRNScaling.beta_fast", self.beta_fast, above=0)
        check_number("YaRNScaling.beta_slow", self.beta_slow, above=0)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YaRNScaling.beta_fast: expected at least beta_slow={self.beta_slow}, got {self.beta_fast}"
            )
        if self.attention_factor is not None:
            check_number("YaRNScaling.attention_factor", self.attention_factor, above=0)
        for name, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None:
                check_number(f"YaRNScaling.{name}", value, least=0)
        if not isinstance(self.truncate, bool):
            raise TypeError(f"YaRNScaling.truncate: expected a bool, got {self.truncate!r}")


@kind
@dataclass(frozen=True, slots=True)
class LongRoPEScaling:
    """LongRoPE (Ding et al., 2024, arXiv 2402.13753): slow each channel pair by a factor found by search.

    ``short_factor`` and ``long_factor`` have one number for each pair. The first tuple applies to lengths up
    to ``original_max_position``, the second to longer ones. Angles therefore need a length, unless you pass
    the same tuple twice to use it for all lengths. ``factor`` is how many times longer sequences may become.
    ``Rope.amplitude`` is ``sqrt(1 + ln(factor) / ln(original_max_position))``, or ``attention_factor`` if you
    pass one.

    Raises:
        TypeError: a field has the wrong type, or the tuples differ in length.
        ValueError: a number is out of range.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, tuple) or len(factors) != len(self.short_factor):
                raise TypeError(
                    f"LongRoPEScaling.{name}: expected a tuple with a number for each pair, got {factors!r}"
                )
            for factor in factors:
                check_number(f"LongRoPEScaling.{name}", factor, above=0)
        check_number("LongRoPEScaling.factor", self.factor, least=1)
        check_count("LongRoPEScaling.original_max_position", self.original_max_position, least=2)
        if self.attention_factor is not None:
            check_number("LongRoPEScaling.attention_factor", self.attention_factor, above=0)


@kind
@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Partial rotation: only a fraction ``share`` of the channel pairs rotate, from the first pair on.

    These pairs have the frequencies of a fully rotated head, divided by ``factor``. A pair is two channels
    ``(c, c + d / 2)`` of the whole head, whereas a Rope with a smaller ``dim`` p would pair channels
    ``(c, c + p / 2)``.

    Raises:
        TypeError: a field is not a number.
        ValueError: ``share`` is not above 0 and at most 1, or ``factor`` is below 1.
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_number("ProportionalScaling.share", self.share, above=0)
        check_number("ProportionalScaling.factor", self.factor, least=1)
        if self.share > 1:
            raise ValueError(f"ProportionalScaling.share: expected at most 1, got {self.share}")


@kind
@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """A factor on queries that grows with position: ``1 + weight * ln(1 + floor((i + offset) / interval))``.

    Llama 4 uses it in its layers without rope (``offset=1``), Ministral 3 in all layers (``offset=0``).
    Negative positions count as 0. In a layer whose rope has several axes, ``i`` is the position on axis 0.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range.
    """

    weight: float
    interval: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_number("QueryTemperature.weight", self.weight, above=0)
        check_count("QueryTemperature.interval", self.interval, least=1)
        check_count("QueryTemperature.offset", self.offset)

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return ``q`` ``[..., h, d]`` scaled for tokens at integer ``positions`` ``[...]``.

        Batch and other leading dimensions of ``positions`` may be 1 or absent.
        """
        steps = ((positions.clamp(min=0) + self.offset) // self.interval)[..., None, None]
        steps = steps.to(torch.promote_types(q.dtype, torch.float32))
        return (q * (1 + float(self.weight) * torch.log1p(steps))).to(q.dtype)


def scaled_by_position(q: Tensor, positions: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return q ``[..., h, d]`` times ``scale_h * ln(i + 1) + bias_h``, at integer positions i ``[...]``."""
    steps = torch.log1p(positions.to(torch.promote_types(q.dtype, torch.float32)))
    factors = steps[..., None] * scale + bias
    return (q * factors[..., None]).to(q.dtype)


Scaling = (
    LinearScaling
    | NTKScaling
    | DynamicNTKScaling
    | Llama3Scaling
    | YaRNScaling
    | LongRoPEScaling
    | ProportionalScaling
)
# The supported values of rope_type in Hugging Face configs.
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def scaling_of(fields: Mapping[str, object], *, max_position: int | None) -> Scaling | None:
    """Return the scaling rule that the ``rope_parameters`` of a Hugging Face config describe.

    ``max_position`` is the config's ``max_position_embeddings``, used if a rule does not specify its original
    length.

    Raises:
        KeyError: a parameter is missing.
        TypeError, ValueError: the rope type is unknown, or a parameter is out of range.
    """
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope_type: expected one of {', '.join(KINDS)}, got {str(kind)[:80]!r}")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields["factor"])
    if kind == "proportional":
        return ProportionalScaling(fields.get("partial_rotary_factor", 1.0), fields.get("factor") or 1.0)
    if kind == "dynamic":
        return DynamicNTKScaling(fields["factor"], _longest(max_position))
    original = fields.get("original_max_position_embeddings")
    original = _longest(max_position) if original is None else original
    if kind == "llama3":
        return Llama3Scaling(
            fields["factor"], fields["low_freq_factor"], fields["high_freq_factor"], original
        )
    factor = fields.get("factor")
    factor = _longest(max_position) / original if factor is None else factor
    if kind == "longrope":
        short, long = (tuple(fields[name]) for name in ("short_factor", "long_factor"))
        return LongRoPEScaling(short, long, factor, original, fields.get("attention_factor"))
    betas = fields.get("beta_fast") or 32.0, fields.get("beta_slow") or 1.0
    weights = (fields.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    return YaRNScaling(factor, original, *betas, *weights, fields.get("truncate", True))


def _longest(max_position: int | None) -> int:
    if max_position is None:
        raise KeyError("max_position_embeddings")
    return max_position


def check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Raise TypeError or ValueError unless ``value`` is a number within bounds that fp32 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    holds = value == 0 or FP32.tiny <= abs(value) <= FP32.max  # fp32 stores it as 0 or a normal number
    if not (holds and value >= least and value > above):
        bound = f"of at least {least}" if math.isfinite(least) else f"above {above}"
        raise ValueError(f"{name}: expected a finite number {bound}, got {value}")
