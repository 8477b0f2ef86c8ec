"""The properties of launch arguments for which Triton compiles a separate kernel (specializes)."""

from collections.abc import Sequence

from torch import Tensor


def aligned(addresses: list[int | None]) -> object:
    """Return which addresses are multiples of 16 bytes; Triton compiles a separate kernel for each pattern.

    The result is True if all of them are, otherwise a tuple with a bool for each address.
    """
    bits = 0
    for address in addresses:
        bits |= address or 0
    return bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in addresses)


def forms(read: Sequence[tuple | None]) -> object:
    """Return the properties of captured tensors that Triton specializes on; () if there are none."""
    return tuple(map(_form, read)) if any(read) else ()


def _form(x: Tensor | tuple | int | None) -> object:
    """Return the properties of a tensor, a number or a tuple of these that Triton specializes on.

    For a tensor, they are its dtype and alignment; for a number, whether it is 1, a multiple of 16, or beyond
    int32.
    """
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if isinstance(x, int):
        return x == 1, x & 15 == 0, x >> 31
    return x and tuple(map(_form, x))
