"""A kernel with all its arguments but the tensors, launched once through Triton, and directly from then on.

Triton finds out from every argument which binary to run, about 40 us for these kernels. Here a launch belongs to one
set of shapes, and remembers. How a binary is launched is private to Triton, so this is done with known versions alone;
every other one launches as anybody would.
"""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...watched import IS_KNOWN
from .tables import LaunchConfig

KNOWN = ("3.6", "3.7")  # the versions of Triton whose launchers the tests have passed with
GLUON = ("3.6", "3.7")  # and those whose Gluon

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

    ``gluon``: for a kernel in Gluon, which says how a tile lies in shared memory.
    """

    tensor: str
    rows: int
    columns: int
    of_heads: bool = True
    gluon: bool = False

    def descriptor(self, x: Tensor):
        """Of ``[b, t, h, d]``, packed ``[t, h, d]``, or of rows that lie one after the other."""
        if self.of_heads:
            x, block = x if x.dim() == 4 else x[None], (1, self.rows, 1, self.columns)
        else:
            x, block = x.view(-1, x.shape[-1]), (self.rows, self.columns)
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


def _copied(descriptor: object, x: Tensor | None) -> object:
    """The same descriptor of another tensor, unchecked."""
    new = object.__new__(type(descriptor))
    new.__dict__.update(descriptor.__dict__, base=x)
    return new


class Launch:
    """``programs`` programs of a kernel, for tensors of the same device, shapes, strides and dtypes.

    The kernel's parameters say what it takes: tensors (``x_ptr``), descriptors (``x_desc``), of which ``blocks`` are
    there, each with its :class:`Block`, and what ``arguments`` say by name, in which there may be more. ``early``: the
    kernel starts while the one before it runs, and waits for it where it needs what that one makes.
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
        from triton.knobs import runtime

        self.kernel, self.programs, self.blocks = kernel, programs, blocks or {}
        given = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages, **arguments}
        names = kernel.arg_names
        self.tensors = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        self.arguments = {name: given[name] for name in names if not name.endswith(("_ptr", "_desc"))}
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        self.options |= {"launch_pdl": True} if early else {}
        self._pick, self._values = itemgetter(*self.tensors), tuple(self.arguments.values())
        self._described: dict[Block, object] = {}  # a descriptor of each block, without its tensor
        self._blocks = [self.blocks.get(name) for name in names if name.endswith("_desc")]
        self._hooks = runtime if version() in KNOWN else None
        self._compiled: dict[object, tuple] = {}  # by which tensors begin at a multiple of 16 bytes

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on tensors by name, of which there may be more, on the current stream of their device."""
        ready, bits, n = *self._ready(tensors), len(self.tensors)
        aligned = bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in ready[:n])
        if not self.programs or self._run(aligned, ready):
            return
        pointers = self._pick(tensors)
        device = pointers[0].get_device()
        if pointers[0].is_cuda and device != current_device():
            with torch.cuda.device(device):
                self.on(tensors)
            return
        described = self._described_anew(tensors)
        binary = self.kernel[(self.programs,)](*pointers, *described, *self._values, **self.options)
        if self._hooks is not None and binary is not None:  # as it is under the interpreter
            self._compiled[aligned] = (device, *started(binary))

    def bound(self, tensors: dict[str, Tensor | None], *names: str) -> Callable[..., None]:
        """The same on these tensors, but for those of ``names``: they are given at each call, in this order.

        A tensor that this kernel does not take may be named too.
        """
        fixed = tensors | dict.fromkeys(names)
        known, known_bits = self._ready(fixed)
        places = [self.tensors.index(name) if name in self.tensors else None for name in names]
        described = enumerate(self._blocks, len(self.tensors))
        moved = [(place, x) for place, x in described if x is not None and x.tensor in names]

        def call(*new: Tensor | None) -> None:
            ready, bits = known.copy(), known_bits
            for place, x in zip(places, new, strict=True):
                if x is not None and place is not None:
                    ready[place] = address = x.data_ptr()
                    bits |= address
            named = moved and dict(zip(names, new, strict=True))
            for place, block in moved:
                ready[place] = self._describe(block, named[block.tensor])
            if bits & 15 or not self._run(True, ready):
                self.on(fixed | dict(zip(names, new, strict=True)))

        return call

    def _ready(self, tensors: dict[str, Tensor | None]) -> tuple[list, int]:
        """What the kernel takes of these tensors and by itself, and the bits of all addresses."""
        addresses, bits = [None if x is None else x.data_ptr() for x in self._pick(tensors)], 0
        for address in addresses:
            bits |= address or 0
        loaded = [(block, None if block is None else tensors[block.tensor]) for block in self._blocks]
        described = [None if x is None else self._describe(block, x) for block, x in loaded]
        return [*addresses, *described, *self._values], bits

    def _described_anew(self, tensors: dict[str, Tensor | None]) -> list:
        """The kernel's descriptors, as Triton makes and checks them."""
        made = [None if block is None else block.descriptor(tensors[block.tensor]) for block in self._blocks]
        self._described = {block: _copied(x, None) for block, x in zip(self._blocks, made, strict=True) if block}
        return made

    def _describe(self, block: Block, x: Tensor) -> object:
        """A descriptor for what is compiled: it takes 5 us to check a layout, which is that of the launch."""
        known = self._described.get(block)
        return block.descriptor(x) if known is None else _copied(known, x)

    def _run(self, aligned: object, ready: list) -> bool:
        """Launch what is compiled, as Triton does.

        False where nothing is, where another device is current, or where a profiler follows launches.
        """
        compiled = self._compiled.get(aligned)
        if compiled is None or self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            return False
        device, start, constants = compiled
        if device != current_device():
            return False
        start(self.programs, 1, 1, current_stream(device), *constants, *ready)
        return True


def started(binary) -> tuple[Callable, tuple]:
    """What starts a binary, and what it takes between the stream and the kernel's arguments.

    It is a function in C; or, of another Triton or where a kernel needs memory of its own, the one in Python before it,
    which takes a microsecond.
    """
    run, function, metadata, no_hooks = binary.run, binary.function, binary.packed_metadata, (None, None, None)
    if version() == "3.6" and hasattr(run, "launch") and run.global_scratch_size == run.profile_scratch_size == 0:
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, *no_hooks)
    return run, (function, metadata, *no_hooks)


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
    elif interpreted and dtype == torch.bfloat16:
        reasons.append("Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32")
    elif device != "cuda" and not interpreted:
        reasons.append(f"needs a CUDA device, got {device}")
    return reasons
