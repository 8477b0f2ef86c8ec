"""Private functions of torch and Triton that start a compiled kernel, each tried before it is used.

There is no list of versions. Triton's launcher must take its arguments in a known order, and a tiny kernel
that is launched directly must write the same bits as through Triton.
"""

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars, signature
from typing import NamedTuple

import torch

from ....internal import probes
from ....internal.probes import answer, failure_of

DIRECT, STREAMS = "direct launches", "the current device and stream"
STREAM = 3  # the position of the stream in a launcher's arguments, after the grid
MOST = 1024  # descriptors of a block that are cached
# Parameters of Triton's launcher; up to Triton 3.6 the last four have no names and are part of ``args``.
FIRST = ("gridX", "gridY", "gridZ", "stream", "function")
LATER = (*FIRST, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


class Streams(NamedTuple):
    """Functions that return the current device, and the address of its current stream."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    failures: tuple[str, ...] = ()


def streams() -> Streams:
    """Return torch's private functions if their trial succeeded, otherwise the public ones.

    The private functions are a microsecond faster.
    """
    return answer(STREAMS, _find_streams) or PUBLIC


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


PUBLIC = Streams(torch.cuda.current_device, _public_stream)


def _private_streams() -> Streams:
    return Streams(torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream)


def _find_streams() -> Streams:
    if why := failure_of(lambda: _compare_streams(_private_streams())):
        return PUBLIC._replace(failures=(f"{STREAMS}: {why}; public functions take a microsecond longer",))
    return _private_streams()


def _compare_streams(private: Streams) -> None:
    """Compare private with public functions on the current stream and on another one."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            device = torch.cuda.current_device()
            found, public = (
                (private.current_device(), private.current_stream(device)),
                (device, _public_stream(device)),
            )
        if found != public:
            raise RuntimeError(f"it returns device and stream {found}, but public functions return {public}")


class CachedLaunch(NamedTuple):
    """A cached launch of a compiled kernel: fill in a few arguments, then call ``start(*arguments)``.

    Attributes:
        arguments: all arguments; the current stream goes to position ``STREAM``.
        first: position of the first tensor address.
        descriptors: position, tensor name and descriptors for each descriptor argument.
        read: position of the first tuple of captured tensors.
        hooks: Triton's launch hooks, which show whether a profiler follows launches.
    """

    device: int
    streams: Streams
    hooks: object
    start: Callable
    arguments: list
    first: int
    descriptors: list[tuple[int, str, "Descriptors"]]
    read: int

    def stream(self) -> int | None:
        """Return the current stream, or None if the launch must go through Triton.

        This is so on another device, and under a profiler.
        """
        hooks, ask = self.hooks, self.streams
        if (
            self.device != ask.current_device()
            or hooks.launch_enter_hook.calls
            or hooks.launch_exit_hook.calls
        ):
            return None
        return ask.current_stream(self.device)


class Descriptors(dict):
    """The descriptors of one block by the address of its tensor, created when first needed.

    They differ only in the address, so nothing is validated again.
    """

    def __init__(self, make: Callable[[int], object]):
        self._make = make

    def __missing__(self, address: int) -> object:
        if len(self) >= MOST:
            self.clear()
        made = self[address] = self._make(address)
        return made


class Direct(NamedTuple):
    """The launches that may be direct: ``plain`` ones without a descriptor, ``described`` ones with one."""

    plain: bool
    described: bool
    failures: tuple[str, ...] = ()


def direct(attempt: Callable[[bool], None]) -> Direct | None:
    """Return the launches that may be direct, found by a single trial; None if it cannot run now.

    ``attempt`` launches a tiny kernel both ways, with a descriptor or without, and raises if the bits differ.
    """
    return answer(DIRECT, partial(_find_direct, attempt))


def failures(attempt: Callable[[bool], None]) -> list[str]:
    """Return why launches go through Triton, or why the stream comes from public functions, if so."""
    return [
        *probes.failures(STREAMS, _find_streams),
        *probes.failures(DIRECT, partial(_find_direct, attempt)),
    ]


def _find_direct(attempt: Callable[[bool], None]) -> Direct:
    if why := failure_of(lambda: attempt(False)):
        return Direct(
            False, False, (f"{DIRECT}: {why}; every launch goes through Triton, which takes about 40 us",)
        )
    if torch.cuda.get_device_capability()[0] < 9:
        return Direct(True, True)  # no kernel takes descriptors before Hopper
    why = failure_of(lambda: attempt(True))
    cost = "launches of dedicated Hopper kernels go through Triton, which takes about 40 us each"
    return Direct(True, not why, (f"{DIRECT} with descriptors: {why}; {cost}",) if why else ())


def starting(binary: object, made: list) -> tuple[Callable, tuple, list[tuple[Descriptors, list]]]:
    """Return the function that starts a binary, its constant arguments, and the descriptors of each block.

    Constant arguments are those between the stream and the tensors. Each block also has a list of sizes that
    follow its descriptor. The function is Triton's launcher in C, which takes descriptors in the GPU's
    encoding. If its arguments are in another order, or the kernel needs scratch memory, it is the Python
    function above it.

    Raises:
        TypeError: the launcher takes unknown arguments.
    """
    run, function, metadata, no_hooks = (
        binary.run,
        binary.function,
        binary.packed_metadata,
        (None, None, None),
    )
    # Moving a descriptor to address 0 lets go of its tensor.
    described = [(x and Descriptors(partial(_moved, _moved(x, 0))), []) for x in made]
    *named, rest = signature(run).parameters.values()
    names = tuple(x.name for x in named)
    if rest.kind is not rest.VAR_POSITIONAL or names not in (FIRST, LATER):
        raise TypeError(f"Triton's launcher takes unknown arguments: {signature(run)}")
    if names == LATER or not hasattr(run, "launch") or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, metadata, *no_hooks), described
    start, constants = run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    kept = getclosurevars(start).nonlocals if any(x is not None for x in made) else {}
    forms = kept.get("tensordesc_meta", ())
    if forms and None not in forms:
        forms = iter(forms)
        start, described = (
            kept["launcher"],
            [(x, []) if x is None else _encoded(x, next(forms)) for x in made],
        )
    return start, (*constants, metadata, *no_hooks), described


class _Address(int):
    """An address with the ``data_ptr`` method of a tensor, which Triton calls."""

    def data_ptr(self) -> int:
        """Return the address."""
        return self


def _moved(descriptor: object, address: int) -> object:
    """Return the same descriptor for a tensor at another address."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=_Address(address))
    return new


def _encoded(descriptor: object, form: dict) -> tuple[Descriptors, list]:
    """Return descriptors in the GPU's encoding by address, and the sizes that kernels take after them."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    fill, shape, strides = driver.active.utils.fill_tma_descriptor, descriptor.shape, descriptor.strides
    dtype, block = TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]], form["block_size"]
    fixed = (
        form["swizzle"],
        form["elem_size"],
        dtype,
        block,
        shape,
        strides,
        int(descriptor.padding == "nan"),
    )
    return Descriptors(lambda address: fill(address, *fixed)), [*shape, *strides]
