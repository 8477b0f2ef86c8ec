"""Argument checks shared by public functions: counts, named dimensions, and values on the device.

Values on the device are only checked with ``ATTNLIB_CHECK=1``.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

INT32 = 2**31 - 1
NO_SIZES: Mapping[str, int] = MappingProxyType({})


def check_count(name: str, value: int, *, least: int = 0) -> None:
    """Raise TypeError or ValueError unless ``value`` is an int of at least ``least`` that fits int32."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    if value > INT32:
        raise ValueError(f"{name}: expected at most {INT32}, since lengths and pages are int32, got {value}")


def is_strided(x: object) -> bool:
    """True if x is a strided tensor and not nested; performance-critical code repeats this test inline."""
    return isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided


def came(x: object) -> str:
    """Describe an argument for an error message: by dtype and shape if it is a tensor, else by type."""
    if is_strided(x):
        return f"{x.dtype} {tuple(x.shape)}"
    return "one that is not strided" if isinstance(x, Tensor) else type(x).__name__


def varies(size: int) -> bool:
    """True if ``size > 1``, as a real bool even when torch.compile keeps ``size`` symbolic."""
    return True if size > 1 else False  # noqa: SIM210 - bool() of a symbolic size is symbolic too


def refuse_tensor(name: str, x: object) -> NoReturn:
    """Raise TypeError for an object that :func:`is_strided` rejects."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(
            f"{name}: expected a strided tensor, got a nested one; pack it and use varlen_attention"
        )
    raise TypeError(f"{name}: expected a strided tensor, got {x.layout}")


def bind(*named: tuple[str, Tensor, str], known: dict[str, int] | None = None) -> dict[str, int]:
    """Match tensors to named dimensions such as ``("q", q, "bshd"), ("k", k, "btgd")``; return the sizes.

    ``known`` holds the sizes of dimensions that are known already.

    Raises:
        ValueError: a tensor has a different number of dimensions, or a letter has two different sizes; the
            message names both tensors.

    >>> bind(("q", torch.zeros(2, 3, 4, 8), "bshd"))
    {'b': 2, 's': 3, 'h': 4, 'd': 8}
    """
    sizes: dict[str, int] = dict(known) if known else {}
    for name, tensor, dims in named:
        shape = tensor.shape
        if len(shape) != len(dims):
            raise ValueError(f"{name}: expected [{', '.join(dims)}], got {tuple(shape)}")
        for dim, size in zip(dims, shape):  # noqa: B905 - the lengths are equal, and strict= is slower
            if sizes.setdefault(dim, size) != size:
                raise ValueError(_mismatch(name, dims, shape, sizes, named))
    return sizes


def _mismatch(name, dims, shape, sizes, named) -> str:
    expected = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else dim for dim in dims)
    wrong = next(dim for dim, size in zip(dims, shape, strict=True) if sizes.get(dim, size) != size)
    owner = next(other for other, _, other_dims in named if wrong in other_dims)
    owner = "the call" if owner == name else owner
    return f"{name}: expected [{expected}], got {tuple(shape)}; {owner} has {wrong}={sizes[wrong]}"


def check_dims(
    name: str,
    tensors: Sequence[Tensor],
    dims: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    least: Mapping[str, int],
) -> None:
    """Raise ValueError if tensors that a mask or score function reads do not match the ``sizes`` of a call.

    ``dims`` holds a letter for each dimension of each tensor ("" if unknown). ``sizes`` has the exact size of
    a letter, and ``least`` a lower bound; "T" stands for ``t`` or more, and "t/64+1" for one more than the
    blocks of 64 in ``t``. A letter in neither mapping is not compared. Without this check, an index out of
    range would be clamped and read a wrong element.
    """
    blocks = {dim for letters in dims for dim in letters if "/" in dim}
    sizes, least = ({**known, **_of_blocks(blocks, known)} for known in (sizes, least))
    for x, letters in zip(tensors, dims, strict=False):
        pairs = [*zip(letters, x.shape, strict=False)]
        if any(sizes.get(dim, size) != size or size < least.get(dim, 0) for dim, size in pairs):
            bounds = {dim: f"{dim.lower()}>={size}" for dim, size in least.items() if size}
            bounds |= {dim: f"{dim}={size}" for dim, size in sizes.items()}
            expected = ", ".join(bounds.get(dim, dim.lower()) for dim in letters)
            turned = x.dim() == 2 and "n" in letters and sizes.get("h") == x.shape[1 - letters.index("h")]
            remedy = (
                "; transpose it, or use heads_last=True for T5's own table [buckets, h]"
                if turned
                else "; list the blocks of all its queries, and pass its number of keys to block_list"
                if blocks.intersection(letters)
                else ""
            )
            raise ValueError(f"{name} [{expected}] as the call has them, got {tuple(x.shape)}{remedy}")


def _of_blocks(dims: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each dimension such as "t/64+1" whose letter is in ``sizes``."""
    found = {}
    for dim in dims:
        block, _, more = dim[2:].partition("+")
        if dim[0] in sizes:
            found[dim] = -(-sizes[dim[0]] // int(block)) + int(more or 0)
    return found


def is_recorded(x: Tensor) -> bool:
    """True if a compiler or CUDA graph is recording operations on ``x``, to replay them with other values."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def are_checks_on(x: Tensor) -> bool:
    """True if ``ATTNLIB_CHECK=1`` is set and the values of ``x`` can be read.

    Values cannot be read in a compiler, on the meta device, or during the capture of a CUDA graph.
    """
    return os.environ.get("ATTNLIB_CHECK") == "1" and type(x) is Tensor and not (is_recorded(x) or x.is_meta)


def check_slots(slots: Tensor, capacity: int) -> None:
    """Raise ValueError unless each slot is -1 (no write) or a distinct number from 0 to ``capacity - 1``."""
    written = [slot for slot in slots.flatten().tolist() if slot != -1]
    for slot in written:
        if not 0 <= slot < capacity:
            raise ValueError(
                f"slots: expected -1 or less than {capacity}, the tokens of the cache, got {slot}"
            )
    if len(set(written)) < len(written):
        raise ValueError("slots: expected each slot once, got one of them twice")
