"""Rotating by angles: each token by its own, rounded once, as transformers and DeepSeek do; refusals."""

import itertools

import pytest
import torch
from rope_cases import pairs, turn

from attnlib.rope.rope import (
    Angles,
    Rope,
    rotate,
)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_by_i_then_j_is_turning_by_their_sum(interleaved):
    rope = Rope(16, interleaved=interleaved)
    x = torch.randn(5, 2, 16, dtype=torch.float64)
    i, j = torch.tensor([[0, 1, 7, 300, 4000], [0, -1, 9, -300, 95]])
    error = (turn(turn(x, rope, i), rope, j) - turn(x, rope, i + j)).abs()
    assert (error <= (3 * 4095 * 2**-24 + 3 * 2**-23) * x.norm(dim=-1, keepdim=True)).all()
    assert not torch.equal(turn(x, rope, i), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_token_is_rotated_by_its_own_angles(interleaved):
    """Absent and size-1 batch dimensions broadcast; no row sees another."""
    rope = Rope(8, interleaved=interleaved)
    x = torch.randn(3, 5, 2, 10)
    own = torch.randint(0, 1000, (3, 5))
    y = turn(x, rope, own)
    for b, s in itertools.product(range(3), range(5)):
        assert torch.equal(y[b, s], turn(x[b, s], rope, own[b, s]))
    shared = own[0]
    repeated = turn(x, rope, shared.expand(3, 5))
    assert torch.equal(repeated, turn(x, rope, shared))
    assert torch.equal(repeated, turn(x, rope, shared[None]))
    assert torch.equal(y.flatten(0, 1), turn(x.flatten(0, 1), rope, own.flatten()))
    assert turn(x[:, :0], rope, own[:, :0]).shape == (3, 0, 2, 10)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rotation_is_rounded_once(dtype, interleaved):
    """fp16 and bf16 are computed in fp32, fp64 in fp64: off by the result's rounding and three units."""
    angles = Rope(64, interleaved=interleaved).angles(torch.arange(65))
    x = torch.randn(65, 3, 80).to(dtype)
    first, second = pairs(x.double(), 64, interleaved).unbind(-1)
    cos, sin = angles.cos.double()[:, None], angles.sin.double()[:, None]
    y = rotate(x, angles)
    assert y.dtype == dtype
    unit = 2**-52 if dtype == torch.float64 else 2**-23
    info = torch.finfo(dtype)
    for got, exact in zip(
        pairs(y.double(), 64, interleaved).unbind(-1),
        (first * cos - second * sin, second * cos + first * sin),
        strict=True,
    ):
        bound = (
            info.eps / 2 * exact.abs()
            + 3 * unit * (first.abs() + second.abs())
            + info.eps * info.smallest_normal
        )
        assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    """Also of the unrotated channels; and the gradient is the rotation backwards."""
    rope = Rope(6, interleaved=interleaved)
    positions = torch.tensor([0, 3, 100])
    angles = rope.angles(positions)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles), x)
    upstream = torch.randn(2, 3, 2, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad(rotate(x, angles), x, upstream)
    assert torch.equal(grad, turn(upstream, rope, -positions))


def test_convention_names_the_pairing_and_the_rotated_width():
    assert Rope(64).angles(torch.arange(3)).convention == "half:64"
    assert Rope(6, interleaved=True).angles(torch.arange(3)).convention == "interleaved:6"


def full(angles):
    """cos and sin as transformers wants them, each angle twice."""
    return torch.cat((angles.cos, angles.cos), -1), torch.cat((angles.sin, angles.sin), -1)


@pytest.mark.parametrize("batched", [False, True])
def test_half_rotation_is_that_of_transformers(hf, batched):
    positions = torch.randint(0, 100_000, (2, 5)) if batched else torch.randint(0, 100_000, (1, 5))
    angles = Rope(64).angles(positions)
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 2, 64)
    expected_q, expected_k = hf.llama.apply_rotary_pos_emb(q, k, *full(angles), unsqueeze_dim=2)
    assert torch.equal(rotate(q, angles), expected_q)
    assert torch.equal(rotate(k, angles), expected_k)


def test_interleaved_rotation_is_that_of_deepseek_v3(hf):
    """Its result is in the half layout; ours stays interleaved. The two pairings also disagree, as they
    must.
    """
    angles = Rope(64, interleaved=True).angles(torch.randint(1, 100_000, (2, 5)))
    q, k = torch.randn(2, 5, 4, 64), torch.randn(2, 5, 1, 64)
    expected = hf.deepseek.apply_rotary_pos_emb_interleave(q, k, *full(angles), unsqueeze_dim=2)
    for x, halves in zip((q, k), expected, strict=True):
        y = rotate(x, angles)
        assert torch.equal(torch.cat((y[..., 0::2], y[..., 1::2]), -1), halves)
        assert not torch.equal(y, rotate(x, Angles(angles.cos, angles.sin, interleaved=False)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_more_channels_than_the_head_has_is_refused(interleaved):
    """Fault 22."""
    angles = Rope(64, interleaved=interleaved).angles(torch.arange(5))
    with pytest.raises(
        ValueError, match=r"d >= 64.*got \(2, 5, 3, 63\); make Rope\(dim=...\) at most the head dim"
    ):
        rotate(torch.randn(2, 5, 3, 63), angles)


@pytest.mark.parametrize(
    ("x", "positions"),
    [
        ((2, 5, 3, 8), (4,)),
        ((2, 5, 3, 8), (1,)),  # one position for a whole sequence
        ((2, 5, 3, 8), ()),
        ((2, 5, 3, 8), (2, 1)),
        ((2, 5, 3, 8), (3, 5)),
        ((1, 5, 3, 8), (2, 5)),  # would repeat x
        ((2, 5, 3, 8), (1, 2, 5)),
        ((2, 5, 3, 8), (5, 3)),  # rotated over heads
        ((5, 3, 8), (1, 5)),
        ((3, 8), (5,)),
    ],
)
def test_angles_of_other_tokens_are_refused(x, positions):
    angles = Rope(8).angles(torch.zeros(positions, dtype=torch.int64))
    with pytest.raises(ValueError, match="angles: expected cos") as refusal:
        rotate(torch.randn(x), angles)
    assert f"for x {x}, got {(*positions, 4)}; compute them from" in str(refusal.value)


def test_other_wrong_operands_are_refused():
    angles = Rope(8).angles(torch.arange(5))
    with pytest.raises(TypeError, match=r"x: expected fp16, bf16, fp32 or fp64, got torch\.int64"):
        rotate(torch.zeros(5, 2, 8, dtype=torch.int64), angles)
    with pytest.raises(TypeError, match=r"angles: expected fp32 cos and sin, got torch\.bfloat16"):
        Angles(angles.cos.bfloat16(), angles.sin.bfloat16(), False)
    with pytest.raises(
        ValueError, match=r"expected cos and sin of one shape \[..., p / 2\], got \(5, 4\) and \(4, 4\)"
    ):
        Angles(angles.cos, angles.sin[:4], False)
