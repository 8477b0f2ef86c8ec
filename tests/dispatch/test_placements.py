"""Attention of DTensors is that of the whole tensors, placed as its inputs are: on CPUs with gloo."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp
from leaving import leave
from selected_cases import lists
from torch import Tensor
from torch.distributed import init_process_group
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from weight_helpers import forms

from attnlib import (
    CAUSAL,
    FULL,
    KVCache,
    KVLayout,
    attention,
    attention_maxima,
    attention_with_lse,
    cached_attention,
    explain,
    mask_mod,
    masks,
    score_mod,
    sliding,
    varlen_attention_with_lse,
)
from attnlib.compat import sdpa

ROWS, HEADS, BATCH = Replicate(), Shard(2), Shard(0)
ENDS, DEPTHS = torch.tensor([7, 4, 4, 4, 7, 6, 7]), torch.tensor([0, 1, 2, 3, 1, 2, 2])  # of a tree
PLACED = {  # of q, and of k and v
    "batch": ([BATCH], [BATCH]),
    "heads": ([HEADS], [HEADS]),
    "negative": ([Shard(-2)], [Shard(-2)]),
    "replicated": ([ROWS], [ROWS]),
    "queries alone": ([HEADS], [ROWS]),
    "keys alone": ([ROWS], [HEADS]),
    "batch against heads": ([BATCH], [HEADS]),
}
OPTIONS = {
    "plain": lambda b, h: {"mask": CAUSAL},
    "slopes and sinks": lambda b, h: {"mask": CAUSAL, "alibi_slopes": torch.rand(h), "sinks": torch.randn(h)},
    "slopes of rows": lambda b, h: {"mask": CAUSAL, "alibi_slopes": torch.rand(b, h), "softcap": 3.0},
    "bounds": lambda b, h: {
        "mask": FULL,
        "key_starts": torch.arange(b).int(),
        "key_ends": torch.arange(5, 5 + b).int(),
    },
    "trees": lambda b, h: {
        "mask": masks.until(ENDS.expand(b, -1), DEPTHS.expand(b, -1)) & sliding(3),
        "alibi_slopes": torch.rand(b, h),
        "sinks": torch.randn(h),
    },
    "selected": lambda b, h: {"mask": CAUSAL & masks.selected(lists(b, 7, h, 3, 4), 2)},
    "selected for KV heads": lambda b, h: {
        "mask": CAUSAL & masks.selected(lists(b, 7, 2 if h == 4 else 1, 3, 4), 2),
        "sinks": torch.randn(h),
    },
    "dropout": lambda b, h: {"mask": CAUSAL, "dropout_p": 0.4, "dropout_seed": torch.tensor([7])},
    "functions": lambda b, h: {
        "mask": mask_mod(lambda b, h, i, j, hidden: (j != hidden[b]) | (h == 1), torch.arange(b)),
        "score": score_mod(
            lambda score, b, h, i, j, bias: score + bias[h, b], torch.randn(h, b).requires_grad_()
        ),
    },
}


def learnt(options: dict) -> list[Tensor]:
    """Return the options that have gradients."""
    score = options.get("score")
    return [options[name] for name in ("alibi_slopes", "sinks") if name in options] + list(
        score.tensors if score else ()
    )


def same(found: Tensor, expected: Tensor, name: object) -> None:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, expected, msg=lambda said: f"{name}: {said}")


def spread(x: Tensor, mesh, placements) -> DTensor:
    return distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad)


def compare(mesh, sizes: tuple[int, int, int], placed: tuple[list, list], make, *, plain: bool) -> None:
    """Output, LSE and every gradient; options are ``plain`` tensors, or replicated ones."""
    b, h, g = sizes
    torch.manual_seed(0)
    whole = [torch.randn(b, 7, heads, 8, requires_grad=True) for heads in (h, g, g)]
    weights, options = (torch.randn(b, 7, h, 8), torch.randn(b, h, 7)), make(b, h)
    for x in learnt(options):
        x.requires_grad_()
    results = attention_with_lse(*whole, **options)
    sum((x * w).sum() for x, w in zip(results, weights, strict=True)).backward()
    expected = [x.grad.clone() for x in (*whole, *learnt(options))]
    for x in learnt(options):
        x.grad = None
    everywhere = [Replicate()] * mesh.ndim
    if not plain:
        options = {
            name: spread(x, mesh, everywhere) if isinstance(x, Tensor) else x for name, x in options.items()
        }
    shards = [spread(x, mesh, p) for x, p in zip(whole, (placed[0], placed[1], placed[1]), strict=True)]
    found = attention_with_lse(*shards, **options)
    w = [distribute_tensor(x, mesh, everywhere) for x in weights]
    sum((x * y).sum() for x, y in zip(found, w, strict=True)).backward()
    named = zip(("out", "lse"), found, results, strict=True)
    grads = zip(
        "qkv" + "x" * len(learnt(options)),
        (x.grad for x in (*shards, *learnt(options))),
        expected,
        strict=True,
    )
    for name, ours, wanted in (*named, *grads):
        same(ours, wanted, (name, sizes, placed))
    assert all(x.grad.placements == x.placements for x in shards)
    if placed[0] != [ROWS] * len(placed[0]):  # results lie as the queries do
        assert found[0].placements == tuple(Shard(p.dim % 4) if p.is_shard() else p for p in placed[0])
        assert found[1].placements == tuple(
            Shard(1) if p.is_shard() and p.dim % 4 == 2 else p for p in placed[0]
        )


def every_option(mesh) -> None:
    for placed in PLACED.values():
        for name, make in OPTIONS.items():
            compare(mesh, (4, 4, 2), placed, make, plain=name != "slopes and sinks")


def other_sizes(mesh) -> None:
    """Rows that ranks do not divide, fewer rows than ranks, and one KV head for all."""
    for sizes in ((3, 4, 4), (1, 4, 2)):
        for name in ("plain", "bounds", "functions"):
            compare(mesh, sizes, PLACED["batch"], OPTIONS[name], plain=True)
    for name in OPTIONS:
        compare(mesh, (2, 6, 1), PLACED["queries alone"], OPTIONS[name], plain=True)


def two_dimensions(mesh) -> None:
    for placed in (
        ([BATCH, HEADS], [BATCH, HEADS]),
        ([HEADS, BATCH], [HEADS, BATCH]),
        ([BATCH, ROWS], [BATCH, ROWS]),
        ([HEADS, HEADS], [HEADS, HEADS]),
        ([BATCH, BATCH], [BATCH, BATCH]),
    ):
        for name in ("slopes and sinks", "dropout", "functions"):
            compare(mesh, (6, 8, 4), placed, OPTIONS[name], plain=True)
    compare(mesh, (2, 8, 2), ([HEADS, HEADS], [ROWS, ROWS]), OPTIONS["functions"], plain=True)


def packed(mesh) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    mask = CAUSAL & masks.selected(lists(1, 9, 2, 3, 4)[0], 2)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "mask": mask}
    out, lse = varlen_attention_with_lse(q, k, v, **sizes)
    (out.square().sum() + lse.sum()).backward()
    shards = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    found = varlen_attention_with_lse(*shards, **sizes)
    assert [x.placements for x in found] == [(Shard(1),), (Shard(0),)]
    (found[0].pow(2).sum() + found[1].sum()).backward()
    for x, y in zip((*found, *(x.grad for x in shards)), (out, lse, q.grad, k.grad, v.grad), strict=True):
        same(x, y, "packed")


def in_e4m3(mesh) -> None:
    """Every head has a scale of its own, so its shard has the bits of the whole call."""
    torch.manual_seed(0)
    whole = [torch.randn(2, 9, heads, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    options = {"mask": CAUSAL, "compute_dtype": torch.float8_e4m3fn}
    out, lse = attention_with_lse(*whole, **options)
    (out.float().square().sum() + lse.sum()).backward()
    shards = [spread(x, mesh, [HEADS]) for x in whole]
    found = attention_with_lse(*shards, **options)
    (found[0].float().pow(2).sum() + found[1].sum()).backward()
    for x, y in zip((*found, *(x.grad for x in shards)), (out, lse, *(x.grad for x in whole)), strict=True):
        assert torch.equal(x.full_tensor(), y)


def recomputed(mesh) -> None:
    """Probabilities and largest scores of every form, dense and packed, lie as queries and keys do."""
    torch.manual_seed(0)
    b, h = 4, 8
    q, k, at = torch.randn(b, 7, h, 8), torch.randn(b, 9, 4, 8), torch.randint(-1, 9, (b, 7, 3))
    cu = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 9])
    packed = {"cu_seqlens_q": cu[0].int(), "cu_seqlens_k": cu[1].int(), "mask": CAUSAL}
    dims = [BATCH, HEADS][-mesh.ndim :], [Shard(1)] * mesh.ndim
    for make in (OPTIONS["slopes of rows"], OPTIONS["functions"], OPTIONS["selected"]):
        options = make(b, h)
        asked = {"rows": torch.tensor([6, 0, -1]), "by_sequence": torch.randint(-1, 7, (b, 4)), "at": at}
        _, lse = attention_with_lse(q, k, k, **options)
        expected = forms(q, k, lse, asked, **options)
        shards = [distribute_tensor(x, mesh, dims[0]) for x in (q, k)]
        of_lse = distribute_tensor(lse.detach(), mesh, [Shard(p.dim // 2) for p in dims[0]])
        for given in (of_lse, lse.detach()):
            for name, x in forms(*shards, given, asked, **options).items():
                same(x, expected[name], name)
    asked = {"rows": torch.tensor([6, 0, -1]), "at": at[0]}
    _, lse = varlen_attention_with_lse(q[0], k[0], k[0], **packed)
    expected = forms(q[0], k[0], lse, asked, **packed)
    shards = [distribute_tensor(x[0], mesh, dims[1]) for x in (q, k)]
    found = forms(*shards, lse, asked, **packed)
    assert found["queries"].placements == tuple(Shard(0) for _ in dims[1])
    for name, x in found.items():
        same(x, expected[name], name)
    if torch.distributed.get_rank() == 0:
        assert "shared: on DTensors" in str(explain(attention_maxima, *shards, **packed))
    torch.distributed.barrier()


def partial_inputs(mesh) -> None:
    """A product that ranks have not summed yet is summed."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    part = DTensor.from_local(q / mesh.size(), mesh, [Partial()], run_check=False)
    keys = distribute_tensor(k, mesh, [Replicate()])
    same(attention(part, keys, keys, mask=CAUSAL), attention(q, k, k, mask=CAUSAL), "partial")


