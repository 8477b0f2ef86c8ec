"""Start a compiled kernel with private functions of torch and Triton, each tried before it is used.

We keep no list of supported versions. Instead, Triton's launcher must take its arguments in a known order,
and a tiny kernel must write the same bits whether it is launched directly or through Triton.
"""

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars, signature
from typing import NamedTuple

import torch

from ....internal import probes
from ....internal.probes import answer, failure_of

DIRECT, STREAMS = "direct launches", "the current device and stream"
STREAM = 3  # the position of the stream in the arguments of a launcher; the grid comes before it
MOST = 1024  # at most this many descriptors are cached for each block
# The parameters of Triton's launcher. Up to Triton 3.6 it names only the first five; the rest are in
# ``args``.
FIRST = ("gridX", "gridY", "gridZ", "stream", "function")
LATER = (*FIRST, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


class Streams(NamedTuple):
    """Two functions: one returns the current device, the other the address of a device's current stream."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    failures: tuple[str, ...] = ()


def streams() -> Streams:
    """Return torch's functions for the current device and stream: private ones if their trial succeeded.

    The private functions are a microsecond faster than the public ones.
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
    """Raise RuntimeError if private and public functions disagree, on the current stream or a new one."""
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
        arguments: all arguments; the current stream must be filled in at position ``STREAM``.
        first: the position of the first tensor address.
        descriptors: the position, tensor name and cached descriptors of each descriptor argument.
        read: the position of the first tuple of captured tensors.
        hooks: Triton's launch hooks, which show if a profiler observes launches.
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

        A direct launch is impossible while another device is current, and while a profiler is active.
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
    """A cache that maps a tensor's address to the TMA descriptor of one block, created on first use.

    Its descriptors differ from a validated one only in the address, so they are not validated again.
    """

    def __init__(self, make: Callable[[int], object]):
        self._make = make

    def __missing__(self, address: int) -> object:
        if len(self) >= MOST:
            self.clear()
        made = self[address] = self._make(address)
        return made


class Direct(NamedTuple):
    """The launches that may be direct: ``plain`` ones take no TMA descriptor, ``described`` ones do."""

    plain: bool
    described: bool
    failures: tuple[str, ...] = ()


def direct(attempt: Callable[[bool], None]) -> Direct | None:
    """Find out once by a trial which launches may be direct; return None if the trial cannot run now.

    ``attempt(described)`` launches a tiny kernel directly and through Triton, and raises if the bits differ.
    The kernel takes a descriptor if ``described``.
    """
    return answer(DIRECT, partial(_find_direct, attempt))


def failures(attempt: Callable[[bool], None]) -> list[str]:
    """Return the reasons why private functions are not used to start kernels or to get the stream."""
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
    """Return the function that starts a compiled kernel, its constant arguments, and descriptor caches.

    The constant arguments go between the stream and the tensors. Each block has a descriptor cache, with a
    list of sizes to pass after the descriptor. The function is Triton's launcher in C if possible; it takes
    descriptors in the GPU's encoding. If the launcher takes its arguments in another order, or the kernel
    needs scratch memory, the function is Triton's Python wrapper of the launcher.

    Raises:
        TypeError: the launcher takes unknown arguments.
    """
    run, function, metadata, no_hooks = (
        binary.run,
        binary.function,
        binary.packed_metadata,
        (None, None, None),
    )
    # A descriptor that is moved to address 0 no longer keeps its tensor alive.
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
    """An address that Triton accepts in place of a tensor, since it has a ``data_ptr`` method."""

    def data_ptr(self) -> int:
        """Return the address."""
        return self


def _moved(descriptor: object, address: int) -> object:
    """Return a copy of a descriptor for a tensor at another address."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=_Address(address))
    return new


def _encoded(descriptor: object, form: dict) -> tuple[Descriptors, list]:
    """Return a cache of descriptors in the GPU's encoding, and the sizes to pass after each descriptor."""
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
