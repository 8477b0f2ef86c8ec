"""Ranks that share tokens, sequences, heads or weights clip them as one process does that has everything."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from leaving import leave
from torch import Tensor, nn
from torch.distributed import all_reduce, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from attnlib import CAUSAL, GroupedQueryAttention, MultiHeadLatentAttention, Rope, sliding
from attnlib.parallel import ContextParallel, shard
from attnlib.qk_clip import QKClip

HIDDEN, HEADS, BATCH, TOKENS = 32, 4, 8, 16
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
BOUND = 0.5


def model() -> nn.Sequential:
    """The same weights in every process: a grouped layer, one with a single KV head, and a latent one."""
    torch.manual_seed(0)
    options = {"rope": Rope(8), "head_dim": 16, "dtype": torch.float64}
    rotary = {"rope": Rope(8, interleaved=True), "dtype": torch.float64}
    return nn.Sequential(
        GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=2, mask=CAUSAL, bias=True, **options),
        GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=1, mask=sliding(5), **options),
        MultiHeadLatentAttention(HIDDEN, HEADS, mask=CAUSAL, q_lora_rank=8, **LATENT, **rotary),
    )


class Run(NamedTuple):
    """A model on the ranks, this rank's part of a tensor of all tokens, and what else a step needs."""

    model: nn.Module
    part: Callable[[Tensor], Tensor] = lambda x: x
    mesh: DeviceMesh | None = None  # of QKClip
    summed: DeviceMesh | None = None  # of ranks whose gradients nobody else adds
    factor: float = 1.0  # of the loss, where gradients are averaged


def rows(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda x: x.chunk(mesh.size())[mesh.get_local_rank()]


def with_heads_on(layers: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in layers:
        parallelize_module(layer, mesh, layer.parallel_plan(mesh))
    return layers


def with_tokens_on(layers: nn.Sequential, mesh: DeviceMesh, form: str | None = None) -> nn.Sequential:
    for layer in layers:
        layer.context_parallel = ContextParallel(mesh, form)
    return layers


def with_weights_on(layers: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def over_tokens(mesh: DeviceMesh, form: str, heads: DeviceMesh | None = None) -> Run:
    layers = model() if heads is None else with_heads_on(model(), heads)
    if form == "heads":
        layers[1].context_parallel = ContextParallel(mesh, "ring")  # its KV head cannot be shared out
        with_tokens_on(layers[::2], mesh, form)
    else:
        with_tokens_on(layers, mesh, form)
    return Run(layers, lambda x: shard(x, mesh), summed=mesh)


def over_weights(mesh: DeviceMesh, heads: DeviceMesh | None = None) -> Run:
    layers = model() if heads is None else with_heads_on(model(), heads)
    return Run(with_weights_on(layers, mesh), rows(mesh), factor=mesh.size())


def replicated(mesh: DeviceMesh) -> Run:
    of = DistributedDataParallel(model(), process_group=mesh.get_group())
    return Run(of, rows(mesh), mesh=mesh, factor=mesh.size())


CASES: dict[str, Callable[[DeviceMesh, DeviceMesh], Run]] = {  # of four ranks, or of two times two
    "tp": lambda four, two: Run(with_heads_on(model(), four)),
    "fsdp": lambda four, two: over_weights(four),
    "fsdp, tp": lambda four, two: over_weights(two["data"], two["heads"]),
    "ddp": lambda four, two: replicated(four),
    "cp, ring": lambda four, two: over_tokens(four, "ring"),
    "cp, gather": lambda four, two: over_tokens(four, "gather"),
    "cp, heads": lambda four, two: over_tokens(two["data"], "heads"),
    "cp, tp": lambda four, two: over_tokens(two["data"], "ring", two["heads"]),
}


def train(run: Run) -> dict[str, Tensor]:
    """The maxima of two steps of two microbatches each, and the weights after them, whole."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    qk_clip, results = QKClip(run.model, bound=BOUND, mesh=run.mesh), {}
    x, y = 2 * torch.randn(2, BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    for n in range(2):
        optimizer.zero_grad()
        for half, of in zip(x.split(BATCH // 2), y.split(BATCH // 2), strict=True):
            with qk_clip.record():
                out = run.model(run.part(half))
            (run.factor * out * run.part(of)).sum().backward()
        for parameter in run.model.parameters() if run.summed else ():
            grad = parameter.grad
            all_reduce(grad.to_local() if hasattr(grad, "to_local") else grad, group=run.summed.get_group())
        optimizer.step()
        results |= {f"{path} {n}": x.clone() for path, x in qk_clip.step().items()}
    results |= {name: x.detach() for name, x in run.model.named_parameters()}
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in results.items()}
    return {name.removeprefix("module."): x.clone() for name, x in whole.items()}


def whole_weights(mesh: DeviceMesh) -> str:
    """What a step says after an evaluation, which leaves the weights of FSDP2's root whole."""
    layers = fully_shard(model(), mesh=mesh)
    qk_clip = QKClip(layers, bound=BOUND)
    with torch.no_grad(), qk_clip.record():
        layers(torch.ones(2, TOKENS, HIDDEN, dtype=torch.float64))
    try:
        qk_clip.step()
    except RuntimeError as error:
        layers.reshard()
        qk_clip.step()
        return str(error)
    return "nothing"


def work(rank: int, ranks: int, folder: str) -> None:
    """One process: what each case gives here."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    four = init_device_mesh("cpu", (ranks,))
    two = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "heads"))
    results = {name: train(make(four, two)) for name, make in CASES.items()}
    torch.save(results | {"whole weights": whole_weights(four)}, f"{folder}/{rank}")
    leave()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (4, str(folder)), nprocs=4)
    return [torch.load(folder / f"{rank}") for rank in range(4)]


@pytest.fixture(scope="module")
def alone():
    return train(Run(model()))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_maxima_and_weights_of_one_process(processes, alone, name):
    for results in processes:
        assert results[name].keys() == alone.keys()
        for key, x in results[name].items():
            torch.testing.assert_close(x, alone[key], rtol=1e-9, atol=1e-12, msg=lambda t, k=key: f"{k}: {t}")


def test_whole_weights_that_fsdp_would_drop_are_refused(processes):
    for results in processes:
        assert re.match(r"step: expected sharded weights of 0, 1, 2, got whole", results["whole weights"])


def test_some_heads_are_clipped_and_others_not(alone):
    for path in "012":
        clipped = torch.stack([alone[f"{path} {n}"] for n in range(2)]) > BOUND
        assert clipped.any(), path
    assert not torch.stack([alone[f"{path} 1"] for path in "012"]).gt(BOUND).all()
