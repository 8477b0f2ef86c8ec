"""A kernel with all its arguments but the tensors, launched once through Triton, and directly from then on.

Triton finds out from every argument which binary to run, about 40 us for these kernels. Here a launch belongs to one
set of shapes, and remembers. How a binary is launched is private to Triton, so this is done with known versions alone;
every other one launches as anybody would.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from inspect import getclosurevars
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...watched import IS_KNOWN
from .forms import aligned, forms
from .tables import LaunchConfig

KNOWN = ("3.6", "3.7")  # the versions of Triton whose launchers the tests have passed with
GLUON = ("3.6", "3.7")  # and those whose Gluon
IS_INSTALLED = find_spec("triton") is not None
STREAM = 3  # the place of the stream among what starts a binary, after the grid
MOST = 1024  # descriptors of a block that are kept

if IS_KNOWN and hasattr(torch._C, "_cuda_getDevice"):  # a microsecond sooner than what is public
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
else:
    current_device = torch.cuda.current_device

    def current_stream(device: int) -> int:
        """The address of the current stream of a device."""
        return torch.cuda.current_stream(device).cuda_stream


@lru_cache(4096)
def planned(plan: Callable, *key):
    """What a function plans for all that decides: the one store of launches."""
    return plan(*key)


def remembered(plan: Callable) -> Callable:
    """The same function, whose results are remembered by its arguments."""
    return wraps(plan)(partial(planned, plan))


class Block(NamedTuple):
    """What a descriptor loads at once of a tensor: so many rows and columns, of one head if it has heads.

    ``gluon``: for a kernel in Gluon, which says how a tile lies in shared memory. ``pairs``: of stored bytes, as int16.
    ``together``: of so many heads of a plane ``[pages, page_size, g, d]``.
    """

    tensor: str
    rows: int
    columns: int
    of_heads: bool = True
    gluon: bool = False
    pairs: bool = False
    together: int = 0

    def descriptor(self, x: Tensor):
        """Of ``[b, t, h, d]``, packed ``[t, h, d]``, or of rows that lie one after the other, be it of a vector; of
        ``[pages, page_size, 1]`` as one row."""
        block = self.rows, self.columns
        x = x.view(torch.int16) if self.pairs else x
        if self.together:
            x, block = x.view(-1, *x.shape[-2:]).transpose(0, 1), (self.together, *block)
        elif self.of_heads:
            x, block = x if x.dim() == 4 else x[None], (1, self.rows, 1, self.columns)
        elif x.dim() == 1:
            x = x.view(-1, self.columns)
        elif x.shape[-1] == 1:  # a row begins at a multiple of 16 bytes, and be there but one
            x = x.as_strided((1, x.numel()), (-(-x.numel() // 16) * 16, 1))
        else:
            x = x.view(-1, x.shape[-1])
        shape, strides = list(x.shape), list(x.stride())
        if self.gluon:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            return TensorDescriptor(x, shape, strides, list(block), tile_layout(block, x.dtype))
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(x, shape, strides, list(block))


@remembered
def tile_layout(shape: tuple[int, ...], dtype: torch.dtype):
    """How a tile lies in shared memory where matrix products read it."""
    from triton.experimental.gluon import language as gl

    name = str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8e4nv")
    return gl.NVMMASharedLayout.get_default_for(list(shape), getattr(gl, name))


class _Address(int):
    """An address, which Triton asks a tensor for."""

    def data_ptr(self) -> int:
        """Itself."""
        return self


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


class Started(NamedTuple):
    """What starts a compiled kernel again: ``start(*arguments)``, where a few are filled in first.

    The current stream belongs at ``STREAM``, the addresses of the kernel's tensors from ``first`` on, descriptors at
    places of their own, each of a tensor by its name, and what functions of indices read from ``read`` on. Triton's
    ``hooks`` say whether a profiler follows launches.
    """

    device: int
    hooks: object
    start: Callable
    arguments: list
    first: int
    descriptors: list[tuple[int, str, Descriptors]]
    read: int

    def stream(self) -> int | None:
        """The stream to start on, the current one; None where Triton must be asked: on another device, or followed."""
        hooks = self.hooks
        if self.device != current_device() or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return None
        return current_stream(self.device)


class Launch:
    """``programs`` programs of a kernel, for tensors of the same device, shapes, strides and dtypes.

    The kernel's parameters say what it takes: tensors (``x_ptr``), descriptors (``x_desc``), of which ``blocks`` are
    there, each with its :class:`Block`, what functions of indices read (``x_tensors``), and what ``arguments`` say by
    name, in which there may be more. ``early``: the kernel starts while the one before it runs, and waits for it where
    it needs what that one makes.
    """

    def __init__(
        self,
        kernel: Callable,
        programs: int,
        arguments: dict,
        config: LaunchConfig,
        blocks: dict | None = None,
        *,
        early: bool = False,
    ):
        self.kernel, self.programs, self.blocks = kernel, programs, blocks or {}
        given = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages, **arguments}
        names = kernel.arg_names
        self.tensors = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        self.arguments = {name: given[name] for name in names if not name.endswith(("_ptr", "_desc", "_tensors"))}
        self.captured = [name for name in names if name.endswith("_tensors")]
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        self.options |= {"launch_pdl": True} if early else {}
        self._pick, self._values = itemgetter(*self.tensors), tuple(self.arguments.values())
        self._blocks = [self.blocks.get(name) for name in names if name.endswith("_desc")]
        self._started: dict[object, Started] = {}  # by all that Triton compiles a kernel for

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on tensors by name, of which there may be more, on the current stream of their device."""
        if not self.programs:
            return
        addresses, read = self.addresses(tensors), [tensors.get(name) for name in self.captured]
        started = self.started(addresses, read)
        if started is None or (stream := started.stream()) is None:
            self._ask(tensors, addresses, read)
            return
        arguments = started.arguments.copy()
        arguments[STREAM] = stream
        arguments[started.first : started.first + len(addresses)] = addresses
        for place, name, descriptors in started.descriptors:
            arguments[place] = descriptors[tensors[name].data_ptr()]
        arguments[started.read : started.read + len(read)] = read
        started.start(*arguments)

    def addresses(self, tensors: dict[str, Tensor | None]) -> list[int | None]:
        """The addresses of the kernel's tensors, in its order."""
        return [None if x is None else x.data_ptr() for x in self._pick(tensors)]

    def started(self, addresses: list[int | None], read: Sequence[tuple | None] = ()) -> Started | None:
        """How this starts on tensors aligned as those at these addresses, and functions that read what is alike; None
        where it never has."""
        return self._started.get((aligned(addresses), forms(read)))

    def _ask(self, tensors: dict[str, Tensor | None], addresses: list[int | None], read: list[tuple | None]) -> None:
        """Launch as anybody would, and remember how Triton does it."""
        pointers = self._pick(tensors)
        device = pointers[0].get_device()
        if pointers[0].is_cuda and device != current_device():
            with torch.cuda.device(device):
                self.on(tensors)
            return
        made = [None if block is None else block.descriptor(tensors[block.tensor]) for block in self._blocks]
        binary = self.kernel[(self.programs,)](*pointers, *made, *read, *self._values, **self.options)
        if version() not in KNOWN or binary is None:  # None is under the interpreter
            return
        from triton.knobs import runtime

        start, constants, described = starting(binary, made)
        arguments = [self.programs, 1, 1, None, *constants, *addresses]
        first, places = STREAM + 1 + len(constants), []
        for block, (descriptors, sizes) in zip(self._blocks, described, strict=True):
            if block is not None:
                places.append((len(arguments), block.tensor, descriptors))
            arguments += [None, *sizes]
        at = len(arguments)
        arguments += [*(() if x == () else None for x in read), *self._values]  # which keep no tensor
        self._started[aligned(addresses), forms(read)] = Started(device, runtime, start, arguments, first, places, at)


