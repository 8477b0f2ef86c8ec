"""A kernel with all its arguments but the tensors, launched once through Triton, and directly from then on.

Triton finds out from every argument which binary to run, about 40 us for these kernels. Here a launch belongs to one
set of shapes, and remembers. How a binary is launched is private to Triton, so this is done with known versions alone;
every other one launches as anybody would.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from operator import itemgetter
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...watched import IS_KNOWN
from .tables import LaunchConfig

KNOWN = ("3.6", "3.7")  # the versions of Triton whose launchers the tests have passed with
LIMIT = 4096  # plans to remember, before all are forgotten
PLANS: dict[tuple, object] = {}  # the one store of launches, by the function that plans them and all that decides
Plan = TypeVar("Plan")

if IS_KNOWN and hasattr(torch._C, "_cuda_getDevice"):  # a microsecond sooner than what is public
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
else:
    current_device = torch.cuda.current_device

    def current_stream(device: int) -> int:
        """The address of the current stream of a device."""
        return torch.cuda.current_stream(device).cuda_stream


def remembered(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """The same function, whose results are remembered by its arguments."""

    @wraps(plan)
    def find(*key) -> Plan:
        known = (plan, key)
        found = PLANS.get(known)
        if found is None:
            if len(PLANS) >= LIMIT:
                PLANS.clear()
            found = PLANS[known] = plan(*key)
        return found

    return find


class Block(NamedTuple):
    """What a descriptor loads at once of a tensor: so many rows and columns, of one head if it has heads."""

    tensor: str
    rows: int
    columns: int
    of_heads: bool = True

    def descriptor(self, x: Tensor):
        """Of ``[b, t, h, d]``, packed ``[t, h, d]``, or of rows that lie one after the other."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        if not self.of_heads:
            x = x.view(-1, x.shape[-1])
            return TensorDescriptor(x, list(x.shape), list(x.stride()), [self.rows, self.columns])
        x = x if x.dim() == 4 else x[None]
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, self.rows, 1, self.columns])


class Launch:
    """``programs`` programs of a kernel on the current device, for tensors of the same shapes, strides and dtypes.

    The kernel's parameters say what it takes: tensors (``x_ptr``), descriptors (``x_desc``), of which ``blocks`` are
    there, and what ``arguments`` say by name, in which there may be more.
    """

    def __init__(
        self,
        kernel: Callable,
        programs: int,
        arguments: dict,
        config: LaunchConfig,
        blocks: Mapping[str, Block] | None = None,
    ):
        import triton

        self.kernel, self.programs, self.blocks = kernel, programs, blocks or {}
        given = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages, **arguments}
        names = kernel.arg_names
        self.tensors = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        self.arguments = {name: given[name] for name in names if not name.endswith(("_ptr", "_desc"))}
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        self._pick = itemgetter(*self.tensors)
        self._blocks = [self.blocks.get(name) for name in names if name.endswith("_desc")]
        self._arguments = tuple(self.arguments.values())
        self._is_known = ".".join(triton.__version__.split(".")[:2]) in KNOWN
        self._hooks = triton.knobs.runtime if self._is_known else None
        self._compiled: dict[object, tuple] = {}  # by which tensors begin at a multiple of 16 bytes

    def __call__(self, given: NamedTuple, **made: Tensor | None) -> None:
        """Launch on tensors that are fields of ``given`` or have names of their own; see :meth:`on`."""
        self.on(given._asdict() | made)

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on tensors by name, on the current stream of the current device, which is theirs."""
        if not self.programs:
            return
        pointers = self._pick(tensors)
        addresses, bits = [None if x is None else x.data_ptr() for x in pointers], 0
        for address in addresses:
            bits |= address or 0
        aligned = bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in addresses)
        arguments = (*self._descriptors(tensors), *self._arguments)
        if not self._run(aligned, (*addresses, *arguments)):
            binary = self.kernel[(self.programs,)](*pointers, *arguments, **self.options)
            if self._is_known and binary is not None:  # as it is under the interpreter
                self._compiled[aligned] = (binary.run, binary.function, binary.packed_metadata)

    def _run(self, aligned: object, arguments: Sequence) -> bool:
        """Launch what is compiled, as Triton does; False where nothing is, or where a profiler follows launches."""
        compiled = self._compiled.get(aligned)
        if compiled is None or self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            return False
        run, function, metadata = compiled
        stream = current_stream(current_device())
        run(self.programs, 1, 1, stream, function, metadata, None, None, None, *arguments)
        return True

    def bound(self, given: NamedTuple, *names: str) -> Callable[..., None]:
        """The same with the fields of ``given``; tensors of these names are given at each call, in this order."""
        fixed = given._asdict() | dict.fromkeys(names)
        addresses = [None if x is None else x.data_ptr() for x in self._pick(fixed)]
        direct = self.programs > 0 and not any((address or 0) & 15 for address in addresses)
        places = [self.tensors.index(name) for name in names]
        arguments = [*addresses, *self._descriptors(fixed), *self._arguments]
        described = enumerate(self._blocks, len(addresses))
        blocks = [(place, block) for place, block in described if block is not None and block.tensor in names]

        def call(*tensors: Tensor | None) -> None:
            ready, bits = arguments.copy(), 0
            for place, x in zip(places, tensors, strict=True):
                if x is not None:
                    ready[place] = address = x.data_ptr()
                    bits |= address
            if blocks:
                named = dict(zip(names, tensors, strict=True))
                for place, block in blocks:
                    ready[place] = block.descriptor(named[block.tensor])
            if not (direct and bits & 15 == 0 and self._run(True, ready)):
                self.on(fixed | dict(zip(names, tensors, strict=True)))

        return call

    def _descriptors(self, tensors: dict[str, Tensor | None]) -> list:
        """The descriptors of the tensors that are there."""
        of = [None if block is None else tensors[block.tensor] for block in self._blocks]
        return [None if x is None else block.descriptor(x) for block, x in zip(self._blocks, of, strict=True)]


def against_interpreter(dtype: torch.dtype, device: str, *, interpreted: bool) -> list[str]:
    """Why Triton's interpreter, which needs no GPU, cannot run kernels of this dtype on this type of device."""
    if not interpreted:
        return [f"needs a CUDA device, got {device}"]
    return ["Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32"] if dtype == torch.bfloat16 else []


def is_current(x: Tensor) -> bool:
    """Whether launches go to the tensor's device."""
    return not x.is_cuda or x.get_device() == current_device()


def on_device(x: Tensor) -> AbstractContextManager:
    """In which launches go to the tensor's device."""
    return nullcontext() if is_current(x) else torch.cuda.device(x.device)
