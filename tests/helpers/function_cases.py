"""Masks and scores by function, and attention by calling the functions themselves with all pairs."""

import torch

from attnlib import CAUSAL, FULL, QUERY_OFFSET, Mask, attention_with_lse, mask_mod, score_mod, sliding


def striped(b, h, i, j):
    return (i + j) // 3 % 2 == 0


def same_document(b, h, i, j, document):
    return document[b, i] == document[b, j]


def tree(b, h, i, j, first, shown):
    return (j < first[b]) | shown[i - first[b], (j - first[b]).clamp(0)]


def relative(score, b, h, i, j, bias, gain):
    return score * gain + bias[h, (i - j).clamp(-4, 4) + 4]


def faded(score, b, h, i, j, rate):
    return score - torch.exp(rate[b, h]) * (i - j).abs() / (1 + abs(score)) + torch.maximum(score, rate[0, 0])


def optional(score, b, h, i, j, slopes, gain):
    """A softcap, then ALiBi, then a gain: a call takes softcap and ALiBi as options."""
    return (3 * torch.tanh(score / 3) - slopes[h] * (i - j).abs()) * gain


def undefined(score, b, h, i, j, rate):
    """NaN for keys behind the query, which a causal mask hides, and beyond every number for rows behind the
    last.
    """
    behind = (i - j).double()
    return score * (behind + 1).log() + rate[b, h] * (behind + 0.5).log()


def functions(b=2, h=4, t=60):
    """Masks and scores of every kind of step, and the leaves of the latter."""
    document = torch.randint(0, 4, (b, t)).sort().values.int()
    shown = torch.rand(t, t) > 0.3
    bias = torch.randn(h, 9, dtype=torch.float64, requires_grad=True)
    gain = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    rate = torch.randn(b, h, dtype=torch.float64, requires_grad=True)
    slopes = torch.tensor([0.5, -0.02, 0, 0.01] * 2, dtype=torch.float64)[:h].requires_grad_()
    masks = {
        "documents": CAUSAL & mask_mod(same_document, document),
        "tree": mask_mod(tree, QUERY_OFFSET, shown),
        "by head": sliding(20) | mask_mod(lambda b, h, i, j: (h == 1) & (j % 3 == 0)),
        "nothing": mask_mod(lambda b, h, i, j: i * j < 0),
        "outside": FULL & ~(sliding(9) & mask_mod(striped)),
    }
    scores = {
        "relative": (score_mod(relative, bias, gain), (bias, gain)),
        "faded": (score_mod(faded, rate), (rate,)),
        "optional": (score_mod(optional, slopes, gain), (slopes, gain)),
        "a number": (score_mod(lambda score, b, h, i, j: score / 2 + h), ()),
    }
    return masks, scores


MASK_NAMES, SCORE_NAMES = functions()[0].keys(), (None, *functions()[1].keys())


def by_definition(q, k, v, mask, score, sequences=None):
    """Attention by calling the functions with all pairs, in torch's own operations."""
    (b, s, h, d), (t, g) = q.shape, k.shape[1:3]
    i, j, first = torch.arange(t - s, t)[:, None], torch.arange(t), torch.tensor(t - s)
    at = (
        torch.arange(b)[:, None, None, None] if sequences is None else sequences,
        torch.arange(h)[:, None, None],
        i,
        j,
    )
    scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(h // g, 2)) * d**-0.5
    if score is not None:
        scores = score.definition(scores, *at, first)
    seen = mask.visible(i, j) if isinstance(mask, Mask) else mask.visible(*at, first)
    scores = scores.masked_fill(~seen, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    lse = torch.logsumexp(scores.masked_fill(nothing, 0), -1).masked_fill(nothing[..., 0], -torch.inf)
    return torch.einsum("bhst,bthe->bshe", weights, v.repeat_interleave(h // g, 2)), lse


def tensors(b=2, s=37, t=60, h=4, g=2, d=8):
    shapes = ((b, s, h, d), (b, t, g, d), (b, t, g, 5))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def loss(out, lse):
    return out.sin().sum() + lse[lse > -torch.inf].cos().sum()


def narrow(*xs):
    """fp32 leaves of fp64 ones."""
    return [x.detach().float().requires_grad_() for x in xs]


def close(ours, theirs):
    """To fp32 rounding, -inf where -inf is."""
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x == -torch.inf, y == -torch.inf)
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=1e-4)


NOTHING = [(2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 3, 5)]  # sequences, queries and keys


def assert_zeros_of_nothing(b, s, t, mask_name, score_name, backend):
    """Zeros, an LSE of -inf, and zero gradients of all that is read, in a call that has no pair."""
    masks, scores = functions()
    mask, (score, reads) = masks[mask_name], scores.get(score_name, (None, ()))
    leaves = narrow(*tensors(b, s, t, d=16), *reads)
    out, lse = attention_with_lse(
        *leaves[:3], mask=mask, score=score and score.reading(leaves[3:]), backend=backend
    )
    assert out.shape == (b, s, 4, 5)
    assert not out.any()
    assert torch.equal(lse, torch.full((b, 4, s), -torch.inf, device=lse.device))
    grads = torch.autograd.grad(out.sum() + lse.exp().sum(), leaves)
    assert all(x.shape == leaf.shape and not x.any() for x, leaf in zip(grads, leaves, strict=True))
