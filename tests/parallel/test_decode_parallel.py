"""A cache that ranks share gives every rank what one process has of an ordinary cache, on CPUs with gloo."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing as mp
from leaving import leave
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from attnlib import (
    CAUSAL,
    FULL,
    Axes,
    Gate,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    KVView,
    LayerCache,
    Mask,
    MultiHeadLatentAttention,
    Rope,
    cached_attention,
    cached_attention_with_lse,
    explain,
    sliding,
)

LAYOUTS = (
    KVLayout.grouped(2, 8, 4),
    KVLayout.latent(8, 4),
    KVLayout.grouped(1, 8, window=6),
    KVLayout.grouped(1, 8, storage_dtype=torch.int8),
    KVLayout.latent(8, 4, storage_dtype=torch.int8),
)
MASKS = (CAUSAL, FULL, Mask(right=0, prefix=9), Mask(right=1))
GROUP = 2  # query heads of a rank for each KV head
PADDING = 12
SIZES = {"pages": 40, "page_size": 4, "max_sequences": 6, "rollback": 4}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Pair:
    """A cache that ranks share beside one that every rank has whole, and the same done to both."""

    def __init__(self, mesh: DeviceMesh, seed: int):
        self.ranks, self.rank, self.draw = mesh.size(), mesh.get_local_rank(), random.Random(seed)
        pages = {None: SIZES["pages"], 6: SIZES["pages"] * self.ranks}
        self.shared = KVCache.paged(LAYOUTS, **SIZES | {"pages": pages}, mesh=mesh)
        whole = SIZES | {"pages": SIZES["pages"] * self.ranks, "max_length": SIZES["pages"] * 4 * self.ranks}
        self.whole = KVCache.paged(LAYOUTS, **whole)
        self.caches, self.live = (self.shared, self.whole), []

    def admit(self) -> None:
        padding = self.draw.choice([None, [self.draw.randrange(PADDING)]])
        self.live.append([cache.admit(left_padding=padding)[0] for cache in self.caches])

    def fork(self) -> None:
        of = self.draw.choice(self.live)
        self.live.append([cache.fork(handle)[0] for cache, handle in zip(self.caches, of, strict=True)])

    def release(self) -> None:
        handles = self.live.pop(self.draw.randrange(len(self.live)))
        for cache, handle in zip(self.caches, handles, strict=True):
            cache.release(handle)

    def truncate(self) -> None:
        ours, theirs = self.draw.choice(self.live)
        length = max(0, self.whole.length(theirs) - self.draw.randrange(4))
        self.shared.truncate(ours, length)
        self.whole.truncate(theirs, length)

    def dense(self) -> None:
        self.step(self.draw.choice([1, 1, 1, 2, 5, 21]))

    def packed(self) -> None:
        """Prompts, drafts and single tokens beside each other; those that are still padding get none."""
        counts = [
            self.draw.choice([0, 1, 1, 3, 7, 30]) if self.whole.length(x[1]) >= PADDING else 0
            for x in self.live
        ]
        self.step(counts)

    def failed(self) -> None:
        """A step that raises after its layers have appended."""
        for cache in self.caches:
            with pytest.raises(KeyError):
                fail(cache)

    def step(self, tokens: int | list[int]) -> None:
        given = [tokens, tokens]
        if not isinstance(tokens, int):
            given = [{x[side]: n for x, n in zip(self.live, tokens, strict=True)} for side in range(2)]
        seed = self.draw.getrandbits(30)
        with self.shared.step(given[0]) as ours, self.whole.step(given[1]) as theirs:
            for layout, mine, other in zip(LAYOUTS, ours, theirs, strict=True):
                generator = torch.Generator().manual_seed(seed)
                kv = content(layout, other.positions.shape, generator)
                self.compare(mine.append(*kv), other.append(*kv), other.positions.shape, generator)

    def read(self) -> None:
        """Queries of another sequence, which see all that is stored."""
        with self.shared.read(2) as ours, self.whole.read(2) as theirs:
            for mine, other in zip(ours, theirs, strict=True):
                if mine.layout.window is None:
                    self.compare(mine.view(), other.view(), (len(self.live), 2), torch.Generator(), [FULL])

    def compare(self, ours, theirs, shape, generator, masks=MASKS):
        """Attention to both views, of queries that all ranks have, and of heads that each has for itself."""
        layout = theirs.layout
        heads, options = layout.heads * GROUP * self.ranks, {}
        q = torch.randn(*shape, heads, layout.dim + layout.rope_dim, generator=generator)
        mask = self.draw.choice(masks) if layout.window is None else sliding(layout.window)
        if self.draw.random() < 0.5:
            options = {"softcap": 2.0, "sinks": torch.randn(heads, generator=generator), "scale": 0.4}
        expected = cached_attention_with_lse(q, theirs, mask=mask, **options)
        found = cached_attention_with_lse(q, ours, mask=mask, **options)
        torch.testing.assert_close(found, expected, **CLOSE)
        own = torch.arange(heads).view(layout.heads, self.ranks, GROUP)[:, self.rank].flatten()
        options |= {"sinks": options["sinks"][own]} if options else {}
        if ours.route is None:
            return
        out, lse = cached_attention_with_lse(q[..., own, :], ours.with_own_heads(), mask=mask, **options)
        rows = lse.dim() - 2  # of heads
        expected = expected[0][..., own, :], expected[1].index_select(rows, own)
        torch.testing.assert_close((out, lse), expected, **CLOSE)

    def live_on(self, operations: int) -> None:
        """Random operations, each possible where it comes."""
        for _ in range(operations):
            ways = [self.dense] * 4 + [self.packed] * 4 + [self.truncate, self.read, self.failed]
            if len(self.live) < SIZES["max_sequences"]:
                ways += [self.admit, self.fork] if self.live else [self.admit]
            if len(self.live) > 2:
                ways += [self.release]
            way = self.draw.choice(ways if self.live else [self.admit])
            if max([self.whole.length(x[1]) for x in self.live], default=0) > 90:
                way = self.release
            self.attempt(way)

    def attempt(self, way) -> None:
        """One of them; a truncation that goes behind what a window keeps may be refused, which the whole
        cache is.
        """
        try:
            way()
        except RuntimeError as error:
            if "can be truncated" not in str(error) and "can be queries again" not in str(error):
                raise


def fail(cache: KVCache) -> None:
    with cache.step(3) as layers:
        for layer, layout in zip(layers, LAYOUTS, strict=True):
            layer.append(*content(layout, layer.positions.shape, torch.Generator()))
        raise KeyError


def content(layout: KVLayout, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
    """What a layer appends."""
    if layout.is_latent:
        return tuple(
            torch.randn(*shape, width, generator=generator) for width in (layout.dim, layout.rope_dim)
        )
    widths = layout.dim, layout.value_dim
    return tuple(torch.randn(*shape, layout.heads, width, generator=generator) for width in widths)


HIDDEN, HEADS = 32, 8
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
OPTIONS = {"mask": CAUSAL, "head_dim": 8, "rope": Rope(8)}
AXES = Axes((2, 2), "interleaved")
LAYERS = {
    "mqa": lambda: GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=1, qk_norm=True, **OPTIONS),
    "sinks": lambda: GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=1, sinks=True, softcap=3.0, **OPTIONS),
    "window": lambda: GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=1, **OPTIONS | {"mask": sliding(5)}),
    "mla": lambda: MultiHeadLatentAttention(HIDDEN, HEADS, mask=CAUSAL, rope=Rope(8), **LATENT),
    "axes": lambda: MultiHeadLatentAttention(HIDDEN, HEADS, mask=CAUSAL, rope=Rope(8, axes=AXES), **LATENT),
}
GROUPED = {
    "gqa": lambda: GroupedQueryAttention(HIDDEN, HEADS, num_kv_heads=2, **OPTIONS),
    "axes and gate": lambda: GroupedQueryAttention(
        HIDDEN, HEADS, num_kv_heads=2, gate=Gate("channel"), **OPTIONS | {"rope": Rope(8, axes=AXES)}
    ),
}
COLUMNS = ("q_proj", "kv_b_proj", "g_proj")  # each rank makes KV heads whole, and reads its own


def made(makers: dict) -> list[nn.Module]:
    """The same layers in every process."""
    torch.manual_seed(0)
    layers = [make() for make in makers.values()]
    for layer in layers:
        if getattr(layer, "sinks", None) is not None:
            nn.init.normal_(layer.sinks)
    return layers


def answers(layers: list[nn.Module], cache: KVCache, heads_of: DeviceMesh | None) -> Iterator[Tensor]:
    """What layers say of prompts of several lengths, drafts and single tokens, forks and sequences that come
    anew.

    Outputs before ``o_proj`` are of this rank's heads, which it multiplies by its columns; the sum is of all
    ranks.
    """
    draw = torch.Generator().manual_seed(3)

    def say(tokens: int | dict) -> Iterator[Tensor]:
        with cache.step(tokens) as kv:
            x = torch.randn(*kv[0].positions.shape, HIDDEN, generator=draw)
            for layer, layer_cache in zip(layers, kv, strict=True):
                yield whole(layer(x, kv=layer_cache, **places(layer, kv[0].positions)), heads_of)

    a, b = cache.admit(2)
    yield from say({a: 23, b: 9})
    yield from say(1)
    (c,) = cache.fork(a)
    yield from say(1)
    yield from say({b: 18, a: 1, c: 3})
    yield from say(4)
    cache.truncate(a, cache.length(a) - 3)
    cache.release(b)
    cache.admit(left_padding=[3])
    yield from say(19)
    yield from say(2)
    yield from say(1)


def places(layer: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """The positions that a layer needs, because its rope has axes; a second one that runs half as fast."""
    return {} if layer.rope.axes is None else {"positions": torch.stack((positions, positions // 2))}


def whole(x: Tensor, heads_of: DeviceMesh | None) -> Tensor:
    """x of all ranks, where the heads of each gave a part."""
    if heads_of is None:
        return x
    parts = torch.empty(heads_of.size(), *x.shape)
    torch.distributed.all_gather(list(parts), x.contiguous(), group=heads_of.get_group())
    return parts.sum(0)


class OwnColumns(nn.Module):
    """An ``o_proj`` that multiplies this rank's heads by its own columns of the weight."""

    def __init__(self, weight: Tensor, mesh: DeviceMesh):
        super().__init__()
        self.part = weight.chunk(mesh.size(), 1)[mesh.get_local_rank()]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.part.T


