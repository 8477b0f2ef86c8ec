"""Kernel launches that go through Triton once, and then start the compiled kernel directly.

Triton inspects every argument to choose a compiled kernel, which takes about 40 us for our kernels. A
``Launch`` has all arguments except the tensors, belongs to one set of shapes, and caches the compiled kernel.
Starting it directly uses private functions of Triton, so they are first tried on a tiny kernel. If the trial
fails, every launch goes through Triton.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ....internal import probes
from ....internal.probes import NotNow, answer
from ....internal.watched import refuse_trials
from . import direct
from .config import LaunchConfig
from .direct import STREAM, CachedLaunch, starting, streams
from .forms import aligned, forms
from .gluon_names import missing_names

IS_INSTALLED = find_spec("triton") is not None
GLUON = "dedicated Hopper kernels"


@lru_cache(4096)
def plan_cache(plan: Callable, *key):
    """Return the launch plan ``plan(*key)``, from a cache that holds all launch plans."""
    return plan(*key)


def cached_plan(plan: Callable) -> Callable:
    """Decorate a function so that its results are stored in the cache of launch plans, by its arguments."""
    return wraps(plan)(partial(plan_cache, plan))


class Block(NamedTuple):
    """The part of a tensor that a TMA descriptor loads at once: some rows and columns, usually of one head.

    Attributes:
        of_heads: True if the tensor has a dimension of heads.
        gluon: True if the kernel is written in Gluon; the descriptor then includes the shared-memory layout.
        pairs: True if stored bytes are loaded in pairs, as int16.
        together: the number of heads that are loaded at once from the pages of a cache
            ``[pages, page_size, g, d]``; otherwise 0.
    """

    tensor: str
    rows: int
    columns: int
    of_heads: bool = True
    gluon: bool = False
    pairs: bool = False
    together: int = 0

    def descriptor(self, x: Tensor):
        """Return a TMA descriptor of a tensor.

        A tensor with heads is ``[b, t, h, d]``, or ``[t, h, d]`` if packed. A tensor without heads has
        contiguous rows, or is a vector that is cut into rows, or has a single column ``[pages, page_size,
        1]``, which becomes a single row.
        """
        block = self.rows, self.columns
        x = x.view(torch.int16) if self.pairs else x
        if self.together:
            x, block = x.view(-1, *x.shape[-2:]).transpose(0, 1), (self.together, *block)
        elif self.of_heads:
            x, block = x if x.dim() == 4 else x[None], (1, self.rows, 1, self.columns)
        elif x.dim() == 1:
            x = x.view(-1, self.columns)
        elif x.shape[-1] == 1:  # even a single row needs a stride of a multiple of 16 bytes
            x = x.as_strided((1, x.numel()), (-(-x.numel() // 16) * 16, 1))
        else:
            x = x.view(-1, x.shape[-1])
        shape, strides = list(x.shape), list(x.stride())
        if self.gluon:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            return TensorDescriptor(x, shape, strides, list(block), tile_layout(block, x.dtype))
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(x, shape, strides, list(block))


@cached_plan
def tile_layout(shape: tuple[int, ...], dtype: torch.dtype):
    """Return the shared-memory layout that Hopper's matrix products need for a tile of this shape."""
    from triton.experimental.gluon import language as gl

    name = str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8e4nv")
    return gl.NVMMASharedLayout.get_default_for(list(shape), getattr(gl, name))


