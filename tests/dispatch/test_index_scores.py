"""The kernel of index scores, which few calls on this machine have, and why others do not."""

import pytest
import torch

from attnlib.backends._triton import against_index_scores
from attnlib.backends._triton.launching.launch import IS_INSTALLED
from attnlib.dispatch.index_scores import kernel, pooled

needs_triton = pytest.mark.skipif(not IS_INSTALLED, reason="needs triton")


def tensors(
    heads: int = 4, d: int = 16, dtype=torch.float32, of_keys=None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3, heads, d, dtype=dtype), torch.zeros(2, 5, d, dtype=of_keys or dtype)


def test_cpus_have_none(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel(*tensors()) is None
    assert against_index_scores(*tensors()) == ["needs a CUDA device, got cpu"]


@needs_triton
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "heads": 128, "d": 256}, None),
        ({"dtype": torch.float64}, "computes in fp32, got fp64"),
        ({"dtype": torch.bfloat16}, "Triton's interpreter multiplies bf16 wrongly"),
        (
            {"of_keys": torch.float16},
            "needs queries and keys of one dtype, got torch.float32 and torch.float16",
        ),
        ({"heads": 129}, "takes up to 128 index heads, got 129"),
        ({"d": 257}, "takes index heads of up to 256 channels, got 257"),
    ],
)
def test_reasons(monkeypatch, changes, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = against_index_scores(*tensors(**changes))
    assert len(found) == (reason is not None)
    assert all(reason in x for x in found)
    assert (kernel(*tensors(**changes)) is None) == (reason is not None)


def test_the_operator_has_a_fake():
    """So that compilers and FakeTensorMode know its result."""
    q, k = (x.to("meta") for x in tensors())
    ends, weights = torch.zeros(2, 3, dtype=torch.int32, device="meta"), q[..., 0]
    operator = torch.ops.attnlib.triton_index_scores
    assert operator(q, k, weights, ends, None, None, None, 1.0, True, False, 1, 5).shape == (2, 3, 1, 5)
    assert operator(q, k, None, ends, None, None, None, 1.0, True, True, 4, 5).shape == (2, 3, 4, 2)


def test_blocks_that_the_kernel_pools():
    half, wide = torch.zeros(1, 1, 128, dtype=torch.float16), torch.zeros(1, 1, 128)
    assert [pooled(half, size) for size in (1, 2, 3, 128, 256)] == [1, 2, 1, 128, 1]
    assert [pooled(wide, size) for size in (1, 2, 3, 32, 128)] == [1, 2, 1, 32, 1]
    assert pooled(torch.zeros(1, 1, 256, dtype=torch.float16), 64) == 1
