"""Tensor layouts, the cache keys that consist of them, and the stride and scalar arguments of kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...operators import Arguments, CachedArguments, WriteArguments

INTERPRETED = 2  # without a GPU, kernels are planned as if there were 2 multiprocessors
OperatorArguments = Arguments | CachedArguments | WriteArguments


class Layout(NamedTuple):
    """The layout of a tensor: its shape, strides and dtype, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_in_lines(self) -> bool:
        """True if each row of a head starts a multiple of 16 bytes after the tensor's start, as TMA needs."""
        return (
            all(n > 0 and n * self.dtype.itemsize % 16 == 0 for n in self.strides[:-1])
            and 0 not in self.shape
        )


class Key(NamedTuple):
    """The cache key of a launch plan: the device and arguments of a call, with layouts instead of tensors."""

    device: torch.device
    tf32: bool
    aligned: bool  # True if the tensors that TMA may load start at multiples of 16 bytes
    arguments: OperatorArguments
    hopper: bool = True  # True if dedicated Hopper kernels may run the call
    in_order: bool = False  # True if sums must be added in a fixed order
    same_start: bool = False  # True if lists select keys, and k and v start at the same address

    @property
    def layouts(self) -> OperatorArguments:
        """The arguments of the call, with a :class:`Layout` in place of each tensor."""
        return self.arguments._make(Layout(*x) if type(x) is tuple else x for x in self.arguments)


def layout(x: Tensor | None) -> tuple | None:
    """Return the layout of a tensor as a plain tuple, five times as fast to create as a ``Layout``."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def aligned(*tensors: Tensor | None) -> bool:
    """True if every tensor that is not None starts at a multiple of 16 bytes."""
    bits = 0
    for x in tensors:
        bits |= 0 if x is None else x.data_ptr()
    return bits & 15 == 0


def key_of(a: OperatorArguments, first: Tensor, *others: Tensor | None) -> Key:
    """Return the cache key of a call; ``first`` and ``others`` are the tensors that TMA may load."""
    tf32 = first.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    # Captured tensors (in lists) do not change a launch plan, so they are left out.
    layouts = [
        (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else None if type(x) is list else x for x in a
    ]
    return Key(first.device, tf32, aligned(first, *others), a._make(layouts))


def strides(dims: str, **tensors: Layout | None) -> dict[str, int]:
    """Return strides by their names in kernels, such as ``stride_qb`` for dimension ``b`` of ``q``.

    A packed tensor counts as a batch of one, with the batch stride 0. All strides of a missing tensor are 0.
    """
    found = {}
    for name, x in tensors.items():
        of = (0,) * len(dims) if x is None else (0, *x.strides)[-len(dims) :]
        found |= {f"stride_{name}{dim}": n for dim, n in zip(dims, of, strict=True)}
    return found


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """Return the Layout of a new contiguous tensor."""
    return Layout(shape, torch.empty(shape, device="meta").stride(), dtype)


def is_plain(a: Arguments) -> bool:
    """True if scores have neither a softcap nor ALiBi slopes, and there is no dropout."""
    return a.softcap is None and not has_slopes(a) and a.dropout_p == 0


def has_slopes(a: Arguments) -> bool:
    """True if the call has ALiBi slopes."""
    return a.alibi_slopes is not None


def hides_nothing(a: Arguments) -> bool:
    """True if every query sees every key, except keys that a mask function hides."""
    return a.left is a.right is a.key_starts is a.key_ends is None


def scoring(a: Arguments | CachedArguments, heads: int, reach: int) -> dict[str, float | None]:
    """Return the scalar arguments of kernels for the band of a mask and for the score options.

    No query and key are more than ``reach`` tokens apart; larger numbers in the band are reduced to it.
    """
    left, right = (x if x is None else max(-reach, min(x, reach)) for x in (a.left, a.right))
    per_sequence = a.alibi_slopes is not None and len(a.alibi_slopes.shape) == 2
    return {
        "left": left, "right": right, "prefix": min(a.prefix, reach) or None, "scale": a.scale,
        "softcap": a.softcap, "stride_slopes": heads if per_sequence else 0,
    }  # fmt: skip


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED
    )
