"""Rotary angles (:class:`Angles`), and a function that rotates heads by angles."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..internal.signatures import kind


@kind
@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Cosines and sines, fp32 ``[..., p / 2]``, and the layout of the channel pairs to rotate.

    The half layout pairs channels ``(c, c + p / 2)``, and the interleaved layout ``(2c, 2c + 1)``. Two Angles
    are equal only if they are the same object.

    Raises:
        TypeError: cos or sin is not an fp32 tensor, or ``interleaved`` is not a bool.
        ValueError: cos and sin differ in shape or device.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def __post_init__(self) -> None:
        check_strided("cos", self.cos)
        check_strided("sin", self.sin)
        if not isinstance(self.interleaved, bool):
            raise TypeError(f"interleaved: expected a bool, got {self.interleaved!r}")
        if self.cos.dtype != torch.float32 or self.sin.dtype != torch.float32:
            raise TypeError(f"angles: expected fp32 cos and sin, got {self.cos.dtype} and {self.sin.dtype}")
        if self.cos.shape != self.sin.shape or self.cos.ndim == 0:
            raise ValueError(
                f"angles: expected cos and sin of one shape [..., p / 2], got {tuple(self.cos.shape)} "
                f"and {tuple(self.sin.shape)}"
            )
        if self.cos.device != self.sin.device:
            raise ValueError(
                f"angles: expected cos and sin on one device, got {self.cos.device} and {self.sin.device}"
            )

    @property
    def convention(self) -> str:
        """The pair layout and the number of rotated channels, such as ``half:64``.

        All keys that a cache stores for one layer must have the same convention.
        """
        return f"{'interleaved' if self.interleaved else 'half'}:{2 * self.cos.shape[-1]}"


@kind
def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the first ``p`` channels of ``x`` ``[..., h, d]`` by angles ``[..., p / 2]``.

    The other channels do not change. For x ``[b, s, h, d]``, angles have the shape ``[b, s, p / 2]``,
    ``[1, s, p / 2]`` or ``[s, p / 2]``; for packed x ``[t, h, d]``, they are ``[t, p / 2]``. The result has
    the dtype and pair layout of x (transformers' interleaved rotation returns the half layout instead). The
    computation is in fp32, or in fp64 with the fp32 angles if x is fp64.

    Raises:
        TypeError: x is not fp16, bf16, fp32 or fp64, or ``angles`` are not Angles.
        ValueError: more channels rotate than x has, or the leading dimensions or the devices do not match.

    >>> x = torch.randn(2, 5, 8, 96)
    >>> rotate(x, Rope(dim=64).angles(torch.arange(5))).shape
    torch.Size([2, 5, 8, 96])
    """
    check_rotation(x, angles)
    half = angles.cos.shape[-1]
    axis, pairs = (-1, (half, 2)) if angles.interleaved else (-2, (2, half))
    first, second = x[..., : 2 * half].unflatten(-1, pairs).unbind(axis)
    cos, sin = angles.cos.unsqueeze(-2), angles.sin.unsqueeze(-2)
    # fp16 and bf16 need no cast: a product with an fp32 tensor is computed in fp32.
    rotated = (
        torch.stack((first * cos - second * sin, second * cos + first * sin), axis).flatten(-2).to(x.dtype)
    )
    return rotated if 2 * half == x.shape[-1] else torch.cat((rotated, x[..., 2 * half :]), -1)


def check_rotation(x: Tensor, angles: Angles) -> None:
    """Raise a TypeError or ValueError that names a remedy, unless ``angles`` can rotate ``x``."""
    check_strided("x", x)
    if not isinstance(angles, Angles):
        raise TypeError(f"angles: expected Angles from rope.angles(positions), got {type(angles).__name__}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"x: expected fp16, bf16, fp32 or fp64, got {x.dtype}")
    if x.device != angles.cos.device:
        raise ValueError(f"angles: expected device {x.device} like x, got {angles.cos.device}")
    width = 2 * angles.cos.shape[-1]
    if x.ndim < 2 or width > x.shape[-1]:
        raise ValueError(
            f"x: expected [..., h, d] with d >= {width}, the channels that the angles rotate, got "
            f"{tuple(x.shape)}; make Rope(dim=...) at most the head dimension"
        )
    tokens, positions = x.shape[:-2], angles.cos.shape[:-1]
    # Only batch dimensions broadcast: one position for all tokens of a sequence is usually a mistake.
    fits = len(positions) <= len(tokens) and positions[-1:] == tokens[-1:]
    if not fits or any(n not in (1, m) for n, m in zip(reversed(positions), reversed(tokens), strict=False)):
        raise ValueError(
            f"angles: expected cos {[*tokens, width // 2]} (batch may be 1 or absent) for x "
            f"{tuple(x.shape)}, got {tuple(angles.cos.shape)}; compute them from positions [b, s], [s] or, "
            "for packed x, [t]"
        )


def check_strided(name: str, x: Tensor, expected: str = "a strided tensor") -> None:
    """Raise TypeError unless ``x`` is a strided tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name}: expected {expected}, got a nested or sparse one")
