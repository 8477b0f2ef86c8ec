"""Recomputed probabilities and largest scores of a drawn call, judged by the oracle's scores."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlib import attention_maxima, attention_weights, explain

from .draw import Draw
from .judge import Mismatch
from .oracle import Rule, Sequence, scores

TAKEN = ("mask", "backend", "scale", "softcap", "alibi_slopes", "key_starts", "key_ends")
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


@torch.no_grad()
def check_recomputed(call: Any, arguments: dict[str, Any], lse: Tensor) -> None:
    """Compute every form from the call's LSE, and raise Mismatch unless they are what the oracle says."""
    draw, lengths = call.draw, call.lengths
    options = {name: x for name, x in arguments.items() if name in (*TAKEN, *PACKED)}
    q, k, _ = call.qkv(call.tensors)
    if explain(attention_maxima, q, k, **options).chosen is None:  # kernels of selected keys have no scores
        return
    s, at = lengths.shape(0)[-1], _numbers(draw, (*lengths.shape(0), 3), max(lengths.keys, default=0))
    rows = _numbers(draw, (draw.upto(6),), s)
    of = draw.one(("scores", "products"))
    found = {
        "maxima": attention_maxima(q, k, of=of, **options),
        "mass": attention_weights(q, k, lse, over="queries", **options),
        "some": attention_weights(q, k, lse, over="queries", rows=rows, **options),
        "rows": attention_weights(q, k, lse, over="none", rows=rows, **options),
        "heads": attention_weights(q, k, lse, over="heads", at=at, **options),
    }
    found, lse, rows, at = {n: x.cpu() for n, x in found.items()}, lse.cpu(), rows.cpu(), at.cpu()
    before = {name: x.detach().cpu().double() for name, x in call.tensors.items()}
    question = call.question(before)
    for n, x in enumerate(call.cut(before)):
        first = sum(lengths.queries[:n]) if lengths.packed else 0
        start = sum(lengths.keys[:n]) if lengths.packed else 0
        queries, keys = slice(first, first + len(x.q)), slice(start, start + len(x.k))
        own = {name: found[name] if lengths.packed else found[name][n] for name in found}
        own_lse = (lse if lengths.packed else lse[n])[:, queries]
        asked = rows - first
        asked = asked.masked_fill((asked < 0) | (asked >= len(x.q)), -1)
        wanted = _expected(
            x, question.rule, own_lse.double(), asked, at[queries] if lengths.packed else at[n], of
        )
        ours = {
            "maxima": own["maxima"][:, queries],
            "mass": own["mass"][:, keys],
            "some": own["some"][:, keys],
            "rows": own["rows"][:, asked >= 0, : len(x.k)],
            "heads": own["heads"][queries],
        }
        sure = ~x.unsure(question.rule)
        for name, mine in ours.items():
            if name == "heads" and not sure.all():
                continue
            exact = wanted[name]
            mine, exact = (mine, exact) if name == "heads" else (mine[sure], exact[sure])
            _compare(name, mine.double(), exact, question.dtype, x, question.rule)


def _numbers(draw: Draw, shape: tuple[int, ...], count: int) -> Tensor:
    """Numbers from -1 to ``count``, which exists no more than -1."""
    total = torch.Size(shape).numel()
    found = torch.tensor([draw.upto(count, -1) for _ in range(total)], dtype=torch.int64)
    return found.reshape(shape).to(draw.place, draw.one((torch.int32, torch.int64)))


def _expected(x: Sequence, rule: Rule, lse: Tensor, rows: Tensor, at: Tensor, of: str) -> dict[str, Tensor]:
    """Every form for one sequence, without the dimension of sequences."""
    logits = scores(x, rule)
    p = torch.exp(logits - lse[..., None]).masked_fill((lse == -torch.inf)[..., None], 0)
    if of == "products":
        plain = replace(x, slopes=None, sinks=None)
        logits = scores(plain, rule._replace(softcap=None))
    exists = (at >= 0) & (at < len(x.k))
    some, nothing = p[:, rows[rows >= 0].long()], torch.full(logits.shape[:2], -torch.inf).double()
    mean = p.mean(0)
    return {
        "maxima": logits.amax(-1) if len(x.k) else nothing,
        "mass": p.sum(1),
        "some": some.sum(1),
        "rows": some,
        "heads": torch.where(exists, mean.gather(1, at.long().clamp(0, max(len(x.k) - 1, 0))), 0)
        if len(x.k)
        else torch.zeros(at.shape).double(),
    }


def _compare(name: str, ours: Tensor, exact: Tensor, dtype: torch.dtype, x: Sequence, rule: Rule) -> None:
    """One rounding of every term of a score moves it by its magnitude, and a probability by that factor."""
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    finite = [y.nan_to_num(0, 0, 0).abs() for y in (x.q, x.k)]
    channels = torch.einsum("shd,thd->hst", finite[0], finite[1][:, x.kv_heads]) * rule.scale
    if x.slopes is not None:
        channels = channels + x.slopes.abs()[:, None, None] * x.distance()
    largest = float(channels.max()) if channels.numel() else 0.0
    noise = (8 + 8 * largest + len(x.q) / 8) * wide.eps * (4 if dtype == torch.float64 else 1)
    for what, test in (("NaN", torch.isnan), ("-inf", torch.isneginf)):
        if not torch.equal(test(ours), test(exact)):
            raise Mismatch(f"{name}: {what} differs")
    error = (ours - exact).nan_to_num(0, 0, 0).abs()
    bound = noise * (1 + exact.nan_to_num(0, 0, 0).abs()) + wide.tiny
    if not (error <= bound).all():
        at = tuple((error - bound).flatten().argmax().reshape(1).tolist())
        raise Mismatch(
            f"{name}: error {error.max():.3g} at {at} of {tuple(exact.shape)}, bound {bound.min():.3g}"
        )