def seeds(mesh) -> None:
    """Without a seed, ranks drop alike where they hold the same rows, and each row on its own."""
    torch.manual_seed(torch.distributed.get_rank())
    one = distribute_tensor(torch.ones(2, 64, 2, 8), mesh, [Replicate()])
    out = attention(one, one, one, mask=FULL, dropout_p=0.5)
    first = DTensor.from_local(out.to_local(), mesh, [Replicate()], run_check=True)  # that of the first rank
    assert first.to_local().equal(out.to_local())
    halves = attention(one.redistribute(placements=[BATCH]), one, one, mask=FULL, dropout_p=0.5).full_tensor()
    assert not halves[0].equal(halves[1])


def refusals(mesh) -> None:
    x = torch.randn(4, 6, 4, 8)
    for dim in (1, 3):
        of = distribute_tensor(x, mesh, [Shard(dim)])
        with pytest.raises(
            NotImplementedError, match=r"k: expected no Shard\(dim=\d\) .* redistribute it to Shard\(0\)"
        ):
            attention(distribute_tensor(x, mesh, [BATCH]), of, of, mask=CAUSAL)
    whole = distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"k: expected a DTensor on .* got Tensor"):
        attention(whole, x, x, mask=CAUSAL)
    three = distribute_tensor(x[:, :, :3], mesh, [HEADS])
    with pytest.raises(
        ValueError, match=r"k: expected KV heads that 2 ranks divide, .* got g=3; redistribute"
    ):
        attention(distribute_tensor(torch.randn(4, 6, 6, 8), mesh, [HEADS]), three, three, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"k: expected \[b=4, .*, d=8\], got"):
        attention(whole, distribute_tensor(x[..., :4], mesh, [Replicate()]), whole, mask=CAUSAL)


