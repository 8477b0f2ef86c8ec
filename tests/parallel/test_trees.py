"""Ranks that share the tokens or the heads of a tree compute what unshared copies do, on CPUs with gloo."""

import pytest
import torch
import torch.multiprocessing as mp
from leaving import leave
from torch import Tensor, nn
from torch.distributed import all_reduce, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from tree_layers import HEADS, LAYERS, MADE, douts, make, of_copies, tokens, trained

from attnlib import masks
from attnlib.packing import tree
from attnlib.parallel import ContextParallel, shard
from attnlib.parallel.context_parallel import FORMS

FIRST = tree([MADE.tokens[rows].tolist() for rows in MADE.rows[6:8]])  # a short tree, packed before MADE


def cases(expected: list[Tensor]):
    """Dense and packed calls, and what they compute: the packed one has 4 rows more than two trees."""
    of_tree = masks.until(MADE.ends, MADE.positions)
    yield tokens()[None], douts()[None], {"mask": of_tree}, [x[None] for x in expected[:2]] + expected[2:]
    size, total = len(FIRST.tokens), len(FIRST.tokens) + len(MADE.tokens)
    rest = -total % 8
    ends, positions = (
        torch.cat((getattr(FIRST, x), getattr(MADE, x), torch.zeros(rest).int()))
        for x in ("ends", "positions")
    )
    cu = torch.tensor([0, size, total], dtype=torch.int32)
    padding, nothing = tokens(FIRST)[:0].new_zeros(rest, tokens().shape[1]), douts(FIRST) * 0
    x, dout = torch.cat((tokens(FIRST), tokens(), padding)), torch.cat((nothing, douts(), padding))
    yield (
        x,
        dout,
        {"mask": masks.until(ends, positions), "cu_seqlens": cu},
        [torch.cat((y[:size] * torch.nan, y, padding)) if n < 2 else y for n, y in enumerate(expected)],
    )


def compare(layer: nn.Module, name: str, mesh: DeviceMesh, form: str, *, zigzag: bool) -> None:
    layer.context_parallel = ContextParallel(mesh, form, zigzag=zigzag) if mesh.size() > 1 else None
    for x, dout, options, expected in cases(of_copies(make(name))):
        own = [shard(y, mesh, dim=-2 % y.dim(), zigzag=zigzag) for y in (x, dout)]
        out, dx, *dw = trained(layer, *own, options)
        dw = [y.full_tensor() if hasattr(y, "full_tensor") else y for y in dw]
        for y in dw:
            all_reduce(y, group=mesh.get_group())
        parts = [shard(y, mesh, dim=-2 % y.dim(), zigzag=zigzag) for y in expected[:2]]
        for n, (y, right) in enumerate(zip((out, dx, *dw), (*parts, *expected[2:]), strict=True)):
            known = ~right.isnan()
            assert torch.allclose(y[known], right[known], rtol=1e-12, atol=1e-12), (
                name,
                form,
                zigzag,
                x.dim(),
                n,
                (y - right)[known].abs().max(),
            )


def work(rank: int, ranks: int, heads: int, folder: str) -> None:
    """One process of a mesh of so many ranks for tokens and for heads."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks * heads)
    mesh = init_device_mesh("cpu", (ranks, heads), mesh_dim_names=("tokens", "heads"))
    for n, name in enumerate(LAYERS):
        layer = make(name)
        if getattr(layer, "form", None) == "absorbed":  # ranks that share tokens expand latents
            continue
        if heads > 1:
            parallelize_module(layer, mesh["heads"], layer.parallel_plan(mesh["heads"]))
        kv_heads = getattr(layer, "num_kv_heads", HEADS)
        forms = list(FORMS) if ranks * heads > 2 else [list(FORMS)[n % 3]]
        for at, form in enumerate(forms):
            if form != "heads" or not max(1, kv_heads // heads) % ranks:
                compare(layer, name, mesh["tokens"], form, zigzag=(n + at) % 2 == 0)
    leave()


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [
        (2, 1),
        (1, 2),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_copies_learn(ranks, heads, tmp_path):
    mp.spawn(work, (ranks, heads, str(tmp_path)), nprocs=ranks * heads)
