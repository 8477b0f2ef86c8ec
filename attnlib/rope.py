"""Rotary position embeddings: a frozen description (Rope), computed angles (Angles), and the rotation."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class NTK:
    """A fixed NTK-aware base: ``theta * factor ** (dim / (dim - 2))``."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNTK:
    """An NTK-aware base that grows with the length; needs an explicit length, and no cache can use it."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama-3.1 scaling: low frequencies divided by ``factor``, high ones kept, a smooth step between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YaRN:
    """YaRN (Peng et al., 2023, arXiv 2309.00071), with DeepSeek's two mscale numbers."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines fp32 ``[..., p / 2]``, and whether the pairs they turn are interleaved."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @property
    def convention(self) -> str:
        """What a cache must not mix: the pairing and the rotated width, as ``half:64`` or ``interleaved:64``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first ``dim`` channels of a head by its position."""

    dim: int
    theta: float = 10_000.0
    scaling: Linear | NTK | DynamicNTK | Llama3 | YaRN | None = None
    interleaved: bool = False

    @property
    def amplitude(self) -> float:
        """The factor that YaRN puts on both rotated q and rotated k (1 without YaRN): scores of rotated channels carry its square."""
        raise NotImplementedError

    @property
    def latent_scale(self) -> float:
        """DeepSeek's factor on the whole softmax scale: ``mscale(factor, mscale_all_dim) ** 2``, else 1."""
        raise NotImplementedError

    def inverse_frequencies(self, *, length: int | None = None, device=None) -> Tensor:
        """fp32 ``[dim / 2]`` under every scaling rule."""
        raise NotImplementedError

    def angles(self, positions: Tensor, *, length: int | None = None) -> Angles:
        """The angles at integer ``positions`` of any shape, computed in fp32; a pure rotation, without amplitude."""
        raise NotImplementedError


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """``x`` ``[..., h, d]`` with its first ``p`` channels rotated by angles ``[..., p / 2]``; the rest pass through."""
    raise NotImplementedError