def told(mesh) -> None:
    """One rank alone may ask."""
    q = distribute_tensor(torch.randn(4, 6, 4, 8), mesh, [HEADS])
    k = distribute_tensor(torch.randn(4, 6, 2, 8), mesh, [Replicate()])
    if torch.distributed.get_rank() == 0:
        said = explain(attention, q, k, k, mask=CAUSAL)
        assert (said.spec.heads, said.spec.kv_heads) == (2, 1)
        assert "shared: on DTensors, whose ranks share heads" in str(said)
    torch.distributed.barrier()


def compiled(mesh) -> None:
    shards = [distribute_tensor(torch.randn(2, 8, n, 8), mesh, [HEADS]).requires_grad_() for n in (4, 2, 2)]
    run = torch.compile(lambda q, k, v: attention(q, k, v, mask=CAUSAL), fullgraph=True, backend="aot_eager")
    out, expected = run(*shards), attention(*shards, mask=CAUSAL)
    same(out, expected.full_tensor(), "compiled")
    grads = [torch.autograd.grad(x.pow(2).sum(), shards) for x in (out, expected)]
    for x, y in zip(*grads, strict=True):
        same(x, y.full_tensor(), "compiled")


def replaced_sdpa(mesh) -> None:
    shards = [distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Shard(1)]) for _ in range(3)]
    whole = [x.full_tensor() for x in shards]
    found = sdpa.scaled_dot_product_attention(*shards, is_causal=True)
    same(found, sdpa.scaled_dot_product_attention(*whole, is_causal=True), "sdpa")


