"""Divide batches and weights among the processes (ranks) that torchrun started; one process works, too."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..convert.checkpoint.errors import RequestError
from ..convert.text.freed import give_back

GATHERING = ("index_loss", "recall")  # methods of layers with an index branch, called beside their forward


class ElsewhereError(RuntimeError):
    """The error on all other ranks when the first rank fails; the first rank itself reports the reason."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The group of ``size`` ranks, seen from this process; ``mesh`` is None for a single process."""

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of a batch that this rank processes, on its device."""
        return rows.chunk(self.size)[self.rank].to(self.device)

    def mean(self, values: Tensor) -> Tensor:
        """Average tensors of the same shape over all ranks; ``values`` may be overwritten."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values / self.size

    def place(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Move the model to the device; with several ranks, shard every weight over them (FSDP2).

        ``parts`` are submodules, inner ones before those that contain them. A rank gathers the weights of one
        submodule at a time, while it computes that submodule. Memory of the unsharded model is returned to
        the system.
        """
        if self.mesh is not None:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for part in (*parts, model):
                fully_shard(part, mesh=self.mesh)
                for name in GATHERING:
                    if hasattr(part, name):
                        register_fsdp_forward_method(part, name)
        model.to(self.device)
        give_back()

    def on_first(self, action: Callable[[], str]) -> str:
        """Run ``action`` on the first rank only, and return its result on every rank.

        Raises:
            ElsewhereError: on the other ranks, if ``action`` failed; the first rank raises its error.
        """
        failed, result = None, b""
        if self.is_first:
            try:
                result = action().encode()
            except BaseException as error:
                failed = error
        if self.mesh is not None:
            length = torch.tensor([-1 if failed else len(result)], device=self.device)
            dist.broadcast(length, 0)
            if length >= 0:
                data = torch.tensor(list(result) or [0] * int(length), dtype=torch.uint8, device=self.device)
                dist.broadcast(data, 0)
                result = bytes(data.tolist())
            elif not self.is_first:
                raise ElsewhereError("the first rank failed; see its error message")
        if failed:
            raise failed
        return result.decode()


def whole(x: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return any other tensor unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def parted(x: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor in the same way as ``like``; return it unchanged if ``like`` is not sharded."""
    return (
        distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else x
    )


@contextmanager
def meet(device: str) -> Iterator[WorkerGroup]:
    """Join all ranks that torchrun started, on ``device`` "cpu" or "cuda", or run as a single process.

    Raises:
        RequestError: there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("--device: expected cpu, since torch finds no GPU, got cuda")
    if "RANK" not in os.environ:
        yield WorkerGroup(torch.device(device))
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        here = torch.device(device, torch.cuda.current_device() if device == "cuda" else None)
        yield WorkerGroup(here, dist.get_rank(), dist.get_world_size(), mesh)
    finally:
        dist.destroy_process_group()
        # Reference cycles in torch keep gloo threads alive, and a process aborts if it exits before they do.
        gc.collect()
