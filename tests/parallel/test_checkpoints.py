"""A checkpoint saved on some ranks goes on, on any other number of ranks, as if training had never
stopped.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from leaving import leave
from sharded_models import model, sharded
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

STEPS = 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
CHAINS = [
    (2, 1, 2),
    pytest.param((2, 4, 2), marks=pytest.mark.slow),
    pytest.param((4, 1, 3), marks=pytest.mark.slow),
]


def optimizer_of(trained: nn.Module) -> torch.optim.Optimizer:
    # A large eps, since Adam makes whole steps of gradients that are rounding alone.
    return torch.optim.AdamW(trained.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2)


def tensors(trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights and the optimizer's moments and steps. Rates are no tensors, and stay in the program."""
    moments = get_optimizer_state_dict(trained, optimizer, options=FLAT)
    return {
        "model": get_model_state_dict(trained),
        "optimizer": {name: x for name, x in moments.items() if isinstance(x, Tensor)},
    }


def save(trained: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    for name, state in tensors(trained, optimizer).items():
        dcp.save(
            state, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
        )


def load(trained: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = tensors(trained, optimizer)
    for name, part in state.items():
        dcp.load(part, storage_reader=dcp.HuggingFaceStorageReader(str(folder / name)))
    set_model_state_dict(trained, state["model"])
    rates = get_optimizer_state_dict(trained, optimizer, options=FLAT)
    set_optimizer_state_dict(trained, optimizer, rates | state["optimizer"], options=FLAT)


def batches(world: int) -> Tensor:
    """What is read on so many ranks: ``[steps, rows, tokens, channels]``."""
    return torch.randn(STEPS, 12, 9, 64, generator=torch.Generator().manual_seed(world))


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for rows in x:
        optimizer.zero_grad()
        trained(rows).square().mean().backward()
        optimizer.step()


def whole_of(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_same(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    for part, values in expected.items():
        assert found[part].keys() == values.keys()
        for name, x in values.items():
            what = f"{part} {name}"
            torch.testing.assert_close(
                whole_of(found[part][name]), x, rtol=1e-5, atol=1e-6, msg=lambda text, n=what: f"{n}: {text}"
            )


def go_on(rank: int, chain: tuple[int, ...], folder: str) -> None:
    """One process: it takes part in each world that it belongs to; each loads what the one before has
    saved.
    """
    torch.set_num_threads(1)
    alone = model()
    its_optimizer = optimizer_of(alone)
    for n, ranks in enumerate(chain):
        before = tensors(alone, its_optimizer) if n else {}
        before = {part: {name: x.clone() for name, x in values.items()} for part, values in before.items()}
        x = batches(n)
        train(alone, its_optimizer, x)
        if rank < ranks:
            after = tensors(alone, its_optimizer)
            init_process_group("gloo", init_method=f"file://{folder}/store{n}", rank=rank, world_size=ranks)
            take_part(n, x.chunk(ranks, 1)[rank], Path(folder), before, after)
            leave()


def take_part(n: int, x: Tensor, folder: Path, before: dict, after: dict) -> None:
    """Go on from what the world before this one has saved, if there was one, and save what comes of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = sharded(model("meta") if n else model(), mesh)
    if n:
        ours.to_empty(device="cpu")  # and nothing is initialised: all that counts is in the checkpoint
    optimizer = optimizer_of(ours)
    if n:
        load(ours, optimizer, folder / str(n - 1))
        assert_same(tensors(ours, optimizer), before)
    train(ours, optimizer, x)
    assert_same(tensors(ours, optimizer), after)
    save(ours, optimizer, folder / str(n))


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_training_goes_on_with_another_number_of_ranks(chain, tmp_path):
    mp.spawn(go_on, (chain, str(tmp_path)), nprocs=max(chain))
    for n, ranks in enumerate(chain):
        files = sorted((tmp_path / str(n)).rglob("*"))
        assert {x.suffix for x in files if x.is_file()} == {".safetensors"}  # nothing is pickled
        assert sum(x.parent.name == "model" for x in files) == ranks
