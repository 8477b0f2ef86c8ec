"""Probabilities and largest scores from all pairs in fp64, and every form in which attnlib gives them."""

from itertools import pairwise

import torch
from helpers import eager_scores
from torch import Tensor

from attnlib import attention_maxima, attention_weights
from attnlib.masks.band import Mask

WHOLE = ("none", "queries", "heads", "some", "scores", "products")


def all_scores(q, k, *, mask, score=None, **terms) -> Tensor:
    """Scores ``[b, h, s, t]`` in the dtype of q, -inf where hidden, with functions of indices."""
    (b, s, h, _), t = q.shape, k.shape[1]
    at = torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None]
    at = *at, torch.arange(t - s, t)[:, None], torch.arange(t), torch.tensor(t - s)
    scores = eager_scores(q, k, mask=mask.band, **terms)
    if score is not None:
        scores = score.definition(scores, *at).masked_fill(scores == -torch.inf, -torch.inf)
    return scores if isinstance(mask, Mask) else scores.masked_fill(~mask.visible(*at), -torch.inf)


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """P ``[b, h, s, t]``; rows whose LSE is -inf are 0."""
    return torch.exp(scores - lse[..., None]).masked_fill((lse == -torch.inf)[..., None], 0)


def at_keys(p: Tensor, at: Tensor) -> Tensor:
    """The mean of P over heads at the keys ``at``, 0 for numbers that no key has."""
    exists = (at >= 0) & (at < p.shape[-1])
    if not p.shape[-1]:
        return p.new_zeros(at.shape)
    return torch.where(exists, p.mean(1).gather(2, torch.where(exists, at, 0).long()), 0)


def drawn(b: int, s: int, t: int) -> dict[str, Tensor]:
    """Rows and keys to ask for: rows in runs, out of order, repeated and absent, also by sequence."""
    rows = torch.tensor([s - 1, 0, 1, 2, 0, -1, s // 2, s])
    return {
        "rows": rows,
        "by_sequence": torch.randint(-1, s + 1, (b, 5)),
        "at": torch.randint(-1, t + 1, (b, s, 3), dtype=torch.int32),
    }


def expected(p: Tensor, scores: Tensor, products: Tensor, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every form of P and of the maxima."""

    def some(rows):
        there = (rows >= 0) & (rows < p.shape[2])
        chosen = torch.where(there, rows, 0).expand(p.shape[0], -1)[:, None, :, None]
        picked = p.gather(2, chosen.expand(-1, p.shape[1], -1, p.shape[3])) if p.shape[2] else None
        zeros = p.new_zeros(*p.shape[:2], rows.shape[-1], p.shape[3])
        return (
            zeros
            if picked is None
            else torch.where(there.expand(p.shape[0], -1)[:, None, :, None], picked, 0)
        )

    lowest = {"scores": scores, "products": products}
    maxima = {
        of: x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf) for of, x in lowest.items()
    }
    return maxima | {
        "none": some(asked["rows"]),
        "none by sequence": some(asked["by_sequence"]),
        "queries": p.sum(2),
        "some": some(asked["rows"]).sum(2),
        "some by sequence": some(asked["by_sequence"]).sum(2),
        "heads": at_keys(p, asked["at"]),
    }


def forms(q, k, lse, asked: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """Every form that attnlib gives; ``asked`` as :func:`drawn` makes it, and perhaps less."""
    found = {of: attention_maxima(q, k, of=of, **options) for of in ("scores", "products")}
    found["queries"] = attention_weights(q, k, lse, over="queries", **options)
    for name, rows in (("", "rows"), (" by sequence", "by_sequence")):
        if rows in asked:
            found[f"none{name}"] = attention_weights(q, k, lse, over="none", rows=asked[rows], **options)
            found[f"some{name}"] = attention_weights(q, k, lse, over="queries", rows=asked[rows], **options)
    found["heads"] = attention_weights(q, k, lse, over="heads", at=asked["at"], **options)
    return found


def oracle(q, k, lse, asked, **options) -> dict[str, Tensor]:
    """The same forms in fp64 from all pairs; ``lse`` is the one that the call is given."""
    options.pop("backend", None)
    options = {n: x.double() if n == "alibi_slopes" else x for n, x in options.items()}
    q, k = q.detach().double(), k.detach().double()
    scores = all_scores(q, k, **options)
    plain = {n: x for n, x in options.items() if n not in ("softcap", "alibi_slopes", "score")}
    return expected(probabilities(scores, lse.double()), scores, all_scores(q, k, **plain), asked)


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    """The first row of each packed sequence, and the row after its last."""
    return list(pairwise(offsets.tolist()))
