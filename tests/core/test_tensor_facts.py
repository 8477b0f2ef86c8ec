"""What copies and what does not, by storage identity: torch's own operations, then what the library
claims.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnlib import (
    CAUSAL,
    FULL,
    GroupedQueryAttention,
    KVCache,
    KVLayout,
    MultiHeadLatentAttention,
    Rope,
    attention,
    cached_attention,
    sliding,
)
from attnlib.backends._torch import implementations
from attnlib.layers import attending


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


# Torch: x is [2, 3, 4], contiguous; y is its transpose [2, 4, 3].

VIEWS = {
    "view": (lambda x, y: x.view(6, 4), (4, 1)),
    "reshape": (lambda x, y: x.reshape(2, 12), (12, 1)),
    "flatten": (lambda x, y: x.flatten(), (1,)),
    "unflatten": (lambda x, y: x.unflatten(-1, (2, 2)), (12, 4, 2, 1)),
    "transpose": (lambda x, y: x.transpose(1, 2), (12, 1, 4)),
    "permute": (lambda x, y: x.permute(2, 0, 1), (1, 12, 4)),
    "expand": (lambda x, y: x[:, :1].expand(2, 5, 4), (12, 0, 1)),
    "unsqueeze": (lambda x, y: x.unsqueeze(0), (24, 12, 4, 1)),
    "squeeze": (lambda x, y: x[:1].squeeze(0), (4, 1)),
    "select": (lambda x, y: x.select(1, 2), (12, 1)),
    "narrow": (lambda x, y: x.narrow(1, 1, 2), (12, 4, 1)),
    "slice": (lambda x, y: x[:, :, ::2], (12, 4, 2)),
    "split": (lambda x, y: x.split((1, 3), -1)[1], (12, 4, 1)),
    "chunk": (lambda x, y: x.chunk(2, -1)[1], (12, 4, 1)),
    "unbind": (lambda x, y: x.unbind(0)[1], (4, 1)),
    "diagonal": (lambda x, y: x.diagonal(0, 1, 2), (12, 5)),
    "unfold": (lambda x, y: x.unfold(-1, 2, 1), (12, 4, 1, 1)),
    "contiguous, of what is": (lambda x, y: x.contiguous(), (12, 4, 1)),
    "to, of the same dtype": (lambda x, y: x.to(torch.float32), (12, 4, 1)),
    "flatten, of dimensions that lie together": (lambda x, y: y.transpose(1, 2).flatten(), (1,)),
    "reshape, splitting a transposed dimension": (lambda x, y: y.reshape(2, 2, 2, 3), (12, 2, 1, 4)),
    "detach": (lambda x, y: x.detach(), (12, 4, 1)),
    "view of another dtype": (lambda x, y: x.view(torch.int32), (12, 4, 1)),
    "as_strided": (lambda x, y: x.as_strided((3, 4), (2, 1)), (2, 1)),
}
COPIES = {
    "reshape, joining transposed dimensions": lambda x, y: y.reshape(2, 12),
    "flatten, of transposed dimensions": lambda x, y: y.flatten(1),
    "contiguous, of what is not": lambda x, y: y.contiguous(),
    "reshape, of an expanded dimension": lambda x, y: x[:, :1].expand(2, 5, 4).reshape(10, 4),
    "cat": lambda x, y: torch.cat((x, x)),
    "cat, of one": lambda x, y: torch.cat((x,)),
    "stack": lambda x, y: torch.stack((x, x)),
    "repeat": lambda x, y: x.repeat(1, 1, 1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(1, 0),
    "an index tensor": lambda x, y: x[torch.tensor([0, 1])],
    "a mask": lambda x, y: x[torch.ones(2, dtype=torch.bool)],
    "to, of another dtype": lambda x, y: x.to(torch.float64),
    "clone": lambda x, y: x.clone(),
    "flip": lambda x, y: x.flip(0),
    "roll": lambda x, y: x.roll(0),
    "einsum, of a product": lambda x, y: torch.einsum("abc,abc->abc", x, torch.ones_like(x)),
    "masked_fill": lambda x, y: x.masked_fill(torch.zeros(2, 3, 4, dtype=torch.bool), 0),
    "where": lambda x, y: torch.where(torch.ones(2, 3, 4, dtype=torch.bool), x, x),
}


@pytest.fixture
def xy():
    x = torch.arange(24.0).view(2, 3, 4)
    return x, x.transpose(1, 2)


@pytest.mark.parametrize("name", VIEWS)
def test_what_shares_memory(xy, name):
    make, strides = VIEWS[name]
    made = make(*xy)
    assert storage(made) == storage(xy[0])
    assert made.stride() == strides
    dense, expected = 1, []
    for size in reversed(made.shape):
        expected.insert(0, dense)
        dense *= size
    assert made.is_contiguous() == all(
        a == b for a, b, size in zip(made.stride(), expected, made.shape, strict=True) if size > 1
    )


@pytest.mark.parametrize("name", COPIES)
def test_what_copies(xy, name):
    made = COPIES[name](*xy)
    assert storage(made) != storage(xy[0])


def test_view_refuses_where_reshape_would_copy(xy):
    x, y = xy
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        y.view(2, 12)
    assert torch.equal(torch.einsum("abc->acb", x), y)
    assert storage(torch.einsum("abc->acb", x)) == storage(x)  # a mere permutation is a view


def test_there_are_no_negative_strides():
    """A reversed array cannot be wrapped; flip copies. So no kernel has to expect one."""
    with pytest.raises(ValueError, match=r"stride.* is negative"):
        torch.from_numpy(np.arange(4.0)[::-1])
    with pytest.raises(RuntimeError, match=r"[Nn]egative"):
        torch.zeros(4).as_strided((4,), (-1,), 3)


# The library


# What our operators run, which a dispatch mode would see as one call each.
INSIDE = {
    torch.ops.attnlib.torch_forward.default: implementations._forward,
    torch.ops.attnlib.torch_cached.default: implementations.cached,
}


class Copies(TorchDispatchMode):
    """Counts the numbers in everything made in memory of its own from given storages, by the operation that
    made it.
    """

    def __init__(self, *sources: torch.Tensor):
        super().__init__()
        self.sources = {storage(x) for x in sources}
        self.made: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in INSIDE:
            with self:
                return INSIDE[func](*args)
        out = func(*args, **(kwargs or {}))
        read = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and read & self.sources and storage(x) not in read:
                self.made[func.name()] = max(self.made.get(func.name(), 0), x.numel())
        return out


REARRANGING = ("clone", "copy", "repeat", "index", "cat", "contiguous", "stack", "reshape")


@pytest.mark.parametrize("mask", [CAUSAL, FULL, sliding(9)])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "tiles"])
@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("b", [1, 2])
def test_grouped_heads_read_k_and_v_where_they_lie(b, heads, softcap, mask):
    """K and V are made again neither whole nor repeated: for several sequences BLAS packs one tile of 512
    keys.
    """
    q, k, v = torch.randn(b, 3, heads, 16), torch.randn(b, 1300, 2, 16), torch.randn(b, 1300, 2, 16)
    with Copies(k, v) as seen:
        attention(q, k, v, mask=mask, softcap=softcap)
    assert seen.made  # products, at least
    copied = [n for name, n in seen.made.items() if any(word in name for word in REARRANGING)]
    assert max(copied, default=0) <= (b > 1) * b * 512 * 2 * 16


def test_layers_split_heads_without_a_copy():
    layer = GroupedQueryAttention(48, 6, num_kv_heads=2, mask=CAUSAL)
    projected, attended = [], []
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(lambda module, args, out: projected.append(out))
    run = attending.attend

    def spy(call, *args):
        attended.extend((call.q, call.k, call.v))
        return run(call, *args)

    with mock.patch.object(attending, "attend", spy):
        layer(torch.randn(2, 5, 48))
    assert [storage(x) for x in attended] == [storage(x) for x in projected]
    assert [tuple(x.shape) for x in attended] == [(2, 5, 6, 8), (2, 5, 2, 8), (2, 5, 2, 8)]


def latent_layer():
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return MultiHeadLatentAttention(24, 4, mask=CAUSAL, q_lora_rank=None, rope=Rope(4), **sizes)


def test_up_projections_are_views_of_the_weight():
    layer = latent_layer()
    for x, shape in zip(layer._up_projections(), ((4, 6, 8), (4, 5, 8)), strict=True):
        assert storage(x) == storage(layer.kv_b_proj.weight)
        assert tuple(x.shape) == shape


@pytest.mark.parametrize("layout", [KVLayout.grouped(2, 8), KVLayout.latent(8, 4)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_view_is_the_cache_and_an_append_writes_into_it(layout, paged):
    if paged:
        cache = KVCache.paged([layout], pages=8, page_size=4, max_sequences=2)
    else:
        cache = KVCache.contiguous([layout], max_sequences=2, max_length=16)
    cache.admit(2)
    (layer,) = cache._layers
    addresses = {name: plane.data_ptr() for name, plane in layer.planes.items()}
    lead = (8,) if layout.is_latent else (2, 8)
    second = (4,) if layout.is_latent else (2, 8)
    for tokens in (5, 1):
        k, v = torch.randn(2, tokens, *lead), torch.randn(2, tokens, *second)
        with cache.step(tokens) as (kv,):
            view = kv.append(k, v)
            assert view.k.data_ptr() == addresses["k"]
            assert view.v.data_ptr() == addresses["k" if layout.is_latent else "v"]
            assert not layout.is_latent or view.k_rope.data_ptr() == addresses["k_rope"]
            assert storage(view.table) == storage(cache._buffers.windows[0].table)
            last = int(view.lengths[1]) - 1
            page, offset = int(view.table[1, last // view.page_size]), last % view.page_size
            assert torch.equal(layer.planes["k"][page, offset].flatten(), k[1, -1].flatten())


def test_a_contiguous_row_is_read_in_place():
    cache = KVCache.contiguous([KVLayout.grouped(2, 16)], max_sequences=2, max_length=640)
    cache.admit(2)
    with cache.step(600) as (kv,):
        view = kv.append(torch.randn(2, 600, 2, 16), torch.randn(2, 600, 2, 16))
    with Copies(view.k, view.v) as seen:
        cached_attention(torch.randn(2, 1, 8, 16), view, mask=CAUSAL)
    assert seen.made
    assert max(seen.made.values()) < 2 * 600 * 2 * 16
