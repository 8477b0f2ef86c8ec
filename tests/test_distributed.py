"""Layers under FSDP2 and checkpointed have the gradients of the whole model: on CPUs with gloo, on GPUs with NCCL."""

import warnings
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnlib import CAUSAL, SAVE_OPS, GroupedQueryAttention, MultiHeadLatentAttention, Rope, SlowPathWarning, sliding

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, list(SAVE_OPS))}


class Block(nn.Module):
    """A layer beside its input, run again in the backward; what ``options`` keep is not."""

    def __init__(self, layer: nn.Module, options: dict):
        super().__init__()
        self.norm, self.layer, self.options = nn.RMSNorm(64), layer, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x + self.layer(self.norm(x)), x, use_reentrant=False, **self.options)


def model() -> nn.Sequential:
    """The same weights in every process."""
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    layers = (
        GroupedQueryAttention(64, 4, num_kv_heads=2, mask=CAUSAL, rope=Rope(16), qk_norm=True, sinks=True),
        GroupedQueryAttention(64, 4, num_kv_heads=1, mask=sliding(5), alibi=True, bias=True, softcap=9.0),
        MultiHeadLatentAttention(64, 4, mask=CAUSAL, q_lora_rank=None, rope=Rope(16, interleaved=True), **sizes),
    )
    return nn.Sequential(*(Block(layer, options) for layer, options in zip(layers, ({}, SELECTIVE, {}), strict=True)))


def train(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients after two steps, whole, by parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 0:
            optimizer.step()
    grads = {name: x.grad for name, x in model.named_parameters()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in grads.items()}


def compare(rank: int, ranks: int, device: str, file: str) -> None:
    """One process: what its rows give, sharded and averaged, is what all rows give."""
    warnings.simplefilter("error", SlowPathWarning)
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    init_process_group(BACKENDS[device], init_method=f"file://{file}", rank=rank, world_size=ranks)
    whole, sharded = model().to(here), model().to(here)
    mesh = init_device_mesh(device, (ranks,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for ours, theirs in zip(sharded, whole, strict=True):
        assert ours.layer.kv_layout == theirs.layer.kv_layout  # its weights come together before they compute
    x = torch.randn(ranks, 2, 9, 64).to(here)  # seeded by model()
    expected = train(whole, x.flatten(0, 1))
    grads = train(sharded, x[rank])
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert expected[name].any(), name
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded_layers_have_the_gradients_of_the_whole(device, tmp_path):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ranks = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    mp.spawn(compare, (ranks, device, str(tmp_path / "store")), nprocs=ranks)
