"""Kernels compiled for a chip that is not there, and what of the chip they take.

Triton is given a driver that loads and launches nothing; all before that is what happens at a launch.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import NamedTuple

from attnlib.backends._triton.dense.hopper import ROWS
from attnlib.backends._triton.launching.launch import Launch
from attnlib.internal.checks import INT32

from .cached_builds import AnyBuild
from .launches import prepared
from .loops import disorder
from .sass import disassembled, lost, reused

REGISTERS, COLUMNS = 64 << 10, 512  # of an SM: registers, and columns of tensor memory where there is any
# The constants that are a kernel's tile, where these are not queries and keys.
TILES = MappingProxyType({"combine": ("AT_ONCE", "WIDTH"), "schedule": ("ROWS", "SPLITS")})


class Chip(NamedTuple):
    """KiB of shared memory of an SM, of which every program takes one beside its own; and its warps."""

    shared: int
    warps: int


CHIPS = MappingProxyType(
    {80: Chip(164, 64), 86: Chip(100, 48), 90: Chip(228, 64), 100: Chip(228, 64), 120: Chip(100, 48)}
)


class Binary(NamedTuple):
    """What a thread takes: registers, bytes spilled to its stack. And a program: shared bytes, columns,
    warps.

    ``lost`` are the instructions that read what ptxas never wrote, ``disorder`` what is amiss in the loops of
    Hopper's own kernels, ``reused`` the instructions that use a barrier's room for something else.
    """

    tiles: str
    registers: int
    spilled: int
    shared: int
    columns: int
    warps: int
    lost: tuple[str, ...] = ()
    disorder: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()

    def resident(self, arch: int) -> int:
        """How many programs an SM runs at once; 0 where not even one fits."""
        chip = CHIPS[arch]
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_columns = COLUMNS // self.columns if self.columns else by_registers
        return min(
            by_registers, by_columns, (chip.shared << 10) // (self.shared + 1024), chip.warps // self.warps
        )

    def line(self, arch: int) -> str:
        """All of it, in words."""
        taken = (
            f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared / 1024:.1f} KiB shared"
        )
        return f"{self.tiles}: {taken}, {self.resident(arch)} per SM"


def distinct(builds: Iterable[AnyBuild]) -> list[AnyBuild]:
    """Without those for which Triton would compile nothing new."""
    found = {}
    for build in builds:
        found.setdefault((build.arch, *_compiled_for(*prepared(build))), build)
    return list(found.values())


def _compiled_for(launch: Launch, tensors: dict) -> tuple:
    """What Triton compiles for: constants, options, dtypes, and of every number its type and what divides
    it.
    """
    parameters = {parameter.name: parameter for parameter in launch.kernel.params}
    kinds = [_kind(n, parameters[name]) for name, n in launch.arguments.items()]
    dtypes = [x if x is None else x.dtype for x in map(tensors.get, launch.tensors)]
    return launch.kernel, bool(launch.blocks), *launch.options.items(), *dtypes, *kinds


def _kind(n: object, parameter) -> tuple:
    """A constant itself; a number's type, and for an int that is specialized whether it is 1, or a multiple
    of 16.
    """
    if parameter.is_constexpr or n is None:
        return (getattr(n, "__module__", n),)  # a function of indices is in a module named by what it says
    if isinstance(n, float):
        return (float,)
    alike = parameter.do_not_specialize
    return (int, -INT32 - 1 <= n <= INT32) if alike else (int, -INT32 - 1 <= n <= INT32, n == 1, n % 16 == 0)


def binary(build: AnyBuild) -> Binary:
    """Compile a kernel as its launch would; replaces Triton's driver in this process."""
    from triton.runtime.driver import driver

    absent = _absent(build.arch)
    driver.set_active(absent)
    launch, tensors = prepared(build)
    launch.on(tensors)
    metadata, cubin = absent.launched
    registers, spilled = _usage(cubin)
    columns, text = getattr(metadata, "tmem_size", None) or 0, disassembled(cubin)
    makes_barriers = (
        ".hopper." in launch.kernel.__module__
    )  # Triton makes those of others, from registers of its own
    return Binary(
        _tiles(launch, metadata.num_warps), registers, spilled, metadata.shared, columns, metadata.num_warps,
        tuple(lost(text)), tuple(disorder(str(build), launch, text)),
        tuple(reused(text)) if makes_barriers else (),
    )  # fmt: skip


def _tiles(launch: Launch, warps: int) -> str:
    """``128 x 64, 8 warps, 3 stages``; of ``warps`` a kernel whose warps differ has more than it is launched
    with.
    """
    constants, options = launch.arguments, launch.options
    if "CONSUMERS" in constants:
        constants = constants | {"BLOCK_M": ROWS * constants["CONSUMERS"]}
    names = TILES.get(launch.kernel.__name__, ("BLOCK_M", "BLOCK_N"))
    tile = " x ".join(str(constants[name]) for name in names if name in constants)
    stages, most = constants.get("STAGES", 1), options.get("maxnreg")
    found = [tile] * bool(tile) + [f"{warps} warps"]
    found += [f"{stages} stages"] if stages > 1 else []
    found += [f"{constants['K_SLOTS']} + {constants['V_SLOTS']} slots"] if "K_SLOTS" in constants else []
    found += [f"<= {most} registers"] if most else []
    found += ["transposed"] if constants.get("COLUMNS") else []
    found += ["TMA"] if launch.blocks else []
    return ", ".join(found)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of the stack of a thread, which for kernels without arrays are what was spilled."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))


class _Absent:
    """A Triton driver for a chip that is not there. Its functions are binaries, and it remembers the last
    launched.
    """

    def __init__(self, arch: int):
        self.arch, self.utils, self.launched = arch, self, None

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps the binaries of devices apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": sys.maxsize}  # so that a kernel which takes too much can be measured

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple:
        return None, cubin, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, cubin, *rest):
            self.launched = metadata, cubin

        return launch


_absent = lru_cache(_Absent)
