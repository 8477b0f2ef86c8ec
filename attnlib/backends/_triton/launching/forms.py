"""The launch arguments that Triton specializes on."""

from collections.abc import Sequence

from torch import Tensor


def aligned(addresses: list[int | None]) -> object:
    """Return the alignment of addresses that Triton specializes on.

    True means that all are multiples of 16 bytes; otherwise a tuple has a bool for each address.
    """
    bits = 0
    for address in addresses:
        bits |= address or 0
    return bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in addresses)


def forms(read: Sequence[tuple | None]) -> object:
    """Return the properties of captured tensors that Triton specializes on; () without captured tensors."""
    return tuple(map(_form, read)) if any(read) else ()


def _form(x: Tensor | tuple | int | None) -> object:
    """Return the properties that Triton specializes on, for a tensor, a number or a tuple of them.

    A tensor has its dtype and alignment. A number has flags: equal to 1, a multiple of 16, beyond int32.
    """
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15 == 0
    if isinstance(x, int):
        return x == 1, x & 15 == 0, x >> 31
    return x and tuple(map(_form, x))
