"""Calls that select keys by lists: over caches of every storage, in layers, and where they are refused."""

import pytest
import torch
from selected_cases import as_tensor, lists
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh

from attnlib import (
    CAUSAL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    Rope,
    attention,
    attention_maxima,
    attention_weights,
    cached_attention_with_lse,
    mask_mod,
    sliding,
)
from attnlib.layers.tensor_parallel import Share
from attnlib.masks import selected
from attnlib.parallel import ContextParallel, context_attention

LAYOUTS = {
    "grouped": {"make": KVLayout.grouped, "heads": 2, "dim": 16},
    "wide values": {"make": KVLayout.grouped, "heads": 2, "dim": 16, "value_dim": 24},
    "latent": {"make": KVLayout.latent, "rank": 16, "rope_dim": 8},
    "window": {"make": KVLayout.grouped, "heads": 2, "dim": 16, "window": 9},
}
STORED = {"as computed": None, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
H = 4


def layout_of(name: str, stored: str) -> KVLayout:
    options = dict(LAYOUTS[name])
    return options.pop("make")(**options, dtype=torch.float32, storage_dtype=STORED[stored])


def cache_of(layout: KVLayout, kind: str) -> KVCache:
    if kind == "contiguous":
        return KVCache.contiguous([layout], max_sequences=3, max_length=60)
    return KVCache.paged([layout], pages=40, page_size=4, max_sequences=3)


def tokens_of(layout: KVLayout, *shape: int) -> list[torch.Tensor]:
    """Keys and values of new tokens, as append() takes them."""
    if layout.is_latent:
        return [torch.randn(*shape, layout.dim), torch.randn(*shape, layout.rope_dim)]
    return [torch.randn(*shape, layout.heads, width) for width in (layout.dim, layout.value_dim)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cache_counts_storage_indices(name, stored, kind, backend):
    """Of a prompt, one token and a few drafts after left padding and dropped pages; of all kinds of lists."""
    layout = layout_of(name, stored)
    cache, width = cache_of(layout, kind), layout.dim + layout.rope_dim
    cache.admit(2, left_padding=[0, 5])
    band, length = CAUSAL if layout.window is None else sliding(layout.window), 0
    for step, s in enumerate((31, 1, 3)):
        length += s
        with cache.step(s) as (kv,):
            view = kv.append(*tokens_of(layout, 2, s))
        q = torch.randn(2, s, H, width)
        for c in {1, layout.heads, H}:
            indices = lists(2, s, c, 6, 10, seed=step)
            both = (band & selected(indices, 4), as_tensor(indices, 4, H, length, band))
            ours, theirs = (cached_attention_with_lse(q, view, mask=x, backend=backend) for x in both)
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x, y)


def test_a_packed_step_has_a_row_for_each_token():
    layout = layout_of("grouped", "as computed")
    cache = cache_of(layout, "paged")
    first, second = cache.admit(2)
    for counts in ({first: 9, second: 20}, {second: 3, first: 1}):
        total = sum(counts.values())
        with cache.step(counts) as (kv,):
            view = kv.append(*tokens_of(layout, total))
        q, indices = torch.randn(total, H, 16), lists(1, total, 2, 5, 7)[0]
        out, lse = cached_attention_with_lse(q, view, mask=CAUSAL & selected(indices, 4))
        row = 0
        for n, (handle, s) in enumerate(zip(counts, view.cu_seqlens_q.diff().tolist(), strict=True)):
            t, rows = int(view.lengths[n]), slice(row, row + s)
            assert s == counts[handle]
            pages = view.table[n, torch.arange(t) // 4].long(), torch.arange(t) % 4
            mask = as_tensor(indices[None, rows], 4, H, t)
            alone = attention(q[None, rows], view.k[pages][None], view.v[pages][None], mask=mask)
            torch.testing.assert_close(out[rows], alone[0])
            row += s
        assert lse.shape == (H, total)


@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_weights_and_maxima_over_a_cache(name):
    layout = layout_of(name, "int8")
    cache = cache_of(layout, "paged")
    cache.admit(2, left_padding=[3, 0])
    with cache.step(30) as (kv,):
        kv.append(*tokens_of(layout, 2, 30))
    with cache.step(2) as (kv,):
        view = kv.append(*tokens_of(layout, 2, 2))
    q, indices = torch.randn(2, 2, H, layout.dim + layout.rope_dim), lists(2, 2, layout.heads, 5, 8)
    ours, theirs = CAUSAL & selected(indices, 4), as_tensor(indices, 4, H, 32)
    _, lse = cached_attention_with_lse(q, view, mask=theirs)
    at = torch.randint(-1, 32, (2, 2, 9))
    for asked in (
        {"over": "queries"},
        {"over": "none", "rows": torch.tensor([1])},
        {"over": "heads", "at": at},
    ):
        found = attention_weights(q, view, lse, mask=ours, **asked)
        torch.testing.assert_close(found, attention_weights(q, view, lse, mask=theirs, **asked))
    found = attention_maxima(q, view, mask=ours)
    torch.testing.assert_close(found, attention_maxima(q, view, mask=theirs))


def test_shared_prefixes_are_read_in_one_call():
    layout = layout_of("grouped", "as computed")
    cache = KVCache.paged([layout], pages=40, page_size=4, max_sequences=3, shared_prefixes=2)
    (first,) = cache.admit(1)
    with cache.step(17) as (kv,):
        kv.append(*tokens_of(layout, 1, 17))
    cache.fork(first, 2)
    with cache.step(1) as (kv,):
        view = kv.append(*tokens_of(layout, 3, 1))
    q, indices = torch.randn(3, 1, H, 16), lists(3, 1, 2, 3, 5)
    both = (CAUSAL & selected(indices, 4), as_tensor(indices, 4, H, 18))
    ours, theirs = (cached_attention_with_lse(q, view, mask=x) for x in both)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)


def test_batch_invariant_caches_are_refused():
    layout = layout_of("grouped", "as computed")
    cache = KVCache.paged(
        [layout], pages=8, page_size=4, max_sequences=1, batch_invariant=True, max_length=32
    )
    cache.admit()
    with cache.step(2) as (kv,):
        view = kv.append(*tokens_of(layout, 1, 2))
        message = (
            r"^mask: expected no masks\.selected\(\) over a batch-invariant cache.*batch_invariant=False"
        )
        with pytest.raises(NotImplementedError, match=message):
            cached_attention_with_lse(torch.randn(1, 2, H, 16), view, mask=selected(lists(1, 2, 1, 2, 1)))


def grouped(**options) -> GroupedQueryAttention:
    torch.manual_seed(0)
    return GroupedQueryAttention(
        32, H, num_kv_heads=2, head_dim=16, rope=Rope(16), **{"mask": CAUSAL} | options
    )


def latent(**options) -> MultiHeadLatentAttention:
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    options = {"mask": CAUSAL, "rope": Rope(8, interleaved=True), "q_lora_rank": None} | options
    return MultiHeadLatentAttention(32, H, **sizes, **options)


LAYERS = {"gqa": (grouped, 2), "mla": (latent, 1), "mla, expanded": (lambda: latent(form="expanded"), H)}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_lists_with_each_call(name):
    make, c = LAYERS[name]
    layer, x = make(), torch.randn(2, 23, 32)
    indices = lists(2, 23, c, 5, 6)
    ours, theirs = (layer(x, mask=mask) for mask in (selected(indices, 4), as_tensor(indices, 4, H, 23)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_decoding_computes_what_one_call_does(name, packed):
    """In steps of which some are long enough for MLA's expanded form."""
    make, c = LAYERS[name]
    layer, x, indices = make(), torch.randn(1, 600, 32), lists(1, 600, c, 40, 155)
    cache = KVCache.paged([layer.kv_layout], pages=160, page_size=4, max_sequences=1)
    (handle,) = cache.admit()
    outs, splits = [], (3, 400, 1, 196)
    with torch.no_grad():
        expected = layer(x, mask=selected(indices, 4))
        for part, own in zip(x.split(splits, 1), indices.split(splits, 1), strict=True):
            part, own = (part[0], own[0]) if packed else (part, own)
            with cache.step({handle: part.shape[-2]} if packed else part.shape[-2]) as (kv,):
                outs.append(layer(part, kv=kv, mask=selected(own, 4)))
    torch.testing.assert_close(torch.cat(outs, -2).view(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_whose_latents_must_be_expanded_refuses_a_cache():
    layer = latent(form="expanded")
    cache = KVCache.paged([layer.kv_layout], pages=8, page_size=4, max_sequences=1)
    cache.admit()
    with torch.no_grad(), cache.step(2) as (kv,):
        layer(torch.randn(1, 2, 32), kv=kv)
    message = r"^mask: expected no masks\.selected\(\) in the expanded form over a cache; use form='auto'"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=message), cache.step(1) as (kv,):
        layer(torch.randn(1, 1, 32), kv=kv, mask=selected(lists(1, 1, 1, 2, 1)))


@pytest.mark.parametrize("make", [grouped, latent])
def test_a_layers_own_mask_has_no_lists(make):
    message = r"^mask: expected no masks\.selected\(\) in the constructor of a layer; .* as mask="
    with pytest.raises(NotImplementedError, match=message):
        make(mask=CAUSAL & selected(lists(1, 4, 1, 2, 2)))


def test_ranks_take_the_lists_of_their_heads():
    """Of 8 query heads and 4 KV heads on 4 ranks, or of 2 KV heads that two ranks share each."""
    third = Share(4, 2, 8, None, (True,))
    indices = lists(1, 5, 8, 3, 4)
    for kv_heads, c, wanted in (
        (4, 1, slice(None)),
        (4, 4, slice(2, 3)),
        (2, 2, slice(1, 2)),
        (4, 8, slice(4, 6)),
    ):
        found = third.local_mask(CAUSAL & selected(indices[:, :, :c], 2), kv_heads)
        assert torch.equal(found.selection.indices, indices[:, :, :c][:, :, wanted])
        assert found.band == CAUSAL
    assert third.local_mask(CAUSAL, 4) is CAUSAL
    with pytest.raises(ValueError, match=r"^indices: expected 1, 4 or 8 lists, those of .* all ranks, got 3"):
        third.local_mask(selected(indices[:, :, :3], 2), 4)


def test_context_parallelism_is_refused(tmp_path):
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, mask = torch.randn(1, 4, H, 16), CAUSAL & selected(lists(1, 4, 1, 2, 2))
        layer = grouped(context_parallel=ContextParallel(mesh))
        message = r"^mask: expected no masks\.selected\(\) with context parallelism; gather the sequence"
        for run in (
            lambda: context_attention(q, q, q, mask=mask, mesh=mesh),
            lambda: layer(torch.randn(1, 4, 32), mask=mask),
        ):
            with pytest.raises(NotImplementedError, match=message):
                run()
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_calls_take_other_lists():
    q, k = torch.randn(1, 9, H, 16), torch.randn(1, 9, 2, 16)
    hidden = torch.tensor([3])

    def run(q, k, indices):
        odd = mask_mod(lambda b, h, i, j, hidden: j != hidden[b], hidden)
        return attention(q, k, k, mask=CAUSAL & selected(indices, 2) & odd)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        indices = lists(1, 9, 2, 3, 5, seed=seed)
        torch.testing.assert_close(compiled(q, k, indices), run(q, k, indices))


def test_gradients_can_be_checkpointed():
    q, k = (torch.randn(1, 9, h, 16, requires_grad=True) for h in (H, 2))
    mask = CAUSAL & selected(lists(1, 9, 1, 3, 5), 2)
    run = lambda q, k: attention(q, k, k, mask=mask)  # noqa: E731
    ours = torch.utils.checkpoint.checkpoint(run, q, k, use_reentrant=False)
    for x, y in zip(*(torch.autograd.grad(z.square().sum(), (q, k)) for z in (ours, run(q, k))), strict=True):
        assert torch.equal(x, y)
