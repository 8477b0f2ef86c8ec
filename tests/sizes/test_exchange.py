"""What ranks receive and keep, and what a rank stores of a shared cache, against what they do: on CPUs with
gloo.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from leaving import leave
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from attnlib import CAUSAL, KVCache, KVLayout, MultiHeadLatentAttention, Rope
from attnlib.parallel import (
    ContextParallel,
    exchange,
    gather_attention,
    head_attention,
    ring_attention,
    shard,
)
from attnlib.sizes import (
    Exchange,
    GroupedShape,
    LatentShape,
    Setting,
    cache_bytes,
    decode_bytes,
    decode_flops,
    exchange_bytes,
    longest_context,
    model,
    rows,
)

FUNCTIONS = {"ring": ring_attention, "gather": gather_attention, "heads": head_attention}
GROUPED = GroupedShape(hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=16)
LATENT = LatentShape(
    hidden_size=64,
    num_heads=4,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
)
TOKENS, PAGE = 64, 4


class Counted:
    """Bytes that this rank has received since it was asked last."""

    def __init__(self, ranks: int):
        self._bytes = 0
        gather, scatter = exchange._all_gather, exchange._reduce_scatter
        swap, send = dist.all_to_all_single, dist.batch_isend_irecv

        def add(count: int, run, *given, **options):
            self._bytes += count
            return run(*given, **options)

        exchange._all_gather = lambda out, x, **o: add(out.nbytes - x.nbytes, gather, out, x, **o)
        exchange._reduce_scatter = lambda out, x, **o: add(x.nbytes - out.nbytes, scatter, out, x, **o)
        dist.all_to_all_single = lambda out, x, **o: add(x.nbytes * (ranks - 1) // ranks, swap, out, x, **o)
        dist.batch_isend_irecv = lambda ops: add(
            sum(one.tensor.nbytes for one in ops if one.op is dist.irecv), send, ops
        )

    def taken(self) -> int:
        found, self._bytes = self._bytes, 0
        return found


def of_tensors(form: str, mesh, dtype: torch.dtype, counted: Counted) -> Exchange:
    """A call's forward and backward, and the keys and values that it keeps between them."""
    heads, kv_heads = GROUPED.num_heads, GROUPED.num_kv_heads
    q, k, v = (torch.randn(1, TOKENS, n, 16, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    own = [shard(x, mesh).clone().requires_grad_() for x in (q, k, v)]
    kept, seen = {}, kv_heads // mesh.size() if form == "heads" else kv_heads

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 4 and x.shape[-2] == seen:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out = FUNCTIONS[form](*own, mask=CAUSAL, mesh=mesh)
    forward = counted.taken()
    out.sum().backward()
    return Exchange(forward, counted.taken(), sum(kept.values()))


def of_latents(form: str, mesh, dtype: torch.dtype, counted: Counted) -> tuple[int, int]:
    """The forward and the backward of a layer of latents."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    options = {name: getattr(LATENT, name) for name in names} | {
        "rope": Rope(8, interleaved=True),
        "mask": CAUSAL,
    }
    shared = ContextParallel(mesh, form=form)
    layer = MultiHeadLatentAttention(64, LATENT.num_heads, **options, dtype=dtype, context_parallel=shared)
    out = layer(shard(torch.randn(1, TOKENS, 64, dtype=dtype), mesh))
    forward = counted.taken()
    out.sum().backward()
    return forward, counted.taken()


def of_caches(mesh) -> None:
    """Caches of layers with and without a window, and of latents, as sequences grow."""
    layouts = [KVLayout.grouped(2, 8), KVLayout.grouped(2, 8, window=6), KVLayout.latent(8, 4)]
    cache = KVCache.paged(layouts, pages=64, page_size=PAGE, max_sequences=2, max_length=99, mesh=mesh)
    first, second = cache.admit(2)
    for count in (1, 3, 7, 20, 1, 2):
        with cache.step({first: count, second: 2}, replay=True):
            pass
        lengths = [cache.length(first), cache.length(second)]
        assert cache.used_bytes == cache_bytes(layouts, lengths, page_size=PAGE, ranks=mesh.size()), lengths


def compare(rank: int, ranks: int, file: str) -> None:
    """One process: what it counts is what the formulas say."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh, counted = init_device_mesh("cpu", (ranks,)), Counted(ranks)
    for form in FUNCTIONS:
        for dtype in (torch.float32, torch.bfloat16):
            expected = exchange_bytes(GROUPED, TOKENS, ranks=ranks, form=form, dtype=dtype)
            found = of_tensors(form, mesh, dtype, counted)
            assert found == expected, (form, dtype, found, expected)
        forward, backward, _ = exchange_bytes(LATENT, TOKENS, ranks=ranks, form=form, dtype=torch.float32)
        assert of_latents(form, mesh, torch.float32, counted) == (forward, backward), form
    of_caches(mesh)
    leave()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_receive_and_store_what_is_said(ranks, tmp_path):
    mp.spawn(compare, (ranks, str(tmp_path / "store")), nprocs=ranks)


def test_numbers_of_one_rank_shrink_with_the_ranks():
    layouts = [KVLayout.latent(512, 64, dtype=torch.bfloat16)]
    sizes = {n: cache_bytes(layouts, [32_768], page_size=64, ranks=n) for n in (1, 2, 8)}
    assert sizes == {1: 37_748_736, 2: 18_874_368, 8: 4_718_592}
    windowed = [replace(layouts[0], window=100)]
    assert len({cache_bytes(windowed, [32_768], page_size=64, ranks=n) for n in (1, 2, 8)}) == 1
    assert longest_context(layouts, 2**20, batch=2, page_size=64, ranks=4) == 4 * 448
    assert decode_bytes(GROUPED, 100, batch=3, dtype=torch.float32, ranks=4) == decode_bytes(
        GROUPED, 25, batch=3, dtype=torch.float32
    )
    assert decode_flops(GROUPED, 101, ranks=4) == decode_flops(GROUPED, 26)


def one(name: str, **ranks: int):
    [row] = rows([model(name)], Setting(contexts=(4096,), batches=(1,), **ranks))
    return row


@pytest.mark.parametrize(
    ("name", "ranks", "context_ranks", "total"),
    [
        ("deepseek-v3", 8, 8, 1),  # the ranks that share heads have the same latents, and share them too
        ("deepseek-v3", 8, 4, 2),
        ("deepseek-v3", 8, 16, 1),
        ("deepseek-v3", 1, 8, 1),
        ("llama-3-8b", 8, 4, 1),  # each rank has a KV head of its own: the four are others
        ("llama-3-8b", 32, 2, 2),
        ("llama-3-8b", 32, 4, 1),
    ],
)
def test_what_all_ranks_store(name, ranks, context_ranks, total):
    alone, row = one(name), one(name, ranks=ranks, context_ranks=context_ranks)
    assert row.total_token_bytes == total * alone.token_bytes
    assert row.cache_bytes * context_ranks == 4096 * row.token_bytes


def test_every_windowed_layer_is_whole_on_every_rank():
    known, alone, row = model("gemma-3-27b"), one("gemma-3-27b"), one("gemma-3-27b", context_ranks=4)
    layouts = known.layouts(dtype=torch.bfloat16)
    windowed = sum(layout.token_bytes for layout in layouts if layout.window is not None)
    assert row.total_token_bytes == alone.token_bytes + 3 * windowed


def test_a_rank_computes_for_all_heads_that_share_its_keys():
    """Latents dealt out over the ranks that share the heads: as many FLOPs, and an eighth of the cache to
    read.
    """
    whole, dealt = one("deepseek-v3", ranks=8), one("deepseek-v3", ranks=8, context_ranks=8)
    assert dealt.decode_flops == whole.decode_flops
    weights = whole.parameters * 2
    assert (whole.decode_bytes - weights) == 8 * (dealt.decode_bytes - weights)
    apart = one("llama-3-8b", ranks=8, context_ranks=4)
    projections = 2 * sum(shape.weights for shape in model("llama-3-8b").shard(8).layers)
    assert one("llama-3-8b", ranks=8).decode_flops - projections == 4 * (apart.decode_flops - projections)


def test_forms_in_a_row():
    row = one("llama-3-8b", context_ranks=8)
    found = [exchange_bytes(model("llama-3-8b").layers[0], 4096, ranks=8, form=form, dtype=torch.bfloat16)
             for form in FUNCTIONS]  # fmt: skip
    assert [32 * (x.forward + x.backward) for x in found] == [
        row.ring_bytes,
        row.gather_bytes,
        row.heads_bytes,
    ]
    assert one("llama-3-8b", context_ranks=16).heads_bytes is None
    alone = one("llama-3-8b")
    assert (alone.ring_bytes, alone.gather_bytes, alone.heads_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"form": "star"}, "form: expected one of ring, gather, heads, got 'star'"),
        ({"ranks": 0}, "exchange_bytes: expected tokens and ranks of at least 1, got 64 and 0"),
        ({"tokens": 0}, "exchange_bytes: expected tokens and ranks of at least 1, got 0 and 2"),
        (
            {"form": "heads", "ranks": 8},
            "form: expected heads that 8 ranks can share, got GQA-4; use another form",
        ),
    ],
)
def test_exchanges_that_cannot_be(wrong, why):
    given = {"tokens": TOKENS, "ranks": 2, "form": "ring", "dtype": torch.float32} | wrong
    with pytest.raises(ValueError, match=why):
        exchange_bytes(GROUPED, given.pop("tokens"), **given)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="context_ranks: expected at least 1, got 0"):
        Setting(context_ranks=0)
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        decode_flops(GROUPED, 9, ranks=0)
    with pytest.raises(ValueError, match=r"cache_bytes: expected .* ranks >= 1 .* ranks=0"):
        cache_bytes([KVLayout.grouped(1, 1)], [3], page_size=4, ranks=0)
