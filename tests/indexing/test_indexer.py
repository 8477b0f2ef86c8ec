"""The value of an index branch: six families can be said, and what makes no sense is refused by name."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from index_cases import INDEXERS

from attnlib import Indexer, Rope


@pytest.mark.parametrize("name", INDEXERS)
def test_families_are_values(name):
    indexer = INDEXERS[name]
    assert pickle.loads(pickle.dumps(indexer)) == indexer
    assert len({indexer, replace(indexer)}) == 1
    assert indexer.entries == indexer.top + (name == "qwen4_exp")
    assert indexer.lists == (indexer.heads if name == "minimax_m3" else 1)
    with pytest.raises(FrozenInstanceError):
        indexer.top = 1


def test_families_differ():
    assert len({*INDEXERS.values()}) == len(INDEXERS)


def test_scales():
    assert Indexer(4, 16).score_scale == 64**-0.5
    assert Indexer(4, 16, weighted=False).score_scale == 0.25
    assert Indexer(4, 16, scale=3).score_scale == 3.0


POOLED = {"block_size": 4, "pool": "mean", "tail": True}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"heads": 0}, ValueError, "indexer.heads: expected at least 1"),
        ({"head_dim": 1.5}, TypeError, "indexer.head_dim: expected an int"),
        ({"top": True}, TypeError, "indexer.top: expected an int"),
        ({"local": -1}, ValueError, "indexer.local: expected at least 0"),
        ({"source": "y"}, ValueError, "indexer.source: expected one of .*'latent'.*got 'y'"),
        ({"norms": None}, ValueError, "indexer.norms: expected one of"),
        ({"per": "head"}, ValueError, "indexer.per: expected one of"),
        ({"rope_place": ["first"]}, ValueError, "indexer.rope_place: expected one of"),
        ({"activation": "gelu"}, ValueError, "indexer.activation: expected one of"),
        ({"tail": 1}, TypeError, "indexer.tail: expected a bool"),
        ({"scale": 0.0}, ValueError, "indexer.scale: expected a finite number above 0"),
        ({"rope": 64}, TypeError, "indexer.rope: expected a Rope or None, got int"),
        ({"rope": Rope(256)}, ValueError, "indexer.rope: expected dim at most head_dim=128, got 256"),
        ({"pool": "gated"}, NotImplementedError, "learnt gates, as in GLM-5.3-Flash"),
        ({"pool": "sum"}, ValueError, "indexer.pool: expected one of"),
        ({"block_size": 4}, ValueError, "indexer.pool: expected 'max' or 'mean' with block_size=4"),
        ({"pool": "max"}, ValueError, "indexer.block_size: expected at least 2 keys with pool='max'"),
        ({"tail": True}, ValueError, "indexer.block_size: expected at least 2 keys with tail=True"),
        (POOLED | {"tail": False}, ValueError, "indexer.tail: expected True with pool='mean'"),
        (
            {"block_size": 4, "pool": "max", "norm_after_pool": True},
            ValueError,
            "indexer.norm_after_pool: expected False with pool='max'",
        ),
        ({"per": "group"}, ValueError, "indexer.weighted: expected False with per='group'"),
        ({"top": 4, "local": 3, "first": 2}, ValueError, "indexer.top: expected at least local"),
        ({"window": 3}, TypeError, "window: no such argument"),
    ],
)
def test_refusals(fields, error, message):
    with pytest.raises(error, match=message):
        Indexer(**fields)


def test_no_default_is_refused():
    assert replace(Indexer(**POOLED), top=7).entries == 8
