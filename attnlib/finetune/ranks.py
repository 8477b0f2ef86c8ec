"""The processes that torchrun started, or this one alone: who has which part of a step, and of the
weights.
"""

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


class ElsewhereError(RuntimeError):
    """The first rank failed, and says why."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """This process among ``size``; ``mesh`` is None where it is alone."""

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of rows that all ranks have, on its device."""
        return rows.chunk(self.size)[self.rank].to(self.device)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks of tensors of one shape."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values / self.size

    def place(self, model: nn.Module, parts: Iterable[nn.Module]) -> None:
        """Move the model to the device; among several ranks each keeps a piece of every weight (FSDP2).

        A rank has all of a part's weights while it computes that part; what is inside others comes first. The
        memory that the whole model took goes back to the system.
        """
        if self.mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for part in (*parts, model):
                fully_shard(part, mesh=self.mesh)
        model.to(self.device)
        give_back()

    def tell(self, action: Callable[[], str]) -> str:
        """What ``action`` returns on the first rank, which alone runs it.

        Raises:
            ElsewhereError: it failed there; on that rank, what it raised.
        """
        failed, told = None, b""
        if self.is_first:
            try:
                told = action().encode()
            except BaseException as error:
                failed = error
        if self.mesh is not None:
            length = torch.tensor([-1 if failed else len(told)], device=self.device)
            dist.broadcast(length, 0)
            if length >= 0:
                data = torch.tensor(list(told) or [0] * int(length), dtype=torch.uint8, device=self.device)
                dist.broadcast(data, 0)
                told = bytes(data.tolist())
            elif not self.is_first:
                raise ElsewhereError("the first rank failed, and says why")
        if failed:
            raise failed
        return told.decode()


def whole(x: Tensor) -> Tensor:
    """A tensor of which each rank has a part, on every rank; any other one as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def parted(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as one that is parted as ``like`` is, if that is."""
    return (
        distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else x
    )


@contextmanager
def meet(device: str) -> Iterator[WorkerGroup]:
    """All ranks that torchrun started, on ``device``, ``"cpu"`` or ``"cuda"``.

    Raises:
        RequestError: there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RequestError("--device: expected cpu, for torch finds no GPU here, got cuda")
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
        gc.collect()  # cycles of torch's own keep gloo's threads, on which a process aborts that ends before they do
