"""Query heads over a cache that ranks share: the same on all ranks, or their own of one KV head."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.layers.sharded_cache import with_heads
from attnlib.layers.tensor_parallel import ALL_HEADS, Share

HEADS = 8


class View(SimpleNamespace):
    """The part of a view that ranks share which decides about heads."""

    def with_own_heads(self) -> str:
        return "own heads"


class Mesh:
    def __init__(self, *ranks: int):
        self.mesh = torch.tensor(ranks)

    def size(self, dim: int) -> int:
        return self.mesh.shape[dim]


TENSOR_PARALLEL = Mesh(0, 1, 2, 3)  # two of the eight heads each


def heads_over(*ranks: int, kv_heads: int, heads: int = 2, share: bool = True) -> str:
    """Whose heads meet where these ranks share a cache."""
    shared = SimpleNamespace(mesh=Mesh(*ranks), count=len(ranks))
    view = View(is_partial=True, route=SimpleNamespace(ranks=shared))
    here = Share(0, 2, HEADS, TENSOR_PARALLEL, (True,)) if share else ALL_HEADS
    found = with_heads(view, here, heads, total=HEADS, kv_heads=kv_heads)
    return "the same heads" if found is view else found


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "expected"),
    [
        ((0, 1), 2, "own heads"),  # 0 to 3, which read KV head 0
        ((2, 3), 2, "own heads"),
        ((0, 1, 2, 3), 1, "own heads"),
        ((0, 4), 2, "the same heads"),  # rank 4 has the heads of another copy of the model
        ((0,), 2, "the same heads"),
    ],
)
def test_ranks_have_heads_of_one_kv_head_or_the_same(ranks, kv_heads, expected):
    assert heads_over(*ranks, kv_heads=kv_heads) == expected


def test_all_heads_here_are_the_same_on_every_rank():
    assert heads_over(0, 1, kv_heads=2, heads=HEADS, share=False) == "the same heads"


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "message"),
    [
        (
            (1, 2),
            2,
            r"read the same KV head, .* got ranks with first heads \[2, 4\] of 8, over 2 KV heads",
        ),
        ((0, 1), 8, "read the same KV head"),
        ((0, 1, 7), 2, "mesh: expected a cache shared within the heads' mesh .* overlaps it in part"),
    ],
)
def test_other_ranks_are_refused(ranks, kv_heads, message):
    with pytest.raises(ValueError, match=message):
        heads_over(*ranks, kv_heads=kv_heads)


def test_heads_that_nobody_counts_are_refused():
    with pytest.raises(
        ValueError, match="q_proj: expected all 8 heads, or heads sharded by parallelize_module"
    ):
        heads_over(0, 1, kv_heads=2, share=False)
