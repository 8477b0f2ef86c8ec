"""Values by channels, before Hopper's forward of 8 bits: every byte where the product looks for it, zeros
elsewhere.
"""

import pytest
import torch
from kernel_helpers import DEVICE
from torch import Tensor

from attnlib.backends._triton.kernels.hopper.forward.transpose_values import transpose_values

BLOCK_N = 64
# Of 16 keys, in the order of products.
ORDER = [x for c in range(4) for x in (2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9)]
INSIDE = [None, (10, 77)]


def stored(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, device=DEVICE)


def transposed(
    v: Tensor, width: int, blocks: int, bounds: tuple | None = None, cu: Tensor | None = None
) -> Tensor:
    """What the kernel makes of values ``[b, t, g, e]``; 7 where it writes nothing."""
    b, t, g, e = v.shape
    out = torch.full((b, e, g, blocks * BLOCK_N), 7, dtype=torch.uint8, device=DEVICE)
    starts, ends = (
        (None, None) if bounds is None else (torch.full((b,), n, device=DEVICE).int() for n in bounds)
    )
    batch = b if cu is None else len(cu) - 1
    transpose_values[(b * g * blocks,)](
        v, out, starts, ends, cu if cu is None else cu.to(DEVICE), *v.stride()[:3], batch, g, t,
        E=e, E_MAIN=width, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return out.cpu()


def expected(v: Tensor, start: int, end: int) -> Tensor:
    """Values ``[t, g, e]`` as ``[e, g, padded]``, zeros but for keys ``[start, end)``."""
    whole = v.new_zeros(-(-v.shape[0] // BLOCK_N) * BLOCK_N, *v.shape[1:])
    whole[start:end] = v[start:end]
    return whole.view(-1, 16, *v.shape[1:])[:, ORDER].flatten(0, 1).permute(2, 1, 0).cpu()


@pytest.mark.parametrize("bounds", INSIDE)
@pytest.mark.parametrize(("t", "g", "e", "width"), [(256, 2, 64, 64), (130, 1, 96, 128), (100, 1, 256, 256)])
def test_dense(t, g, e, width, bounds):
    v = stored(2, t, g, e)
    results = transposed(v, width, -(-t // BLOCK_N), bounds)
    for x, result in zip(v, results, strict=True):
        assert torch.equal(result, expected(x, *(bounds or (0, t))))


def test_a_width_that_is_no_multiple_of_a_word():
    v = stored(1, 70, 2, 80)[..., :70]
    assert torch.equal(transposed(v, 128, 2)[0], expected(v[0], 0, 70))


def test_packed():
    lengths = (100, 0, 64, 1, 200)
    offsets = torch.tensor((0, *lengths)).cumsum(0).int()
    v = stored(1, sum(lengths) + 13, 2, 64)  # more than the last offset
    result = transposed(v, 64, v.shape[1] // BLOCK_N + len(lengths) + 1, cu=offsets)[0]
    for n, length in enumerate(lengths):
        row = int(offsets[n])
        values = expected(v[0, row : row + length], 0, length)
        first = (row // BLOCK_N + n) * BLOCK_N
        assert torch.equal(result[..., first : first + values.shape[-1]], values)