def compare_layers(makers: dict, mesh: DeviceMesh, heads_of: DeviceMesh | None) -> None:
    """Layers over a cache that the ranks of ``mesh`` share; ``heads_of`` share out their heads."""
    truth, layers = made(makers), made(makers)
    sizes = {"page_size": 4, "max_sequences": 3, "max_length": 128, "rollback": 4}
    layouts = [layer.kv_layout for layer in truth]
    pages = KVCache.pages_for(layouts, [128] * 3, page_size=4)
    expected = answers(truth, KVCache.paged(layouts, pages=pages, **sizes), None)
    if heads_of is not None:
        for layer in layers:
            plan = {name: ColwiseParallel() for name in COLUMNS if hasattr(layer, name)}
            parallelize_module(layer, heads_of, plan)
            layer.o_proj = OwnColumns(layer.o_proj.weight, heads_of)
    layouts = [layer.kv_layout for layer in layers]
    pages = KVCache.pages_for(layouts, [128] * 3, page_size=4, ranks=mesh.size())
    found = answers(layers, KVCache.paged(layouts, pages=pages, mesh=mesh, **sizes), heads_of)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def refuse(mesh: DeviceMesh) -> None:
    """Heads of other KV heads than those of the ranks that share a cache, and heads of which nobody knows."""
    sizes = {"pages": 9, "page_size": 4, "max_sequences": 1, "mesh": mesh}
    (layer,) = made({"by hand": LAYERS["mqa"]})
    layer.q_proj = nn.Linear(HIDDEN, 16)
    cache = KVCache.paged([layer.kv_layout], **sizes)
    cache.admit()
    with (
        pytest.raises(ValueError, match="q_proj: expected all 8 heads, or heads sharded"),
        cache.step(1) as (kv,),
    ):
        layer(torch.zeros(1, 1, HIDDEN), kv=kv)
    layer = parallelize_module(made(GROUPED)[0], mesh, {"q_proj": ColwiseParallel()})
    cache = KVCache.paged([layer.kv_layout], **sizes)
    cache.admit()
    with (
        pytest.raises(ValueError, match=r"mesh: expected a cache .*read the same KV head"),
        cache.step(1) as (kv,),
    ):
        layer(torch.zeros(1, 1, HIDDEN), kv=kv)


