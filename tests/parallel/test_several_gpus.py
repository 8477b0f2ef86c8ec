"""On two and more GPUs, in bf16, ranks that share tokens err no more than one GPU that has them all: outputs
and gradients.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from helpers import assert_close
from torch import Tensor
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnlib import CAUSAL, FULL, Mask, attention, masks, scores, sliding, varlen_attention
from attnlib.masks.band import AnyMask
from attnlib.parallel import context_attention, shard, unshard
from attnlib.parallel.context_parallel import FORMS

RANKS = (2, 4, 8)
TOKENS, HEADS, GROUPS = 1536, 16, 8
PACK = (0, 300, 300, 1100, 1511)  # the last tokens are of no sequence


class Case(NamedTuple):
    """A call of ``kv_heads`` of so many ``channels``; those named in ``learns`` are among its options."""

    name: str
    mask: AnyMask
    channels: int = 128
    kv_heads: int = HEADS
    options: Mapping[str, Any] = MappingProxyType({})
    learns: tuple[str, ...] = ()
    packed: bool = False


def cases(device: torch.device) -> list[Case]:
    """Dense and packed, with every kind of what changes a score."""
    random = torch.Generator().manual_seed(1)
    document = torch.randint(0, 5, (2, TOKENS), generator=random).sort().values.to(device)
    slopes, sinks, table = (
        torch.rand(*size, generator=random).to(device) for size in ((HEADS,), (HEADS,), (HEADS, 9))
    )
    bounds = {
        "key_starts": torch.tensor([30, 0], dtype=torch.int32, device=device),
        "key_ends": torch.tensor([1400, 1536], dtype=torch.int32, device=device),
    }
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([5], device=device)}
    return [
        Case("causal", CAUSAL),
        Case("causal, 64", CAUSAL, 64, GROUPS),
        Case("causal, 256", CAUSAL, 256, GROUPS),
        Case("full", FULL, 64),
        Case("window", sliding(200), 128, GROUPS),
        Case("both ways", Mask(500, 90), 64),
        Case("sinks and softcap", CAUSAL, 64, GROUPS, {"softcap": 3.0, "sinks": sinks}, ("sinks",)),
        Case("slopes", CAUSAL, 64, GROUPS, {"alibi_slopes": slopes}, ("alibi_slopes",)),
        Case("documents", CAUSAL & masks.documents(document), 128),
        Case("scores", CAUSAL, 64, GROUPS, {"score": table}, ("score",)),
        Case("bounds", CAUSAL, 64, GROUPS, bounds),
        Case("dropout", CAUSAL, 64, GROUPS, dropout),
        Case("packed", CAUSAL, 128, GROUPS, packed=True),
        Case("packed window", sliding(150), 64, GROUPS, packed=True),
    ]


def tensors(case: Case, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole."""
    random, batch = torch.Generator().manual_seed(2), () if case.packed else (2,)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    return [
        torch.randn(*batch, TOKENS, h, case.channels, generator=random).bfloat16().to(device) for h in heads
    ]


def learning(case: Case, dtype: torch.dtype) -> tuple[dict, list[Tensor]]:
    """The options of a call, with new leaves where a gradient flows, in fp64 for fp64."""
    options, leaves = dict(case.options), []
    for name in case.learns:
        leaf = (
            options[name]
            .to(torch.float64 if dtype == torch.float64 else torch.float32)
            .clone()
            .requires_grad_()
        )
        leaves.append(leaf)
        options[name] = scores.distance_bias(leaf) if name == "score" else leaf
    return options, leaves


def whole(case: Case, given: list[Tensor], backend: str) -> list[Tensor]:
    """Output and gradients of one GPU that has all tokens."""
    *qkv, dout = given
    qkv = [x.detach().requires_grad_() for x in qkv]
    options, leaves = learning(case, dout.dtype)
    cu = torch.tensor(PACK, dtype=torch.int32, device=dout.device)
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if case.packed else {}
    call = varlen_attention if case.packed else attention
    out = call(*qkv, mask=case.mask, backend=backend, **options, **packing)
    return [out.detach(), *torch.autograd.grad(out, (*qkv, *leaves), dout)]


def shared(case: Case, given: list[Tensor], form: str, mesh: DeviceMesh) -> list[Tensor]:
    """The same of ranks that share the tokens."""
    dim = 0 if case.packed else 1
    *own, dout = (shard(x, mesh, dim=dim).requires_grad_() for x in given)
    options, leaves = learning(case, dout.dtype)
    packing = {"cu_seqlens": torch.tensor(PACK, dtype=torch.int32, device=dout.device)} if case.packed else {}
    out = context_attention(
        *own, mask=case.mask, mesh=mesh, form=form, backend="triton", **options, **packing
    )
    grads = torch.autograd.grad(out, (*own, *leaves), dout.detach())
    for x in grads[3:]:
        all_reduce(x)
    return [*(unshard(x.detach(), mesh, dim=dim) for x in (out, *grads[:3])), *grads[3:]]


def work(rank: int, ranks: int, folder: str) -> None:
    """One GPU: with the others its output errs at most twice as much as alone, and its gradients three
    times.
    """
    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cuda", (ranks,))
    for case in cases(here):
        given = tensors(case, here)
        golden, alone = whole(case, [x.double() for x in given], "torch"), whole(case, given, "triton")
        for form in FORMS:
            found = shared(case, given, form, mesh)
            if rank == 0:
                Path(folder, f"{case.name}, {form}").write_text(amiss(case, found, alone, golden))
    destroy_process_group()


def amiss(case: Case, found: list[Tensor], alone: list[Tensor], golden: list[Tensor]) -> str:
    """What is wrong with what was found, if anything."""
    for name, x, one, right in zip(
        ("out", "dq", "dk", "dv", *case.learns), found, alone, golden, strict=True
    ):
        noise = torch.finfo(x.dtype).eps
        try:
            assert_close(name, x.cpu(), [one.cpu()], right.cpu(), 2 if name == "out" else 3, noise)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module", params=RANKS)
def reports(request, tmp_path_factory):
    """A folder with a file for each case and form, of one run."""
    ranks = request.param
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} CUDA devices are needed, {torch.cuda.device_count()} are here")
    folder = tmp_path_factory.mktemp("reports")
    mp.spawn(work, (ranks, str(folder)), nprocs=ranks)
    return folder


@pytest.mark.gpu2
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [case.name for case in cases(torch.device("cpu"))])
def test_ranks_err_no_more_than_one_gpu(reports, name, form):
    text = (reports / f"{name}, {form}").read_text()
    assert not text, text
