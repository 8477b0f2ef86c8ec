"""What Triton compiles a kernel anew for, of all that a launch hands on."""

from collections.abc import Sequence

from torch import Tensor


def aligned(addresses: list[int | None]) -> object:
    """Which of these addresses are multiples of 16 bytes, as Triton tells them apart; True for all."""
    bits = 0
    for address in addresses:
        bits |= address or 0
    return bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in addresses)


def forms(read: Sequence[tuple | None]) -> object:
    """What Triton compiles a kernel for of all that functions read; () where they read nothing."""
    return tuple(map(_form, read)) if any(read) else ()


def _form(x: Tensor | tuple | int | None) -> object:
    """The same for a tensor and its sizes and strides: dtypes, and which numbers are 1, multiples of 16, or
    long.
    """
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if isinstance(x, int):
        return x == 1, x & 15 == 0, x >> 31
    return x and tuple(map(_form, x))