class Launch:
    """A launch of ``programs`` programs of a kernel, for one device and one set of tensor layouts.

    The name of a kernel parameter decides which argument it gets:
        x_ptr      the tensor ``x``.
        x_desc     a TMA descriptor, if ``blocks`` has a :class:`Block` of this name, otherwise None.
        x_tensors  a tuple of captured tensors.
        others     the entry of ``arguments`` with this name; further entries are ignored.

    With ``early``, the kernel starts while the previous kernel still runs, and waits for it before reading
    its results.
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
        self.arguments = {
            name: given[name] for name in names if not name.endswith(("_ptr", "_desc", "_tensors"))
        }
        self.captured = [name for name in names if name.endswith("_tensors")]
        self.options = {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers}
        # All kernels were tested and measured with FP fusion, which Triton 3.10 no longer enables by default.
        self.options |= {"enable_fp_fusion": True, **({"launch_pdl": True} if early else {})}
        self._pick, self._values = itemgetter(*self.tensors), tuple(self.arguments.values())
        self._blocks = [self.blocks.get(name) for name in names if name.endswith("_desc")]
        self._cached: dict[object, CachedLaunch] = {}  # keys: the properties that Triton specializes on

    def on(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch on named tensors, on their device's current stream; ignore any that the kernel lacks."""
        if not self.programs:
            return
        addresses, read = self.addresses(tensors), [tensors.get(name) for name in self.captured]
        cached = self.cached(addresses, read)
        if cached is None or (stream := cached.stream()) is None:
            self._launch_and_cache(tensors)
            return
        arguments = cached.arguments.copy()
        arguments[STREAM] = stream
        arguments[cached.first : cached.first + len(addresses)] = addresses
        for place, name, descriptors in cached.descriptors:
            arguments[place] = descriptors[tensors[name].data_ptr()]
        arguments[cached.read : cached.read + len(read)] = read
        cached.start(*arguments)

    def addresses(self, tensors: dict[str, Tensor | None]) -> list[int | None]:
        """Return the addresses of the kernel's tensors, in the order of its parameters."""
        return [None if x is None else x.data_ptr() for x in self._pick(tensors)]

    def cached(self, addresses: list[int | None], read: Sequence[tuple | None] = ()) -> CachedLaunch | None:
        """Return the cached launch that fits these arguments, or None if it is not cached yet.

        It fits if addresses have the same alignment, and captured tensors the same properties that Triton
        specializes on, as in the launch that was cached.
        """
        return self._cached.get((aligned(addresses), forms(read)))

    def _launch_and_cache(self, tensors: dict[str, Tensor | None]) -> None:
        """Launch through Triton, and cache the launch if later ones may be direct."""
        pointers = self._pick(tensors)
        device = pointers[0].get_device()
        if pointers[0].is_cuda and device != streams().current_device():
            with torch.cuda.device(device):
                self.on(tensors)
            return
        binary, made = self.through_triton(tensors)
        may = None if binary is None else direct.direct(_compare_bits)  # the interpreter has no binary
        if may is not None and (may.described if any(x is not None for x in made) else may.plain):
            self.remember(binary, made, tensors)

    def through_triton(self, tensors: dict[str, Tensor | None]) -> tuple[object, list]:
        """Launch through Triton, and return the compiled kernel that ran, and its descriptors."""
        made = [None if block is None else block.descriptor(tensors[block.tensor]) for block in self._blocks]
        read = [tensors.get(name) for name in self.captured]
        run = self.kernel[(self.programs,)]
        return run(*self._pick(tensors), *made, *read, *self._values, **self.options), made

    def remember(self, binary: object, made: list, tensors: dict[str, Tensor | None]) -> None:
        """Cache a direct launch of a compiled kernel, for all tensors that need the same compiled kernel."""
        from triton.knobs import runtime

        addresses, read = self.addresses(tensors), [tensors.get(name) for name in self.captured]
        start, constants, described = starting(binary, made)
        arguments = [self.programs, 1, 1, None, *constants, *addresses]
        first, places = STREAM + 1 + len(constants), []
        for block, (descriptors, sizes) in zip(self._blocks, described, strict=True):
            if block is not None:
                places.append((len(arguments), block.tensor, descriptors))
            arguments += [None, *sizes]
        at = len(arguments)
        # The cached launch must not keep captured tensors alive, so it has None in their place.
        arguments += [*(() if x == () else None for x in read), *self._values]
        device, ask = self._pick(tensors)[0].get_device(), streams()
        self._cached[aligned(addresses), forms(read)] = CachedLaunch(
            device, ask, runtime, start, arguments, first, places, at
        )


def _compare_bits(descriptors: bool) -> None:
    """Launch a tiny kernel through Triton, then directly on other tensors, and compare the bits.

    Raises:
        RuntimeError: the bits differ from the expected ones.
    """
    from ..kernels import trial

    refuse_trials()
    config, n = LaunchConfig(16, 16, 1, 1), 40
    x = torch.arange(2 * 48 * 16, dtype=torch.float32, device="cuda").view(2, 48, 16)
    if descriptors:
        launch = Launch(trial.add_tile, 3, {}, config, {"x_desc": Block("x", 16, 16, of_heads=False)})
        expected, more = 2 * x, {}
    else:
        launch = Launch(trial.add_numbers, 3, {"size": n}, config)
        expected, more = (x + 1).flatten(1)[:, :n], {"absent": None, "read_tensors": (torch.ones_like(x),)}
    out = [torch.zeros_like(part) for part in expected]
    tensors = [{"x": part, "out": y, **more} for part, y in zip(x, out, strict=True)]
    launch.remember(*launch.through_triton(tensors[0]), tensors[0])
    cached = launch.cached(launch.addresses(tensors[1]), [tensors[1].get(name) for name in launch.captured])
    if cached.stream() is None:
        raise NotNow("since a profiler follows launches")
    launch.on(tensors[1])
    if not torch.equal(torch.stack(out), expected):
        raise RuntimeError("a kernel that is launched directly writes different bits")


def failures(arch: int) -> list[str]:
    """Return a line for each part of Triton and torch that failed its trial, with the cost of not using it.

    Raises:
        NotNow: the trials cannot run now.
    """
    launches = direct.failures(_compare_bits) if torch.cuda.is_available() else []
    return [*launches, *(probes.failures(GLUON, _find_gluon) if arch == 90 else [])]


class _Gluon(NamedTuple):
    """The result of the Gluon trial: a failure if Triton lacks names that the Hopper kernels use."""

    failures: tuple[str, ...]


def has_gluon() -> bool:
    """True if the installed Triton has everything in Gluon that the dedicated Hopper kernels use."""
    found = answer(GLUON, _find_gluon)
    return found is not None and not found.failures


def _find_gluon() -> _Gluon:
    if not (missing := missing_names()):
        return _Gluon(())
    named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more names" if len(missing) > 3 else "")
    return _Gluon((f"{GLUON}: this Triton lacks {named}; the generic kernels run, which are slower",))


def against(dtype: torch.dtype, device: str, arch: int, *, interpreted: bool) -> list[str]:
    """Return the reasons why no Triton kernel can run with this dtype on this device.

    With ``interpreted``, kernels run in Triton's interpreter, which needs no GPU.
    """
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