def store_parts(mesh: DeviceMesh) -> None:
    """A rank has as many tokens as any other, give or take one, in as many bytes of those of all."""
    layouts, sizes = [KVLayout.grouped(1, 8), KVLayout.latent(8, 4)], {"page_size": 4, "max_sequences": 2}
    ranks, lengths = mesh.size(), [61, 23]
    pages = [KVCache.pages_for(layouts, [128, 64], page_size=4, ranks=n) for n in (1, ranks)]
    whole, cache = (
        KVCache.paged(layouts, pages=pages[0], **sizes),
        KVCache.paged(layouts, pages=pages[1], mesh=mesh, **sizes),
    )
    assert cache.nbytes * ranks == whole.nbytes
    a, b = cache.admit(2)
    with cache.step(dict(zip((a, b), lengths, strict=True))) as layers:
        views = [
            layer.append(*content(layer.layout, layer.positions.shape, torch.Generator())) for layer in layers
        ]
    assert cache.used_bytes == sum(-(-n // (4 * ranks)) * 4 * x.token_bytes for n in lengths for x in layouts)
    with cache.read(1) as layers:
        held = [layer.view().route.shard.stored.lengths.tolist() for layer in layers]
    assert held == [[len(range(mesh.get_local_rank(), n, ranks)) for n in lengths]] * 2
    assert all(view.lengths.tolist() == lengths for view in views)


def work(rank: int, ranks: int, file: str, seeds: int, operations: int) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    compare_layers(LAYERS | GROUPED, mesh, None)
    compare_layers(LAYERS, mesh, mesh)
    refuse(mesh)
    store_parts(mesh)
    if ranks == 4:  # two ranks for each of two KV heads; and a cache across the ranks of heads
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "near"))
        compare_layers(LAYERS | GROUPED, grid["near"], mesh)
        compare_layers(LAYERS | GROUPED, grid["across"], grid["near"])
    for seed in range(seeds):
        Pair(mesh, seed).live_on(operations)
    leave()


