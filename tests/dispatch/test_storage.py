"""What a cache asks of a device: writing tokens to slots, and copying pages."""

import pytest
import torch
from helpers import assert_same_bits

from attnlib import (
    KVLayout,
    KVView,
)
from attnlib.dispatch.storage import copy_pages, write_cache
from attnlib.fp8 import E4M3


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("contiguous", [True, False])
def test_86_slot_minus_one_is_skipped(contiguous):
    pool = torch.zeros(3, 4, 2, 8)
    pool = pool if contiguous else pool.transpose(1, 2).contiguous().transpose(1, 2)
    view = KVView(KVLayout.grouped(2, 8), 4, pool, pool.clone(), ints(0)[None], ints(0), ints(0))
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    write_cache(view, k, v, torch.tensor([-1, 5, -1, 2]))
    write_cache(view, k, v, torch.full((4,), -1))
    for plane, new in ((view.k, k), (view.v, v)):
        rows = plane.flatten(0, 1)
        assert_same_bits((rows[5], new[1]), (rows[2], new[3]))
        assert (rows[[0, 1, 3, 4, *range(6, 12)]] == 0).all()


@pytest.mark.parametrize("index", [{}, {"index_dim": 3, "index_heads": 2, "index_dtype": E4M3}])
@pytest.mark.parametrize("store", [None, torch.int8])
@pytest.mark.parametrize("latent", [False, True])
def test_copied_pages_are_whole(latent, store, index):
    """Every plane and scale, bit for bit, and no other page."""
    layout = (
        KVLayout.latent(8, 4, storage_dtype=store, **index)
        if latent
        else KVLayout.grouped(2, 8, 5, storage_dtype=store, **index)
    )
    planes = {
        name: torch.randint(-99, 99, (6, 4, heads, *((width,) if width else ()))).to(dtype)
        for name, (heads, width, dtype) in layout.planes.items()
    }
    before = {name: plane.clone() for name, plane in planes.items()}
    shared = {"v": planes["k"], "v_scale": planes.get("k_scale")} if latent else {}
    view = KVView(layout, 4, **planes | shared, table=ints(0)[None], starts=ints(0), lengths=ints(0))
    copy_pages(view, [(1, 4), (1, 0), (5, 2)])
    for name, plane in planes.items():
        assert torch.equal(plane.float(), before[name].float()[[1, 1, 5, 3, 1, 5]]), name
