"""What a layout says it stores, and what it refuses."""

import pytest
import torch

from attnlib import KVLayout


def test_grouped_planes():
    layout = KVLayout.grouped(2, 64, 32, dtype=torch.bfloat16)
    assert layout.planes == {"k": (2, 64, torch.bfloat16), "v": (2, 32, torch.bfloat16)}
    assert layout.token_bytes == 2 * (64 + 32) * 2
    assert KVLayout.grouped(2, 64) == KVLayout.grouped(2, 64, 64)


def test_latent_planes_have_no_value():
    layout = KVLayout.latent(512, 64, dtype=torch.bfloat16)
    assert layout.planes == {"k": (1, 512, torch.bfloat16), "k_tail": (1, 64, torch.bfloat16)}
    assert set(KVLayout.latent(512, 0).planes) == {"k"}


@pytest.mark.parametrize("store", [torch.int8, torch.float8_e4m3fn])
def test_stored_bytes_get_scales_and_leave_the_rotary_key_alone(store):
    grouped = KVLayout.grouped(2, 64, dtype=torch.float16, store=store).planes
    assert grouped["k"] == grouped["v"] == (2, 64, store)
    assert grouped["k_scale"] == grouped["v_scale"] == (2, 0, torch.float32)
    latent = KVLayout.latent(512, 64, dtype=torch.float16, store=store).planes
    assert latent == {"k": (1, 512, store), "k_tail": (1, 64, torch.float16), "k_scale": (1, 0, torch.float32)}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: KVLayout.grouped(0, 64), ValueError, "heads: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(2, 0), ValueError, "dim: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(2, 64, 0), ValueError, "value_dim: expected at least 1, got 0"),
        (lambda: KVLayout.latent(512, -1), ValueError, "rope_dim: expected at least 0, got -1"),
        (lambda: KVLayout.grouped(2, 64, window=0), ValueError, "window: expected at least 1, got 0"),
        (lambda: KVLayout.grouped(2, 64, dtype=torch.int8), TypeError, "dtype: expected fp16"),
        (lambda: KVLayout.grouped(2, 64, dtype=torch.float8_e4m3fn), TypeError, "dtype: expected fp16"),
        (lambda: KVLayout.grouped(2, 64, store=torch.float16), TypeError, "store: expected None"),
    ],
)
def test_wrong_layouts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