@pytest.mark.parametrize(
    ("ranks", "seeds", "operations"), [(2, 2, 40), pytest.param(4, 6, 80, marks=pytest.mark.slow)]
)
def test_ranks_attend_as_to_a_cache_of_their_own(ranks, seeds, operations, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNLIB_CHECK", "1")  # free pages are NaN
    mp.spawn(work, (ranks, str(tmp_path / "store"), seeds, operations), nprocs=ranks)


@pytest.fixture
def mesh(tmp_path) -> Iterator[DeviceMesh]:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    leave()


PLAIN = KVLayout.grouped(1, 8)


def cache_of(mesh: DeviceMesh, *layouts: KVLayout, **options) -> KVCache:
    return KVCache.paged(
        layouts or [PLAIN], **{"pages": 8, "page_size": 4, "max_sequences": 3, "mesh": mesh} | options
    )


def appended(layer: LayerCache) -> KVView:
    x = torch.randn(*layer.positions.shape, 1, 8)
    return layer.append(x, x)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_invariant": True}, "mesh: expected no batch_invariant with it, got True"),
        ({"shared_prefixes": 2}, "mesh: expected no shared_prefixes with it, got 2"),
        ({"layouts": [KVLayout.grouped(1, 8, window=4)]}, "mesh: expected a layout without a window"),
    ],
)
def test_caches_that_ranks_cannot_share(mesh, options, why):
    with pytest.raises(ValueError, match=why):
        cache_of(mesh, *options.pop("layouts", ()), **options)


def test_index_keys_are_whole_on_every_rank(mesh):
    """So layers with a window may have them, and no others."""
    indexed, windowed = KVLayout.grouped(1, 8, index_dim=4), KVLayout.grouped(1, 8, window=4, index_dim=4)
    with pytest.raises(
        NotImplementedError,
        match=r"mesh: expected layouts without index keys, .* got index_dim=4 in layouts\[1\]",
    ):
        cache_of(mesh, PLAIN, indexed)
    cache = cache_of(mesh, PLAIN, windowed)
    cache.admit()
    x, index = torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 4)
    with cache.step(3) as layers:
        layers[0].append(x, x)
        assert torch.equal(layers[1].append(x, x, index=index).index_keys(3), index)


