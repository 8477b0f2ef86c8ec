"""Layers under FSDP2 and checkpointed have the gradients of the whole model: on CPUs with gloo, on GPUs with
NCCL.
"""

import warnings

import pytest
import torch
import torch.multiprocessing as mp
from layer_helpers import tokens
from leaving import leave
from selecting_cases import T, choosing
from sharded_models import model, sharded
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.func import functional_call

from attnlib import CAUSAL, GroupedQueryAttention, SlowPathWarning, masks, scores

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def train(step, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradients after two steps, whole; ``step()`` is a loss."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for n in range(2):
        optimizer.zero_grad()
        step().backward()
        if n == 0:
            optimizer.step()
    return [x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for x in parameters]


def loss(out: Tensor) -> Tensor:
    return out.float().square().mean()


def in_bf16(whole: nn.Module, x: Tensor, grad_dtype: torch.dtype) -> Tensor:
    """What one process would compute with bf16 copies of its fp32 weights, and of nothing twice."""
    x = x.bfloat16()
    for block in whole:
        copies = {f"block.{name}": bf16_copy(w, grad_dtype) for name, w in block.named_parameters()}
        x = functional_call(Once(block), copies, (x,))
    return x


def bf16_copy(weight: nn.Parameter, grad_dtype: torch.dtype) -> Tensor:
    """Return a leaf in bf16 whose gradient, of ``grad_dtype``, is added to the weight's."""
    copy = weight.detach().bfloat16().requires_grad_()
    copy.grad_dtype = grad_dtype

    def add(copy: Tensor) -> None:
        grad = copy.grad.to(weight.dtype)
        weight.grad = grad if weight.grad is None else weight.grad + grad

    copy.register_post_accumulate_grad_hook(add)
    return copy


def grad_dtype_of(policy: MixedPrecisionPolicy, mesh) -> torch.dtype:
    """Return the dtype in which FSDP2's copies of weights take gradients: bf16, and from torch 2.15 on fp32.

    It decides whether the gradient of a weight that is broadcast, as a norm's, is rounded to bf16 after it is
    summed.
    """
    sharded = fully_shard(nn.Linear(2, 2, device=mesh.device_type), mesh=mesh, mp_policy=policy)
    sharded.unshard()
    return sharded.weight.grad_dtype


class Once(nn.Module):
    """A block without its checkpoint."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.once(x)


def mixed(whole: nn.Module, x: Tensor, grad_dtype: torch.dtype) -> Tensor:
    """The mean of the ranks' losses, each of its own rows in bf16: gradients meet in fp32."""
    return torch.stack([loss(in_bf16(whole, rows, grad_dtype)) for rows in x]).mean()


def assert_as(found: list[Tensor], expected: list[Tensor], names: list[str]) -> None:
    for name, x, y in zip(names, found, expected, strict=True):
        assert y.any(), name
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def without_memory(mesh, here: torch.device, weights: dict | None) -> nn.Module:
    """A model that was never whole anywhere: made on the meta device, sharded, and then given weights or new
    ones.
    """
    made = sharded(model("meta"), mesh)
    assert all(x.is_meta for name, x in made.named_parameters() if "score" not in name)
    made.to_empty(device=here)
    if weights is None:
        torch.manual_seed(mesh.get_local_rank())  # on a CPU torch draws a rank's part as if it were the whole
        for module in made.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        set_model_state_dict(made, weights, options=StateDictOptions(full_state_dict=True))
    return made


def is_new(made: nn.Module, whole: nn.Module) -> None:
    """New weights are drawn as those of the whole model, and what nobody draws is the same."""
    theirs = dict(whole.named_parameters())
    for name, x in made.named_parameters():
        x, y = x.full_tensor(), theirs[name]
        if x.dim() == 2 and "score" not in name:
            torch.testing.assert_close(
                x.std(), y.std(), rtol=0.1, atol=0, msg=lambda text, n=name: f"{n}: {text}"
            )
            assert x.unique(dim=0).shape == x.shape, f"{name}: ranks drew the same rows"
        elif "bias" not in name or "score" in name:
            assert torch.equal(x, y), name
    for (name, x), (other, y) in zip(made.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(x, y), name


def compare(rank: int, ranks: int, device: str, file: str) -> None:
    """One process: what its rows give, sharded and averaged, is what all rows give."""
    warnings.simplefilter("error", SlowPathWarning)
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    init_process_group(BACKENDS[device], init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh = init_device_mesh(device, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x = torch.randn(ranks, 2, 9, 64, generator=torch.Generator().manual_seed(1)).to(here)
    weights, grad_dtype = model().to(here).state_dict(), grad_dtype_of(policy, mesh)
    cases = {
        "fp32": (lambda: sharded(model().to(here), mesh), lambda whole: loss(whole(x.flatten(0, 1)))),
        "mixed precision": (
            lambda: sharded(model().to(here), mesh, mp_policy=policy),
            lambda whole: mixed(whole, x, grad_dtype),
        ),
        "from no memory": (
            lambda: without_memory(mesh, here, weights),
            lambda whole: loss(whole(x.flatten(0, 1))),
        ),
    }
    for make, step in cases.values():
        ours, whole = make(), model().to(here)
        for block, other in zip(ours, whole, strict=True):
            theirs = other.layer.kv_layout
            assert (
                block.layer.kv_layout_as(theirs.dtype) == theirs
            )  # weights come together before they compute
        names = [name for name, _ in ours.named_parameters()]
        assert names == [name for name, _ in whole.named_parameters()]
        expected = train(lambda step=step, whole=whole: step(whole), list(whole.parameters()))
        found = train(lambda ours=ours: loss(ours(x[rank])), list(ours.parameters()))
        assert_as(found, expected, names)
    is_new(without_memory(mesh, here, None), model().to(here))
    leave()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sharded_layers_have_the_gradients_of_the_whole(device, tmp_path):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ranks = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    mp.spawn(compare, (ranks, device, str(tmp_path / "store")), nprocs=ranks)


def learn_to_choose(rank: int, ranks: int, device: str, file: str) -> None:
    """One process: a sharded layer's index loss has the gradients of the whole layer's, and no others."""
    warnings.simplefilter("error", SlowPathWarning)
    torch.set_num_threads(1)
    init_process_group(BACKENDS[device], init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh, x = init_device_mesh(device, (ranks,)), tokens(ranks, 1, T)
    ours, whole = choosing("deepseek"), choosing("deepseek")
    fully_shard(ours, mesh=mesh)
    for name in ("choose", "index_loss"):
        register_fsdp_forward_method(ours, name)
    for is_sparse in (False, True):
        chosen = ours.choose(x[rank]) if is_sparse else None
        ours.index_loss(x[rank], selected=chosen).backward()
        whole.index_loss(
            x.flatten(0, 1), selected=whole.choose(x.flatten(0, 1)) if is_sparse else None
        ).backward()
        for (name, found), expected in zip(ours.named_parameters(), whole.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None) == (not name.startswith("indexer.")), name
            if expected.grad is not None:
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
    leave()


def test_a_sharded_layer_learns_to_choose(tmp_path):
    mp.spawn(learn_to_choose, (2, "cpu", str(tmp_path / "store")), nprocs=2)


def captured(**options) -> GroupedQueryAttention:
    return GroupedQueryAttention(32, 4, alibi=True, **{"mask": CAUSAL} | options)


def test_what_no_checkpoint_has_survives_to_empty():
    """Slopes and captured tensors: emptied as weights are, nobody could load them."""
    bias, documents = torch.randn(4, 5), torch.randint(0, 3, (2, 9)).sort().values
    with torch.device("meta"):
        layer = captured(score=scores.distance_bias(bias), mask=CAUSAL & masks.documents(documents))
    whole = captured(score=scores.distance_bias(bias), mask=CAUSAL & masks.documents(documents))
    layer.to_empty(device="cpu").load_state_dict(whole.state_dict())
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(layer(x), whole(x), rtol=0, atol=0)
    expected = {name: y.clone() for name, y in whole.named_parameters()}
    bias_of = nn.Parameter(bias.clone())
    kept = captured(score=scores.distance_bias(bias_of)).to_empty(device="cpu")
    assert torch.equal(kept.score.bias, bias)
    assert all(torch.equal(y, expected[name]) for name, y in whole.named_parameters())


def test_captured_tensors_without_values_cannot_be_reset():
    with torch.device("meta"):
        layer = captured(score=scores.distance_bias(torch.randn(4, 5)))
    layer.reset_parameters()  # there is nothing to be wrong yet
    layer.to_empty(device="cpu")
    with pytest.raises(
        RuntimeError, match="bias: expected tensors with values in the function of a mask or score"
    ):
        layer.reset_parameters()