def starting(binary: object, made: list) -> tuple[Callable, tuple, list[tuple[Descriptors, list]]]:
    """What starts a binary, and what it takes between the stream and the tensors; and what of these descriptors.

    It is a function in C, which takes a descriptor as the chip does, and then its sizes; or, of another Triton or where
    a kernel needs memory of its own, the one in Python before it.
    """
    run, function, metadata, no_hooks = binary.run, binary.function, binary.packed_metadata, (None, None, None)
    described = [(x and Descriptors(partial(_moved, _moved(x, 0))), []) for x in made]  # which keep no tensor
    if version() != "3.6" or not hasattr(run, "launch") or run.global_scratch_size or run.profile_scratch_size:
        return run, (function, metadata, *no_hooks), described
    start, constants = run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None)
    kept = getclosurevars(start).nonlocals if any(x is not None for x in made) else {}
    forms = kept.get("tensordesc_meta", ())
    if forms and None not in forms:
        forms = iter(forms)
        start, described = kept["launcher"], [(x, []) if x is None else _encoded(x, next(forms)) for x in made]
    return start, (*constants, metadata, *no_hooks), described


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
    fixed = (form["swizzle"], form["elem_size"], dtype, block, shape, strides, int(descriptor.padding == "nan"))
    return Descriptors(lambda address: fill(address, *fixed)), [*shape, *strides]


def is_gluon_known() -> bool:
    """Whether Triton is of a version with whose Gluon the tests have passed."""
    return version() in GLUON


@remembered
def version() -> str:
    """The minor version of Triton."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def against(dtype: torch.dtype, device: str, arch: int, *, interpreted: bool) -> list[str]:
    """Why no kernel runs with this dtype on this type of device, or in Triton's interpreter, which needs no GPU."""
    reasons = ["computes in fp32, got fp64"] if dtype == torch.float64 else []
    if device == "cuda" and arch < 80:
        reasons.append(f"needs sm_80 or newer, got sm_{arch}")
    elif device == "cuda" and not IS_INSTALLED:
        reasons.append("needs triton; pip install 'attnlib[triton]'")
    elif interpreted and dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32")
    elif device != "cuda" and not interpreted:
        reasons.append(f"needs a CUDA device, got {device}")
    return reasons