def test_what_is_no_mesh_of_one_dimension(mesh):
    with pytest.raises(ValueError, match=r"mesh: expected one dimension, as of mesh\['tp'\], got 2"):
        cache_of(init_device_mesh("cpu", (1, 1)))
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh, as init_device_mesh"):
        cache_of((1,))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": sliding(3)},
        {"mask": CAUSAL.shift(-1)},
        {"mask": CAUSAL, "alibi_slopes": torch.ones(2)},
        {"mask": CAUSAL & Mask(left=5).as_function()},
    ],
)
def test_masks_and_scores_that_do_not_see_all_before(mesh, options):
    cache = cache_of(mesh)
    cache.admit()
    q = torch.zeros(1, 1, 2, 8)
    with cache.step(1) as (layer,):
        view = appended(layer)
        with pytest.raises(
            NotImplementedError, match="kv: over a cache that ranks share every query sees all keys"
        ):
            cached_attention(q, view, **options)
        with pytest.raises(ValueError, match=r"sinks: expected \[h=2\] like q, got \(3,\)"):
            cached_attention(q, view, mask=CAUSAL, sinks=torch.zeros(3))
        with pytest.raises(ValueError, match="q: expected a multiple of the cache's g=1"):
            cached_attention(q[:, :, :0], view, mask=CAUSAL)
        with pytest.raises(NotImplementedError, match="no backward"):
            cached_attention(q.clone().requires_grad_(), view, mask=CAUSAL)


def test_a_view_has_to_say_what_this_rank_has(mesh):
    cache, q = cache_of(mesh), torch.zeros(1, 2, 2, 8)
    cache.admit()
    with cache.step(2) as (layer,):
        with pytest.raises(RuntimeError, match=r"kv: expected the view that append\(\) returned"):
            cached_attention(q, layer._view, mask=CAUSAL)
        assert str(explain(cached_attention, q, appended(layer), mask=CAUSAL)).startswith("dense attention")
    with cache.step(2) as (layer,):
        told = str(explain(cached_attention, q, appended(layer), mask=CAUSAL))
        assert told.startswith("cached attention")
        assert f"shared: over {mesh.size()} ranks, by collectives" in told
    with (
        cache.read(2) as (layer,),
        pytest.raises(ValueError, match="mask: expected FULL for several queries of a read"),
    ):
        cached_attention(q, layer.view(), mask=CAUSAL)


def test_the_expanded_form_needs_all_latents(mesh):
    layer = MultiHeadLatentAttention(HIDDEN, HEADS, mask=CAUSAL, form="expanded", rope=Rope(8), **LATENT)
    cache = cache_of(mesh, layer.kv_layout)
    cache.admit()
    why = "kv_b_proj: expected the absorbed form"
    with torch.no_grad(), pytest.raises(NotImplementedError, match=why), cache.step(1) as (kv,):
        layer(torch.zeros(1, 1, HIDDEN), kv=kv)


def test_a_sequence_is_neither_saved_nor_loaded(mesh, tmp_path):
    cache = cache_of(mesh)
    (handle,) = cache.admit()
    for act in (lambda: cache.save(handle, tmp_path / "x"), lambda: cache.load(tmp_path / "x")):
        with pytest.raises(NotImplementedError, match="expected a cache that has every token of a sequence"):
            act()


def test_a_replay_that_a_graph_of_single_tokens_would_get_wrong(mesh):
    cache = cache_of(mesh)
    a, b, c = cache.admit(3)
    why = r"replay: .* at most one of each, got \[2, 0, 1\]; leave"
    with pytest.raises(RuntimeError, match=why), cache.step({a: 2, b: 0, c: 1}, replay=True):
        pass
    for tokens in ({a: 1, b: 0, c: 1}, {a: 2, b: 2}, 3):
        with cache.step(tokens, replay=True):
            pass


def test_a_rank_stores_its_part_and_windows_are_whole():
    layouts = [KVLayout.grouped(1, 8), KVLayout.grouped(1, 8, window=6)]
    assert KVCache.pages_for(layouts, [100, 50], page_size=16, max_step_tokens=16, ranks=4) == {None: 3, 6: 6}
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        KVCache.pages_for(layouts, [100], ranks=0)
