"""Ranks write queries and results into each other's memory: here the memories of one process, which plays all
ranks.
"""

import pytest
import torch
from kernel_helpers import DEVICE
from torch import Tensor

from attnlib.backends._triton.decode.peers import PeerBuffers

BYTES = 1 << 16


class SequenceHandle:
    """In the place of torch's: nobody waits, and it counts how often one would."""

    count = 0

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self.count += 1


def memories(count: int) -> list[PeerBuffers]:
    """A buffer for each rank, full of NaN."""
    buffers = [torch.full((BYTES,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
    starts = torch.tensor([x.data_ptr() for x in buffers], device=DEVICE)
    addresses = torch.stack((starts, starts + BYTES // 2))
    return [PeerBuffers(x, addresses, SequenceHandle(), n, count) for n, x in enumerate(buffers)]


def lse_of(out: Tensor) -> Tensor:
    """Random LSEs ``[b, h, s]`` or ``[h, t]``, some of queries that saw nothing."""
    lse = torch.randn(out.shape[:-1]).transpose(-1, -2).contiguous() * 3
    return lse.masked_fill(torch.rand(lse.shape) < 0.2, -torch.inf).to(out.device)


def joined(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What all parts are together, in fp64."""
    out, lse = torch.stack(outs).double(), torch.stack(lses).double()
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total.masked_fill(total == -torch.inf, 0)).transpose(-1, -2)[..., None]
    return (weights * out).sum(0), total


SHAPES = [
    ((3, 1), 1, 4),
    ((2, 3), 2, 3),
    ((5,), 2, 1),
    ((1,), 1, 16),
]  # of tokens, KV heads, a rank's heads for each


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("lead", "kv_heads", "group"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ranks_have_what_all_found(lead, kv_heads, group, count, own, dtype):
    every, heads, d, e = memories(count), kv_heads * group, 20, 12
    given = [torch.randn(*lead, heads, d).to(DEVICE, dtype) for _ in every]
    given = given if own else given[:1] * count
    exchanges = [memory.exchange(q, e, have_own_heads=own) for memory, q in zip(every, given, strict=True)]
    found = [x.queries(q, kv_heads) for x, q in zip(exchanges, given, strict=True)]
    expected = (
        torch.cat([q.unflatten(-2, (kv_heads, group)) for q in given], -2).flatten(-3, -2)
        if own
        else given[0]
    )
    assert all(torch.equal(q, expected) for q in found)

    outs = [torch.randn(*lead, expected.shape[-2], e).to(DEVICE, dtype) for _ in every]
    lses = [lse_of(out) for out in outs]
    outs = [
        x.masked_fill(lse.transpose(-1, -2)[..., None] == -torch.inf, 0)
        for x, lse in zip(outs, lses, strict=True)
    ]
    for rounded in (dtype, torch.float32):
        for _ in range(2):  # when all have written, each has what all found
            given = zip(exchanges, outs, lses, strict=True)
            merged = [x.merged(*state, kv_heads, dtype=rounded) for x, *state in given]
        for n, (out, lse) in enumerate(merged):
            mine = torch.arange(expected.shape[-2], device=DEVICE)
            mine = mine.view(kv_heads, count, group)[:, n].flatten() if own else mine
            parts = [x[..., mine, :] for x in outs], [x[..., mine, :] for x in lses]
            right, right_lse = joined(*parts)
            assert out.dtype == rounded
            torch.testing.assert_close(
                out.double(), right, rtol=max(1e-5, 2 * torch.finfo(rounded).eps), atol=1e-5
            )
            torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    assert [x.handle.count for x in every] == [
        5
    ] * count  # once before the others' queries are read, and results


@pytest.mark.parametrize(
    ("q", "value_dim", "own", "taken"),
    [
        (torch.zeros(4, 1, 8, 64), 64, True, True),
        (torch.zeros(4, 1, 8, 65), 64, True, True),
        (torch.zeros(2, 1, 32, 64), 64, False, False),  # with an LSE beside them they take more than half
        (torch.zeros(2, 1, 32, 64), 60, False, True),
        (torch.zeros(4, 1, 8, 64, dtype=torch.float64), 64, True, False),
        (torch.zeros(4, 1, 8, 64, device="meta"), 64, True, False),
    ],
)
def test_what_memory_takes(q, value_dim, own, taken):
    q = q if q.is_meta else q.to(DEVICE)
    found = memories(2)[0].exchange(q, value_dim, have_own_heads=own)
    assert (found is not None) == taken
    assert found is None or str(found) == "by writing into each other's memory"