CHECKS = {
    2: (
        recomputed,
        every_option,
        other_sizes,
        packed,
        in_e4m3,
        partial_inputs,
        seeds,
        refusals,
        told,
        replaced_sdpa,
        compiled,
    ),
    4: (recomputed, two_dimensions),
}


def work(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2, 2) if ranks == 4 else (ranks,))
    for check in CHECKS[ranks]:
        check(mesh)
    leave()


@pytest.mark.parametrize("ranks", CHECKS)
def test_dtensors(tmp_path, ranks):
    mp.spawn(work, (ranks, str(tmp_path)), nprocs=ranks)


def test_a_cache_takes_no_dtensors(tmp_path):
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        cache = KVCache.contiguous([KVLayout.grouped(2, 8)], max_sequences=1, max_length=8)
        cache.admit()
        with cache.step(1) as (kv,):
            view = kv.append(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
            q = distribute_tensor(torch.zeros(1, 1, 2, 8), mesh, [Replicate()])
            with pytest.raises(
                TypeError, match=r"q: expected a local tensor over a cache, .* pass q.to_local"
            ):
                cached_attention(q, view, mask=CAUSAL)
    finally:
        leave()


def test_dtensors_are_not_imported_before_there_are_any():
    code = (
        "import sys, torch, attnlib; attnlib.attention(*[torch.ones(1, 3, 2, 8)] * 3, mask=attnlib.CAUSAL); "
        "assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
