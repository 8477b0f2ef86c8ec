"""What a layer refuses, by which exception and with which words."""

from dataclasses import replace

import pytest
import torch
from layer_helpers import (
    BOTH,
    HIDDEN,
    SIZES,
    Stack,
    cache_for,
    close,
    feed_dense,
    grouped,
    latent,
    make,
    tokens,
)
from torch.utils.checkpoint import checkpoint

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    Mask,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    MultiQueryAttention,
    Rope,
)
from attnlib.masks.ready_made import documents
from attnlib.packing import from_position_ids
from attnlib.rope.rope import DynamicNTKScaling

PACKED = torch.tensor([0, 2, 5], dtype=torch.int32)


# Construction


class Odd(Mask):
    """A mask that kernels do not know."""

    def visible(self, i, j):
        return (i + j) % 2 == 1


CONSTRUCTION = {
    "heads do not divide": (
        GroupedQueryAttention,
        {"num_heads": 5},
        ValueError,
        r"num_heads: .*24, got 5; .*head_dim",
    ),
    "no heads": (GroupedQueryAttention, {"num_heads": 0}, ValueError, "^num_heads: .*1, got 0"),
    "kv heads do not divide": (
        GroupedQueryAttention,
        {"num_kv_heads": 3},
        ValueError,
        "num_kv_heads: .*4, got 3",
    ),
    "more kv heads": (GroupedQueryAttention, {"num_kv_heads": 8}, ValueError, "num_kv_heads: .*4, got 8"),
    "no kv heads": (GroupedQueryAttention, {"num_kv_heads": 0}, ValueError, "num_kv_heads: .*1, got 0"),
    "empty heads": (GroupedQueryAttention, {"head_dim": 0}, ValueError, "head_dim: .*1, got 0"),
    "mask by name": (GroupedQueryAttention, {"mask": "causal"}, TypeError, "mask: .*CAUSAL.* got str"),
    "rope by theta": (
        GroupedQueryAttention,
        {"rope": 10_000.0},
        TypeError,
        r"rope: .*Rope\(64, theta.* got float",
    ),
    "wide rope": (GroupedQueryAttention, {"rope": Rope(8)}, ValueError, "rope: .*head_dim=6, got 8"),
    "unknown argument": (GroupedQueryAttention, {"window": 3}, TypeError, "window"),
    "mha in groups": (
        MultiHeadAttention,
        {"num_kv_heads": 2},
        ValueError,
        "num_kv_heads: .*4, got 2; .*GroupedQuery",
    ),
    "mqa in groups": (
        MultiQueryAttention,
        {"num_kv_heads": 2},
        ValueError,
        "num_kv_heads: .*1, got 2; .*GroupedQuery",
    ),
    "q_lora_rank 0": (MultiHeadLatentAttention, {"q_lora_rank": 0}, ValueError, "q_lora_rank: .*1, got 0"),
    "no rank": (MultiHeadLatentAttention, {"kv_lora_rank": 0}, ValueError, "kv_lora_rank: .*1, got 0"),
    "no values": (MultiHeadLatentAttention, {"v_head_dim": 0}, ValueError, "v_head_dim: .*1, got 0"),
    "no latent heads": (MultiHeadLatentAttention, {"num_heads": 0}, ValueError, "num_heads: .*1, got 0"),
    "only rope": (MultiHeadLatentAttention, {"qk_nope_head_dim": 0}, ValueError, "qk_nope_head_dim.* got 0"),
    "negative rope": (
        MultiHeadLatentAttention,
        {"qk_rope_head_dim": -2},
        ValueError,
        "qk_rope_head_dim.* got -2",
    ),
    "other rope": (MultiHeadLatentAttention, {"rope": Rope(6)}, ValueError, "rope: .*dim=4 .*got 6"),
    "rotary channels without rope": (
        MultiHeadLatentAttention,
        {},
        ValueError,
        r"rope: expected Rope\(4, interleaved=True\) for qk_rope_head_dim=4, got None; .*qk_rope_head_dim=0",
    ),
    "rope of nothing": (
        MultiHeadLatentAttention,
        {"qk_rope_head_dim": 0, "rope": Rope(4)},
        ValueError,
        "rope: .*dim=0",
    ),
    "unknown form": (MultiHeadLatentAttention, {"form": "fast"}, ValueError, "form: .*absorbed.*got 'fast'"),
    "latent mask by name": (MultiHeadLatentAttention, {"mask": True}, TypeError, "mask: .*got bool"),
    "mask of one's own": (GroupedQueryAttention, {"mask": Odd()}, TypeError, "mask: .*CAUSAL.* got Odd"),
    "latent mask of one's own": (MultiHeadLatentAttention, {"mask": Odd()}, TypeError, "mask: .* got Odd"),
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_construction_refuses(case):
    """Faults 1, 2, 20, 21 and 22."""
    kind, options, error, words = CONSTRUCTION[case]
    sizes = SIZES if kind is MultiHeadLatentAttention else {}
    with pytest.raises(error, match=words):
        kind(HIDDEN, **({"num_heads": 4, "mask": CAUSAL} | sizes | options))


@pytest.mark.parametrize("dim", [7, 0, -2])
def test_a_rope_of_odd_width_is_refused(dim):
    with pytest.raises(ValueError, match=rf"rope.dim: .*even.* got {dim}"):
        Rope(dim)


@pytest.mark.parametrize("options", [{"head_dim": 7}, {"head_dim": 7, "v_head_dim": 3}])
def test_heads_may_have_any_width_that_is_named(options):
    layer = GroupedQueryAttention(HIDDEN, 5, **options, mask=CAUSAL)
    assert layer(tokens(1, 3, dtype=torch.float32)).shape == (1, 3, HIDDEN)


@pytest.mark.parametrize(("kind", "sizes"), [(GroupedQueryAttention, {}), (MultiHeadLatentAttention, SIZES)])
def test_the_mask_is_never_inferred(kind, sizes):
    with pytest.raises(TypeError, match="mask"):
        kind(HIDDEN, 4, **sizes)


# Calls


CALLS = {
    "wide x": (True, {"x": torch.zeros(2, 5, 7)}, ValueError, r"x: expected \[b, s, m=24\].*\(2, 5, 7\)"),
    "x of heads": (True, {"x": torch.zeros(2, 5, 4, HIDDEN)}, ValueError, "x: expected"),
    "packed alone": (True, {"x": tokens(5)}, ValueError, "x: packed .* needs cu_seqlens="),
    "dense with offsets": (True, {"cu_seqlens": PACKED}, ValueError, "cu_seqlens: expected packed x"),
    "context and rope": (True, {"context": tokens(2, 3)}, ValueError, "context: .*rope=None"),
    "wide context": (
        False,
        {"context": torch.zeros(2, 3, 7)},
        ValueError,
        r"context: expected \[b, t, m=24\]",
    ),
    "packed context": (False, {"context": tokens(3)}, ValueError, r"context: expected \[b, t, m=24\]"),
    "context and offsets": (
        False,
        {"x": tokens(5), "context": tokens(1, 3), "cu_seqlens": PACKED},
        ValueError,
        "cu_seq",
    ),
    "packed context without its offsets": (
        False,
        {"x": tokens(5), "context": tokens(3), "cu_seqlens": PACKED},
        ValueError,
        "cu_seqlens: expected packed x .*, and cu_seqlens_context=",
    ),
    "offsets of a context alone": (
        False,
        {"context": tokens(2, 3), "cu_seqlens_context": PACKED},
        ValueError,
        "cu_seqlens_context: expected cu_seqlens= with it",
    ),
    "a dense context of packed x": (
        False,
        {"x": tokens(5), "context": tokens(1, 3), "cu_seqlens": PACKED, "cu_seqlens_context": PACKED},
        ValueError,
        r"context: expected packed \[t, m=24\] like x",
    ),
    "bounds of packed sequences": (
        True,
        {"x": tokens(5), "cu_seqlens": PACKED, "key_ends": torch.ones(2).int()},
        ValueError,
        "key_ends: it bounds the keys of dense calls",
    ),
    "bounds of another batch": (True, {"key_starts": torch.zeros(3).int()}, ValueError, "key_starts: .*2"),
    "another batch": (False, {"context": tokens(3, 4)}, ValueError, "b=2"),
    "float positions": (
        True,
        {"positions": torch.zeros(2, 5)},
        TypeError,
        "positions: expected an integer tensor",
    ),
    "angles of another pairing": (
        True,
        {"angles": Rope(8, interleaved=True).angles(torch.arange(5))},
        ValueError,
        "angles: expected Angles of Rope.*got interleaved:8",
    ),
    "angles without rope": (
        False,
        {"angles": Rope(8).angles(torch.arange(5))},
        ValueError,
        "angles: .*rope=None.* got half:8; leave them out",
    ),
    "angles of another width": (
        True,
        {"angles": Rope(6).angles(torch.arange(5))},
        ValueError,
        "got half:6",
    ),
    "angles as positions": (
        True,
        {"positions": Rope(8).angles(torch.arange(5))},
        TypeError,
        "positions: expected an integer tensor, got Angles; pass them as angles=",
    ),
    "positions as angles": (
        True,
        {"angles": torch.arange(5)},
        TypeError,
        r"angles: expected Angles from rope\.angles\(positions\), got Tensor",
    ),
    "another dtype": (
        True,
        {"x": tokens(2, 5).float()},
        TypeError,
        "x: expected torch.float64 like the layer.*float32",
    ),
    "another device": (True, {"x": tokens(2, 5).to("meta")}, ValueError, "x: expected device cpu .*got meta"),
    "positions of another length": (
        True,
        {"positions": torch.arange(4)},
        ValueError,
        r"positions: expected \[b=2, s=5\] or \[s=5\], one for each token of x, got \(4,\)",
    ),
    "positions of another batch": (
        True,
        {"positions": torch.zeros(3, 5).int()},
        ValueError,
        r"\[b=2, s=5\].*\(3, 5\)",
    ),
    "one position": (True, {"positions": torch.tensor(3)}, ValueError, r"positions: expected .* got \(\)"),
    "positions that say three things of a token": (  # and which begin again, though nobody could tell
        True,
        {"positions": torch.tensor([0, 1, 2, 0, 1]).expand(3, 2, 5)},
        ValueError,
        r"positions: expected .*\[s=5\].*got \(3, 2, 5\); .*M-RoPE.*axes=",
    ),
    "64-bit offsets": (
        True,
        {"x": tokens(5), "cu_seqlens": PACKED.long()},
        TypeError,
        "cu_seqlens: .*int32",
    ),
    "offsets beyond x": (True, {"x": tokens(4), "cu_seqlens": PACKED}, ValueError, "cu_seqlens"),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("case", CALLS)
def test_calls_refuse(kind, case):
    rope, inputs, error, words = CALLS[case]
    inputs = {"x": tokens(2, 5)} | inputs
    with pytest.raises(error, match=words):
        make(kind, rope=rope)(inputs.pop("x"), **inputs)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scale": 0.0}, ValueError, "scale: .*above 0, got 0"),
        ({"softcap": -1.0}, ValueError, "softcap: .*above 0, got -1"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: .*got 1"),
        ({"backend": "fast"}, ValueError, "backend: .*'torch'.*got 'fast'"),
    ],
)
def test_options_out_of_range_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        grouped(**options)(tokens(2, 5))


@pytest.mark.parametrize("kind", BOTH)
def test_dynamic_ntk_needs_a_length_and_refuses_a_cache(kind):
    layer, x = make(kind), tokens(1, 5)
    layer.rope = Rope(layer.rope.dim, scaling=DynamicNTKScaling(2.0, 4), interleaved=layer.rope.interleaved)
    cache = cache_for(Stack(layer))
    cache.admit()
    with pytest.raises(ValueError, match=r"rope: DynamicNTKScaling .*cache"):
        feed_dense(Stack(layer), cache, x)
    for inputs in (
        {"positions": torch.arange(5)},
        {"x": x[0], "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
    ):
        with pytest.raises(ValueError, match=r"positions: .*rope.angles\(positions, length="):
            layer(**({"x": x} | inputs))
    assert torch.equal(layer(x), layer(x, angles=layer.rope.angles(torch.arange(5), length=5)))


@pytest.mark.parametrize("kind", BOTH)
def test_a_second_derivative_is_refused(kind):
    """Fault 31."""
    layer, x = make(kind), tokens(1, 3).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        grad.sum().backward()


# Caches


@pytest.fixture(params=BOTH)
def cached(request):
    layer = make(request.param)
    cache = cache_for(Stack(layer))
    cache.admit(2)
    feed_dense(Stack(layer), cache, tokens(2, 3))
    return layer, cache


def test_a_cache_excludes_other_keys(cached):
    layer, cache = cached
    with torch.no_grad(), cache.step(1) as (kv,):
        for inputs in ({"context": tokens(2, 3)}, {"cu_seqlens": PACKED}):
            with pytest.raises(ValueError, match="kv: it excludes context= and cu_seqlens="):
                layer(tokens(2, 1), kv=kv, **inputs)
        with pytest.raises(ValueError, match="key_starts: it bounds the keys of dense calls; a cache"):
            layer(tokens(2, 1), kv=kv, key_starts=torch.zeros(2).int())
        layer(tokens(2, 1), kv=kv)


def test_gradients_into_a_cache_are_refused(cached):
    """Faults 30 and 93, also under checkpointing."""
    layer, cache = cached
    for run in (layer, lambda x, kv: checkpoint(layer, x, kv=kv, use_reentrant=False)):
        with (
            pytest.raises(NotImplementedError, match=r"no backward; .*torch.no_grad\(\)"),
            cache.step(1) as (kv,),
        ):
            run(tokens(2, 1), kv=kv)
    layer.requires_grad_(False)
    with pytest.raises(NotImplementedError, match="no backward"), cache.step(1) as (kv,):
        layer(tokens(2, 1).requires_grad_(), kv=kv)
    stored = layer.k_proj if hasattr(layer, "k_proj") else layer.kv_a_proj_with_mqa
    stored.requires_grad_()  # the query asks for no gradient, and the keys must not lose theirs
    with (
        pytest.raises(NotImplementedError, match=r"(k|latent): a cache has no backward"),
        cache.step(1) as (kv,),
    ):
        layer(tokens(2, 1), kv=kv)
    stored.requires_grad_(False)
    with cache.step(1) as (kv,):
        layer(tokens(2, 1), kv=kv)  # frozen: nothing asks for a gradient


@pytest.mark.parametrize("kind", BOTH)
def test_gradients_through_a_stored_context_are_refused(kind):
    layer = make(kind, rope=False, mask=FULL)
    cache = cache_for(Stack(layer))
    cache.admit()
    with torch.no_grad(), cache.step(3) as (kv,):
        layer.append_context(tokens(1, 3), kv)
    with cache.read(1) as (kv,), pytest.raises(NotImplementedError, match="no backward"):
        layer(tokens(1, 1), context=kv.view())


def test_a_layer_cache_is_used_inside_its_step(cached):
    layer, cache = cached
    with torch.no_grad(), cache.step(1) as (kv,):
        layer(tokens(2, 1), kv=kv)
    with pytest.raises(RuntimeError, match=r"with cache.step\(...\)"), torch.no_grad():
        layer(tokens(2, 1), kv=kv)
    with (
        pytest.raises(RuntimeError, match=r"with cache.step\(...\)"),
        torch.no_grad(),
        cache.read(1) as (kv,),
    ):
        layer(tokens(2, 1), kv=kv)


HALF, INTERLEAVED = Rope(4), Rope(4, interleaved=True)


@pytest.mark.parametrize(
    ("written", "read"),
    [(INTERLEAVED, HALF), (HALF, INTERLEAVED), (HALF, Rope(8)), (HALF, None), (None, HALF)],
)
def test_one_cache_has_one_rotary_convention(written, read):
    """Fault 97; a refused step leaves no trace, and a failed one fixes no convention."""
    layer, other = (grouped(rope=False) for _ in range(2))
    layer.rope, other.rope = written, read
    cache, x = cache_for(Stack(layer)), tokens(1, 5)
    cache.admit()

    def broken(x, kv):
        other(x, kv=kv)
        raise ArithmeticError

    with pytest.raises(ArithmeticError), torch.no_grad(), cache.step(3) as (kv,):
        broken(x[:, :3], kv)
    feed_dense(Stack(layer), cache, x[:, :3])
    with pytest.raises(RuntimeError, match=r"angles: .*rotary convention"):
        feed_dense(Stack(other), cache, x[:, 3:])
    close(feed_dense(Stack(layer), cache, x[:, 3:]) - x[:, 3:], layer(x)[:, 3:].detach())


def test_a_latent_cache_written_interleaved_is_not_read_by_halves():
    layer, other = latent(), latent()
    other.rope = replace(other.rope, interleaved=False)
    cache = cache_for(Stack(layer))
    cache.admit()
    feed_dense(Stack(layer), cache, tokens(1, 3))
    with pytest.raises(RuntimeError, match=r"interleaved:4.*half:4"):
        feed_dense(Stack(other), cache, tokens(1, 1))


def test_caches_of_other_layers_are_refused(cached):
    layer, _ = cached
    x = tokens(1, 2)
    others = {
        "expected .*bf16|bfloat16": (replace(layer.kv_layout, dtype=torch.bfloat16), TypeError),
        "mask: .*window of 2": (replace(layer.kv_layout, window=2), ValueError),
        "expected": (
            make("mqa" if isinstance(layer, GroupedQueryAttention) else "mha").kv_layout,
            ValueError,
        ),
    }
    for words, (layout, error) in others.items():
        cache = KVCache.contiguous([layout], max_sequences=1, max_length=8)
        cache.admit()
        with pytest.raises(error, match=words):
            feed_dense(Stack(layer), cache, x)
        (handle,) = cache._sequences.handles
        assert cache.length(handle) == 0


def test_a_layer_that_is_cast_leaves_its_cache_behind(cached):
    """A cache has no .to(): steps in the new dtype are refused, and the old one works as before."""
    layer, cache = cached
    assert not hasattr(cache, "to")
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(
            TypeError, match=r"expected torch.float64 like the cache, got .*make the cache in"
        ):
            feed_dense(Stack(layer.to(dtype)), cache, tokens(2, 1).to(dtype))
    layer.double()
    assert feed_dense(Stack(layer), cache, tokens(2, 1)).isfinite().all()
    assert [cache.length(handle) for handle in cache._sequences.handles] == [4, 4]


@pytest.mark.parametrize("kind", BOTH)
def test_positions_that_begin_again_are_packed_or_refused(kind):
    """Or a mask tells the sequences apart, or bounds hide what comes before."""
    layer, x = make(kind), tokens(1, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"positions: they begin again .*from_position_ids"):
        layer(x, positions=positions)
    cu_seqlens, _ = from_position_ids(positions)
    packed = layer(x[0], cu_seqlens=cu_seqlens)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    close(layer(x, positions=positions, mask=documents(numbers))[0], packed)
    starts = torch.tensor([3], dtype=torch.int32)
    close(layer(x, positions=positions, key_starts=starts)[0, 3:], packed[3:])
    layer(x, positions=torch.tensor([[2, 1, 3, 3, 2, 9, 5]]))  # any others
