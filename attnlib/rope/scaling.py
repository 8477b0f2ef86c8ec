"""Published rules that scale rope for longer contexts, and a temperature for scores. Rope does the
arithmetic.
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
class Linear:
    """Positions divided by ``factor`` (Chen et al., 2023, arXiv 2306.15595).

    Raises:
        TypeError: ``factor`` is not a number.
        ValueError: ``factor`` is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("Linear.factor", self.factor, least=1)


@kind
@dataclass(frozen=True, slots=True)
class NTK:
    """A fixed NTK-aware base: ``theta * factor ** (dim / (dim - 2))``.

    The slowest pair turns ``factor`` times slower and the fastest one as before.

    Raises:
        TypeError: ``factor`` is not a number.
        ValueError: ``factor`` is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("NTK.factor", self.factor, least=1)


@kind
@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """An NTK-aware base that grows with the length; needs an explicit length, and no cache can use it.

    Up to ``original_max_position`` (``max_position_embeddings`` of a Hugging Face config) nothing is scaled;
    at a greater length it is ``NTK(factor * length / original_max_position - (factor - 1))``. Angles of
    different lengths do not mix, so keys rotated at one length are wrong at the next.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``factor`` is below 1, or ``original_max_position`` is not positive.
    """

    factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        check_number("DynamicNTK.factor", self.factor, least=1)
        check_count("DynamicNTK.original_max_position", self.original_max_position, least=1)


@kind
@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama-3.1 scaling: low frequencies divided by ``factor``, high ones kept, a smooth step between.

    A pair is low when it turns less than ``low_freq_factor`` times over ``original_max_position`` positions,
    and high when it turns more than ``high_freq_factor`` times.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or ``high_freq_factor`` is not above ``low_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        check_number("Llama3.factor", self.factor, least=1)
        check_number("Llama3.low_freq_factor", self.low_freq_factor, above=0)
        check_number("Llama3.high_freq_factor", self.high_freq_factor, above=0)
        check_count("Llama3.original_max_position", self.original_max_position, least=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3.high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


@kind
@dataclass(frozen=True, slots=True)
class YaRN:
    """YaRN (Peng et al., 2023, arXiv 2309.00071), with DeepSeek's two mscale numbers.

    Pairs that turn more than ``beta_fast`` (the paper's beta) times over ``original_max_position`` (L)
    positions are kept, those that turn less than ``beta_slow`` (alpha) times are divided by ``factor`` (s),
    with a ramp between; ``truncate`` rounds the ends of the ramp outward to whole pairs. ``Rope.amplitude``
    is the paper's ``sqrt(1 / t)``, or ``attention_factor`` when that is given. As in Hugging Face configs an
    mscale of 0 counts as missing, ``Rope.amplitude`` reads the two mscale numbers only when both are there,
    and ``Rope.latent_scale`` reads only ``mscale_all_dim``.

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
        check_number("YaRN.factor", self.factor, least=1)
        check_count("YaRN.original_max_position", self.original_max_position, least=1)
        check_number("YaRN.beta_fast", self.beta_fast, above=0)
        check_number("YaRN.beta_slow", self.beta_slow, above=0)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YaRN.beta_fast: expected at least beta_slow={self.beta_slow}, got {self.beta_fast}"
            )
        if self.attention_factor is not None:
            check_number("YaRN.attention_factor", self.attention_factor, above=0)
        for name, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None:
                check_number(f"YaRN.{name}", value, least=0)
        if not isinstance(self.truncate, bool):
            raise TypeError(f"YaRN.truncate: expected a bool, got {self.truncate!r}")


