"""A kernel with all its arguments but the tensors: launched once through Triton, and directly from then on.

Triton finds out from every argument which binary to run, about 40 us for these kernels. Here a launch belongs to one
set of shapes, and remembers.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import EllipsisType

import torch
from torch import Tensor

from .tables import LaunchConfig


class Launch:
    """``programs`` programs of a kernel on the current device, for tensors of the same shapes, strides and dtypes.

    A kernel's parameters are tensors (``_ptr``), descriptors (``_desc``), then what ``arguments`` say by name, in which
    there may be more. ``blocks`` are what the descriptors load: of which tensor, how many rows and columns;
    ``descriptor`` makes them.
    """

    def __init__(
        self,
        kernel: Callable,
        programs: int,
        arguments: dict,
        config: LaunchConfig,
        blocks: tuple[tuple[int, int, int] | None, ...] = (),
        descriptor: Callable | None = None,
    ):
        from triton import knobs

        self.kernel, self.programs, self.blocks = kernel, programs, blocks
        self.tma, self._descriptor = any(blocks), descriptor or block_of_a_head
        given = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages, **arguments}
        named = [name for name in kernel.arg_names if not name.endswith(("_ptr", "_desc"))]
        self.arguments = {name: given[name] for name in named}
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        self._arguments = tuple(self.arguments.values())
        self._hooks = knobs.runtime
        self._compiled: dict[object, tuple] = {}  # by which tensors begin at a multiple of 16 bytes

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the current device, which is the tensors'."""
        if not self.programs:
            return
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        bits = 0
        for address in addresses:
            if address is not None:
                bits |= address
        aligned = bits & 15 == 0 or tuple((address or 0) & 15 == 0 for address in addresses)
        compiled = self._compiled.get(aligned)
        hooks = self._hooks
        if compiled is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            arguments = (*tensors, *self._descriptors(tensors), *self._arguments)
            binary = self.kernel[(self.programs,)](*arguments, **self.options)
            if binary is not None:  # as it is under the interpreter
                self._compiled[aligned] = (binary.run, binary.function, binary.packed_metadata)
            return
        run, function, metadata = compiled
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        arguments = (*addresses, *self._descriptors(tensors), *self._arguments)
        run(self.programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    def bound(self, *tensors: Tensor | EllipsisType | None) -> Callable[..., None]:
        """The same with all tensors but those for which ``...`` stands, and which are given at each call."""
        open_at = [n for n, x in enumerate(tensors) if x is ...]
        fixed = [x.data_ptr() if isinstance(x, Tensor) else None for x in tensors]
        aligned = not any((address or 0) & 15 for address in fixed)
        arguments = (*self._descriptors(tensors), *self._arguments)
        hooks, programs = self._hooks, self.programs

        def call(*given: Tensor) -> None:
            addresses, bits = fixed.copy(), 0
            for n, x in zip(open_at, given, strict=True):
                addresses[n] = address = x.data_ptr()
                bits |= address
            compiled = self._compiled.get(True)
            if compiled is None or bits & 15 or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
                self(*_filled(tensors, given))
                return
            run, function, metadata = compiled
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *arguments)

        return call if aligned and programs else lambda *given: self(*_filled(tensors, given))

    def _descriptors(self, tensors: tuple[Tensor | None, ...]) -> tuple:
        if not self.tma:
            return self.blocks
        return tuple(
            None if block is None else self._descriptor(tensors[block[0]], *block[1:]) for block in self.blocks
        )


def _filled(tensors: tuple, given: tuple) -> list:
    rest = iter(given)
    return [next(rest) if x is ... else x for x in tensors]


def against_interpreter(dtype: torch.dtype, device: str, *, interpreted: bool) -> list[str]:
    """Why Triton's interpreter, which needs no GPU, cannot run kernels of this dtype on this type of device."""
    if not interpreted:
        return [f"needs a CUDA device, got {device}"]
    return ["Triton's interpreter multiplies bf16 wrongly; use fp16 or fp32"] if dtype == torch.bfloat16 else []


def on_device(x: Tensor) -> AbstractContextManager:
    """In which launches go to the tensor's GPU."""
    if x.is_cuda and x.device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(x.device)
    return nullcontext()


def block_of_a_head(x: Tensor, rows: int, columns: int):
    """What loads blocks of one head of ``[b, t, h, d]``; a packed tensor is a batch of one."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = x if x.dim() == 4 else x[None]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, columns])


def block_of_rows(x: Tensor, rows: int, columns: int):
    """What loads blocks of a matrix, which all but the last dimension of ``x`` are the rows of."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [x.numel() // x.shape[-1], x.shape[-1]], [x.shape[-1], 1], [rows, columns])
