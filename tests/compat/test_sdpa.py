"""The door in torch's signature, against torch's own."""

from inspect import signature

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

from attnlib.compat.sdpa import scaled_dot_product_attention as ours

B, H, S, T, D, E = 2, 4, 7, 11, 8, 6
MASKS = {
    "none": lambda s, t: None,
    "bool of all": lambda s, t: torch.rand(s, t) > 0.3,
    "bool of batches": lambda s, t: torch.rand(B, 1, 1, t) > 0.3,
    "bool of heads": lambda s, t: torch.rand(1, H, s, t) > 0.3,
    "rows that see nothing": lambda s, t: (
        (torch.arange(s)[:, None] % 3 > 0) & torch.ones(s, t, dtype=torch.bool)
    ),
    "added": lambda s, t: torch.randn(B, H, s, t, dtype=torch.float64),
    "added of keys": lambda s, t: torch.randn(t, dtype=torch.float64),
}


def tensors(*heads: int, s: int = S, t: int = T):
    h, g = heads or (H, H)
    shapes = ((B, h, s, D), (B, g, t, D), (B, g, t, E))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def agree(given, **options):
    """Outputs, and gradients of all that asks for one."""
    learning = [x for x in (*given, options.get("attn_mask")) if x is not None and x.requires_grad]
    outs = [call(*given, **options) for call in (ours, theirs)]
    torch.testing.assert_close(*outs, rtol=1e-10, atol=1e-11)
    weights = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(x, learning, weights) for x in outs]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(("s", "t"), [(S, T), (T, S), (S, S), (1, T)])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, s, t, scale):
    torch.manual_seed(0)
    given = MASKS[mask](s, t)
    if given is not None and given.is_floating_point():
        given.requires_grad_()
    agree(tensors(s=s, t=t), attn_mask=given, scale=scale)


@pytest.mark.parametrize(("s", "t"), [(S, T), (T, S), (S, S), (1, T)])
def test_causality_is_aligned_with_the_first_key(s, t):
    agree(tensors(s=s, t=t), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_groups(is_causal):
    agree(tensors(H, 2), enable_gqa=True, is_causal=is_causal)


@pytest.mark.parametrize("shapes", [((S, D), (T, D), (T, E)), ((3, S, D), (3, T, D), (3, T, E))])
def test_fewer_dimensions(shapes):
    agree([torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes])


@pytest.mark.parametrize("mask", [None, (3, 1, 1, S, T), (B, H, S, T), (1, 1, T)])
def test_more_dimensions(mask):
    shapes = ((3, B, H, S, D), (3, B, H, T, D), (3, B, H, T, E))
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    agree(given, attn_mask=None if mask is None else torch.rand(mask) > 0.3)


@pytest.mark.parametrize("shape", [(1, H), (B, 1)])
def test_batches_and_heads_broadcast(shape):
    q, k, v = tensors()
    k, v = k[: shape[0], : shape[1]], v[: shape[0], : shape[1]]
    expected = theirs(q, k.expand(B, H, T, D), v.expand(B, H, T, E))
    torch.testing.assert_close(ours(q, k, v), expected, rtol=1e-10, atol=1e-11)


def test_dropout_keeps_the_mean():
    q, k = torch.zeros(2, 1, 1, 64, D).unbind()
    v = torch.ones(1, 1, 64, E)
    out = torch.stack([ours(q, k, v, dropout_p=0.5) for _ in range(40)])
    assert not torch.equal(out[0], out[1])
    assert 0.95 < out.mean() < 1.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"is_causal": True, "attn_mask": torch.ones(S, T, dtype=torch.bool)},
            "attn_mask: expected None with",
        ),
        ({"attn_mask": torch.ones(S, T + 1, dtype=torch.bool)}, r"a shape that broadcasts to \(2, 4"),
        (
            {"key": torch.randn(B, 2, T, D)},
            r"heads: expected the same number .* got \[4, 2, 4\]; pass enable_gqa=True",
        ),
        ({"query": 3}, r"query: expected \[..., heads, tokens, channels\], got int"),
    ],
)
def test_what_torch_would_refuse(change, message):
    given = dict(zip(("query", "key", "value"), tensors(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        ours(**given)


def test_the_signature_is_torchs():
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(signature(ours).parameters) == names
