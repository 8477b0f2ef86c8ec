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

import torch
from torch import Tensor

from ..backends._plans import Call, backward, call, forward, layout
from ..mask import CAUSAL, FULL, Mask, sliding
from .builds import Build
from .sass import disassembled, lost

DTYPES = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32})
MASKS = MappingProxyType(
    {"causal": CAUSAL, "full": FULL, "left": Mask(1023), "sliding": sliding(1024), "prefix": Mask(right=0, prefix=100)}
)
BATCH, QUERY_HEADS, KV_HEADS = 2, 8, 2  # of every call
REGISTERS, COLUMNS = 64 << 10, 512  # of an SM: registers, and columns of tensor memory where there is any


class Chip(NamedTuple):
    """KiB of shared memory of an SM, of which every program takes one beside its own; and its warps."""

    shared: int
    warps: int


CHIPS = MappingProxyType(
    {80: Chip(164, 64), 86: Chip(100, 48), 90: Chip(228, 64), 100: Chip(228, 64), 120: Chip(100, 48)}
)


class Binary(NamedTuple):
    """What a thread takes: registers, bytes spilled to its stack. And a program: shared bytes, columns, warps.

    ``lost`` are the instructions that read what ptxas never wrote.
    """

    tiles: str
    registers: int
    spilled: int
    shared: int
    columns: int
    warps: int
    lost: tuple[str, ...] = ()

    def resident(self, arch: int) -> int:
        """How many programs an SM runs at once; 0 where not even one fits."""
        chip = CHIPS[arch]
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_columns = COLUMNS // self.columns if self.columns else by_registers
        return min(by_registers, by_columns, (chip.shared << 10) // (self.shared + 1024), chip.warps // self.warps)

    def line(self, arch: int) -> str:
        """All of it, in words."""
        taken = f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared / 1024:.1f} KiB shared"
        return f"{self.tiles}: {taken}, {self.resident(arch)} per SM"


def distinct(builds: Iterable[Build]) -> list[Build]:
    """Without those for which Triton would compile nothing new."""
    found = {}
    for build in builds:
        launch, _ = prepared(build)
        tiles = *launch.constants.items(), *launch.options.items()
        numbers = DTYPES[build.dtype], build.dropout, build.aligned
        found.setdefault((build.arch, launch.kernel, numbers, tiles), build)
    return list(found.values())


def binary(build: Build) -> Binary:
    """Compile a kernel as its launch would; replaces Triton's driver in this process."""
    from triton.runtime.driver import driver

    absent = _absent(build.arch)
    driver.set_active(absent)
    launch, tensors = prepared(build)
    launch(*tensors)
    metadata, cubin = absent.launched
    registers, spilled = _usage(cubin)
    columns = getattr(metadata, "tmem_size", None) or 0
    unwritten = tuple(lost(disassembled(cubin)))
    return Binary(_tiles(launch), registers, spilled, metadata.shared, columns, metadata.num_warps, unwritten)


def prepared(build: Build) -> tuple:
    """The Launch of a build, and its tensors, which hold nothing."""
    named = _tensors(build)
    mask = MASKS[build.mask]
    scale, softcap = build.head[0] ** -0.5, 50.0 if build.softcap else None
    numbers = (mask.left, mask.right, mask.prefix, scale, softcap, build.dropout, None, None)
    terms = tuple(named[name] for name in ("slopes", "sinks", "starts", "ends", "cu_q", "cu_k", "seed"))
    problem = Call(*call(named["q"], named["k"], named["v"], terms, numbers))._replace(tf32=build.dtype == "tf32")
    if build.kernel == "forward":
        launch = forward(problem, None, build.arch)
    else:
        plan = backward(problem, layout(named["dout"]), layout(named["dlse"]), None, None, build.arch)
        launch = getattr(plan, build.kernel.removeprefix("backward_"))
    pointers = (name.removesuffix("_ptr") for name in launch.kernel.arg_names if name.endswith("_ptr"))
    return launch, [named[name] for name in pointers]


def _tensors(build: Build) -> dict[str, Tensor | None]:
    """All that kernels of the backend read and write, by name; None for what the call does not have."""
    dtype, packed = DTYPES[build.dtype], build.rows == "packed"
    d, e = build.head

    def dense(heads: int, width: int, apart: int = 0) -> Tensor:
        shape = (BATCH * build.tokens,) if packed else (BATCH, build.tokens)
        return torch.empty((*shape, heads, width + apart), dtype=dtype, device="meta")[..., :width]

    def numbers(*shape: int, dtype: torch.dtype = torch.float32, given: object = True) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device="meta") if given else None

    apart = 0 if build.aligned else 1
    statistics = (QUERY_HEADS, BATCH * build.tokens) if packed else (BATCH, QUERY_HEADS, build.tokens)
    offsets = numbers(BATCH + 1, dtype=torch.int32, given=packed)
    return {
        "q": dense(QUERY_HEADS, d, apart), "k": dense(KV_HEADS, d, apart), "v": dense(KV_HEADS, e, apart),
        "dq": dense(QUERY_HEADS, d), "dk": dense(KV_HEADS, d), "dv": dense(KV_HEADS, e),
        "out": dense(QUERY_HEADS, e), "dout": dense(QUERY_HEADS, e),
        "lse": numbers(*statistics), "lse2": numbers(*statistics), "delta": numbers(*statistics),
        "dlse": numbers(*statistics, given=build.dlse),
        "slopes": numbers(QUERY_HEADS, given=build.slopes), "dslopes": numbers(1, given=build.slopes),
        "sinks": numbers(QUERY_HEADS, given=build.sinks),
        "starts": numbers(BATCH, dtype=torch.int32, given="starts" in build.rows),
        "ends": numbers(BATCH, dtype=torch.int32, given="ends" in build.rows),
        "cu_q": offsets, "cu_k": offsets,
        "seed": numbers(1, dtype=torch.int64, given=build.dropout),
    }  # fmt: skip


def _tiles(launch) -> str:
    """``128 x 64, 8 warps, 3 stages``."""
    constants, options = launch.constants, launch.options
    tile = " x ".join(str(constants[name]) for name in ("BLOCK_M", "BLOCK_N") if name in constants)
    stages, most = constants.get("STAGES", 1), options.get("maxnreg")
    found = [f"{tile}, {options['num_warps']} warps"]
    found += [f"{stages} stages"] if stages > 1 else []
    found += [f"<= {most} registers"] if most else []
    found += ["TMA"] if constants.get("TMA") else []
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
    """A Triton driver for a chip that is not there. Its functions are binaries, and it remembers the last launched."""

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
