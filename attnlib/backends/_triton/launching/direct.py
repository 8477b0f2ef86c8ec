"""Private ways of torch and Triton to start a compiled kernel, each tried before it is taken.

Nothing here is listed by version: Triton's launcher must take arguments in a known order, and a tiny kernel
that is started so must write the same bits as one that Triton starts.
"""

from collections.abc import Callable
from functools import partial
from inspect import getclosurevars, signature
from typing import NamedTuple

import torch

from ....internal import probes
from ....internal.probes import answer, failure_of

DIRECT, STREAMS = "direct launches", "the current device and stream"
STREAM = 3  # the place of the stream among what starts a binary, after the grid
MOST = 1024  # descriptors of a block that are kept
# What launchers take, by Triton's names: up to 3.6 the last four stand for themselves in ``args``.
FIRST = ("gridX", "gridY", "gridZ", "stream", "function")
LATER = (*FIRST, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


class Streams(NamedTuple):
    """Functions that return the current device, and the address of its current stream."""

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    failures: tuple[str, ...] = ()


def streams() -> Streams:
    """torch's private functions, a microsecond sooner, once they have agreed with the public ones; else
    these.
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
    """Ask both ways on the current stream and on another one."""
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            device = torch.cuda.current_device()
            found, public = (
                (private.current_device(), private.current_stream(device)),
                (device, _public_stream(device)),
            )
        if found != public:
            raise RuntimeError(f"it says device and stream {found} where public functions say {public}")


class Started(NamedTuple):
    """The prepared launch of a compiled kernel: fill in a few arguments, then call ``start(*arguments)``.

    The current stream belongs at ``STREAM``, the addresses of the kernel's tensors from ``first`` on,
    descriptors at places of their own, each of a tensor by its name, and what functions of indices read from
    ``read`` on. Triton's ``hooks`` say whether a profiler follows launches.
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
        """The stream to start on, the current one; None where Triton must be asked: on another device, or
        followed.
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
    """The descriptors of one block by the addresses of its tensor, made where there is none yet.

    All else is as in the first one, so that nothing is checked again.
    """

    def __init__(self, make: Callable[[int], object]):
        self._make = make

    def __missing__(self, address: int) -> object:
        if len(self) >= MOST:
            self.clear()
        made = self[address] = self._make(address)
        return made


class Direct(NamedTuple):
    """The launches that may go directly: ``plain`` ones without a descriptor, ``described`` ones with one."""

    plain: bool
    described: bool
    failures: tuple[str, ...] = ()


def direct(attempt: Callable[[bool], None]) -> Direct | None:
    """Find, once, which launches may go directly; return None if that cannot be tried now.

    ``attempt`` launches a tiny kernel both ways, with a descriptor or without, and raises if the bits differ.
    """
    return answer(DIRECT, partial(_find_direct, attempt))


def failures(attempt: Callable[[bool], None]) -> list[str]:
    """Why launches do not go directly, or torch is asked in public for the stream, if so."""
    return [
        *probes.failures(STREAMS, _find_streams),
        *probes.failures(DIRECT, partial(_find_direct, attempt)),
    ]


def _find_direct(attempt: Callable[[bool], None]) -> Direct:
    if why := failure_of(lambda: attempt(False)):
        return Direct(
            False, False, (f"{DIRECT}: {why}; Triton is asked at every launch, which takes about 40 us",)
        )
    if torch.cuda.get_device_capability()[0] < 9:
        return Direct(True, True)  # where no kernel takes a descriptor
    why = failure_of(lambda: attempt(True))
    cost = "Triton is asked at every launch of a dedicated Hopper kernel, which takes about 40 us"
    return Direct(True, not why, (f"{DIRECT} with descriptors: {why}; {cost}",) if why else ())


def starting(binary: object, made: list) -> tuple[Callable, tuple, list[tuple[Descriptors, list]]]:
    """Return the function that starts a binary, its arguments between stream and tensors, and each
    descriptor's values.

    It is a function in C, which takes a descriptor as the chip does, and then its sizes; or, where the
    arguments stand in another order or a kernel needs memory of its own, the one in Python before it.

    Raises:
        TypeError: the launcher takes other arguments than these.
    """
    run, function, metadata, no_hooks = (
        binary.run,
        binary.function,
        binary.packed_metadata,
        (None, None, None),
    )
    described = [(x and Descriptors(partial(_moved, _moved(x, 0))), []) for x in made]  # which keep no tensor
    *named, rest = signature(run).parameters.values()
    names = tuple(x.name for x in named)
    if rest.kind is not rest.VAR_POSITIONAL or names not in (FIRST, LATER):
        raise TypeError(f"Triton's launcher takes {signature(run)}, which is not known")
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
    """An address, which Triton asks a tensor for."""

    def data_ptr(self) -> int:
        """Itself."""
        return self


def _moved(descriptor: object, address: int) -> object:
    """The same descriptor of a tensor elsewhere."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=_Address(address))
    return new


def _encoded(descriptor: object, form: dict) -> tuple[Descriptors, list]:
    """The chip's descriptors like this one, of tensors elsewhere, and the sizes that kernels take besides."""
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
