"""Dropout bits: the published vectors, an independent implementation, and independence of how a call is
cut.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnlib.internal.philox import dropout_keep, philox

# Known answers of Random123 1.14 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
u32 = st.integers(0, 2**32 - 1)


def in_python(counter, key):
    """Philox-4x32-10 with Python's integers."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k0, second % 2**32, (first >> 32) ^ d ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def on_tensors(counter, key):
    return tuple(int(x) for x in philox(tuple(torch.tensor(word) for word in counter), key))


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter, key, result):
    assert in_python(counter, key) == result
    assert on_tensors(counter, key) == result


@given(st.tuples(u32, u32, u32, u32), st.tuples(u32, u32))
def test_any_counter_and_key(counter, key):
    assert on_tensors(counter, key) == in_python(counter, key)


def bits(seed, p, n=2, h=3, s=5, first=0, last=21):
    where = {"sequences": torch.arange(n), "heads": torch.arange(h), "rows": torch.arange(s)}
    return dropout_keep(seed, p, **where, first=first, last=last)


@given(st.integers(-(2**63), 2**63 - 1), st.floats(0, 0.999))
def test_the_definition_weight_by_weight(seed, p):
    keep = bits(seed, p)
    assert keep.shape == (2, 3, 5, 21)
    for n, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 20), (0, 1, 3, 7), (1, 0, 2, 18)):
        word = in_python((j // 4, i, h, n), (seed % 2**32, (seed >> 32) % 2**32))[j % 4]
        assert bool(keep[n, h, i, j]) == (word >= p * 2**32)


@given(*(st.integers(-(2**31), 2**31 - 5) for _ in range(4)))
def test_of_a_negative_index_the_low_32_bits_count(sequence, head, row, key):
    where = {
        "sequences": torch.tensor([sequence]),
        "heads": torch.tensor([head]),
        "rows": torch.tensor([row]),
    }
    keep = dropout_keep(11, 0.5, **where, first=key, last=key + 5)
    assert keep.shape == (1, 1, 1, 5)
    for n, j in enumerate(range(key, key + 5)):
        word = in_python([x % 2**32 for x in (j // 4, row, head, sequence)], (11, 0))[j % 4]
        assert bool(keep[0, 0, 0, n]) == (word >= 2**31)


@given(st.integers(0, 20), st.integers(0, 20))
def test_any_range_of_keys_is_a_piece_of_the_whole(a, b):
    first, last = sorted((a, b))
    assert torch.equal(bits(7, 0.4, first=first, last=last), bits(7, 0.4)[..., first:last])


def test_the_share_that_is_dropout_keep():
    keep = bits(3, 0.3, n=4, h=4, s=64, last=1024)
    assert abs(float(keep.float().mean()) - 0.7) < 4 * math.sqrt(0.21 / keep.numel())
    assert bits(3, 0.0).all()


def test_every_counter_word_and_the_seed_matter():
    whole = bits(1, 0.5, n=3, h=3, s=3, last=64)
    for dim in range(3):
        first, second = whole.unbind(dim)[:2]
        assert not torch.equal(first, second)
    assert not torch.equal(whole, bits(2, 0.5, n=3, h=3, s=3, last=64))
    assert not torch.equal(whole, bits(1 + 2**32, 0.5, n=3, h=3, s=3, last=64))