@kind
@dataclass(frozen=True, slots=True)
class LongRoPE:
    """LongRoPE (Ding et al., 2024, arXiv 2402.13753): each pair slowed by a factor of its own, found by a
    search.

    Up to ``original_max_position`` the factors are ``short_factor``, beyond it ``long_factor``, one for each
    pair, so that angles need a length; not so where both are alike, which is how to choose one of them for
    all lengths. ``Rope.amplitude`` is ``sqrt(1 + ln(factor) / ln(original_max_position))``, or
    ``attention_factor`` when that is given; ``factor`` is how many times longer sequences may become.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a number is out of range, or there are not as many long factors as short ones.
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
                    f"LongRoPE.{name}: expected a tuple with a number for each pair, got {factors!r}"
                )
            for factor in factors:
                check_number(f"LongRoPE.{name}", factor, above=0)
        check_number("LongRoPE.factor", self.factor, least=1)
        check_count("LongRoPE.original_max_position", self.original_max_position, least=2)
        if self.attention_factor is not None:
            check_number("LongRoPE.attention_factor", self.attention_factor, above=0)


@kind
@dataclass(frozen=True, slots=True)
class Proportional:
    """Only the first ``share`` of the pairs turn, at the frequencies of the whole head divided by ``factor``.

    The pairs of a rope of fewer channels are ``(c, c + p / 2)`` of these; here they are ``(c, c + d / 2)`` of
    all.

    Raises:
        TypeError: a field is not a number.
        ValueError: ``share`` is not above 0 and at most 1, or ``factor`` is below 1.
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_number("Proportional.share", self.share, above=0)
        check_number("Proportional.factor", self.factor, least=1)
        if self.share > 1:
            raise ValueError(f"Proportional.share: expected at most 1, got {self.share}")


@kind
@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries that grow with their position i, by ``1 + weight * ln(1 + floor((i + offset) / interval))``.

    Llama 4 has it in its layers without rope (``offset`` 1), Ministral 3 in all (0). Negative positions count
    as 0.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range.
    """

    weight: float
    interval: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_number("Temperature.weight", self.weight, above=0)
        check_count("Temperature.interval", self.interval, least=1)
        check_count("Temperature.offset", self.offset)

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """``q`` ``[..., h, d]`` of tokens at integer ``positions`` ``[...]``, leading dimensions 1 or
        absent.
        """
        steps = ((positions.clamp(min=0) + self.offset) // self.interval)[..., None, None]
        steps = steps.to(torch.promote_types(q.dtype, torch.float32))
        return (q * (1 + float(self.weight) * torch.log1p(steps))).to(q.dtype)


Scaling = Linear | NTK | DynamicNTK | Llama3 | YaRN | LongRoPE | Proportional
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")  # Hugging Face's names


def scaling_of(fields: Mapping[str, object], *, max_position: int | None) -> Scaling | None:
    """The rule that a Hugging Face config's ``rope_parameters`` describe; ``max_position`` is the model's
    longest.

    Raises:
        KeyError: a number is missing.
        TypeError, ValueError: the kind is unknown, or a number impossible.
    """
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"rope_type: expected one of {', '.join(KINDS)}, got {str(kind)[:80]!r}")
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(fields["factor"])
    if kind == "proportional":
        return Proportional(fields.get("partial_rotary_factor", 1.0), fields.get("factor") or 1.0)
    if kind == "dynamic":
        return DynamicNTK(fields["factor"], _longest(max_position))
    original = fields.get("original_max_position_embeddings")
    original = _longest(max_position) if original is None else original
    if kind == "llama3":
        return Llama3(fields["factor"], fields["low_freq_factor"], fields["high_freq_factor"], original)
    factor = fields.get("factor")
    factor = _longest(max_position) / original if factor is None else factor
    if kind == "longrope":
        short, long = (tuple(fields[name]) for name in ("short_factor", "long_factor"))
        return LongRoPE(short, long, factor, original, fields.get("attention_factor"))
    betas = fields.get("beta_fast") or 32.0, fields.get("beta_slow") or 1.0
    weights = (fields.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    return YaRN(factor, original, *betas, *weights, fields.get("truncate", True))


def _longest(max_position: int | None) -> int:
    if max_position is None:
        raise KeyError("max_position_embeddings")
    return max_position


def check_number(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Refuse what is not a number within these bounds that fp32 holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    holds = value == 0 or FP32.tiny <= abs(value) <= FP32.max  # neither 0 nor inf in fp32
    if not (holds and value >= least and value > above):
        bound = f"of at least {least}" if math.isfinite(least) else f"above {above}"
        raise ValueError(f"{name}: expected a finite number {bound}, got {value}")
