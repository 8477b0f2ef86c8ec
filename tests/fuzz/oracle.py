"""Attention in fp64, and what a cache holds, written from docs/conventions.md alone; nothing here is
attnlib's.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Rule(NamedTuple):
    """The numbers of a call. ``seed`` is the signed 64-bit number that dropout's bits come from."""

    left: int | None = None
    right: int | None = None
    prefix: int = 0
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0


@dataclass
class Sequence:
    """One sequence: q ``[s, h, d]`` are the last ``s`` of the keys k ``[t, g, d]``, with values v ``[t, g,
    e]``.

    ``slopes`` and ``sinks`` are ``[h]``; keys outside ``[start, end)`` are hidden; ``number`` is its place in
    the call. ``chosen`` is a bool ``[h, s, t]``, False for what is hidden too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    start: int = 0
    end: int | None = None
    number: int = 0
    chosen: Tensor | None = None

    @property
    def kv_heads(self) -> list[int]:
        """The KV head that each query head reads."""
        h, g = self.q.shape[1], self.k.shape[1]
        return [head // (h // g) for head in range(h)]

    def visible(self, rule: Rule) -> Tensor:
        """Which keys each query sees, bool ``[h, s, t]``, or ``[1, s, t]`` if all heads see the same."""
        s, t = len(self.q), len(self.k)
        i, j = torch.arange(s)[:, None] + (t - s), torch.arange(t)[None, :]
        seen = torch.ones(s, t, dtype=torch.bool)
        if rule.left is not None:
            seen &= i - j <= rule.left
        if rule.right is not None:
            seen &= j - i <= rule.right
        seen |= j < rule.prefix
        seen &= (j >= self.start) & (j < (t if self.end is None else self.end))
        return seen[None] if self.chosen is None else seen & self.chosen

    def unsure(self, rule: Rule) -> Tensor:
        """Whose results may be NaN, bool ``[h]``: a key or a query of this KV head is not finite.

        A mask may hide it from others of the sequence, and they may multiply it by zero. What lies outside
        the bounds, and a query to which the band shows nothing, does not count.
        """
        t, rows = len(self.k), replace(self, chosen=None).visible(rule)[0].any(1)
        inside = slice(max(0, self.start), max(0, t if self.end is None else self.end))
        if not rows.any():
            return torch.zeros(self.q.shape[1], dtype=torch.bool)
        keys = torch.cat((self.k[inside], self.v[inside]), -1).isfinite().all(-1).all(0)
        queries = self.q[rows].isfinite().all(-1).all(0).unflatten(0, (len(keys), -1))
        return (~keys | ~queries.all(1)).repeat_interleave(queries.shape[1])

    def distance(self) -> Tensor:
        """``|i - j|``, ``[s, t]``."""
        s, t = len(self.q), len(self.k)
        return (torch.arange(s)[:, None] + (t - s) - torch.arange(t)).abs()

    def kept(self, rule: Rule) -> Tensor:
        """What dropout multiplies weights by, ``[h, s, t]``: 0 or ``1 / (1 - p)``."""
        s, t, h = len(self.q), len(self.k), self.q.shape[1]
        quads = np.arange(-(-t // 4))
        rows = np.arange(t - s, t)[:, None] % 2**32
        words = philox((quads, rows, np.arange(h)[:, None, None], self.number), rule.seed)
        bits = np.stack(words, -1).reshape(h, s, 4 * len(quads))[..., :t]
        return torch.from_numpy((bits >= rule.dropout_p * 2.0**32) / (1 - rule.dropout_p))


def attend(
    x: Sequence, rule: Rule, *, stored: torch.dtype | None = None, backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """Output ``[s, h, e]`` and natural-log LSE ``[h, s]`` in the dtype of x, differentiable.

    ``stored`` is what weights are rounded to before they meet values, and ``backwards`` adds from the other
    end on: eager attention in less precision, to measure errors by.
    """
    q, k, v, letters = _seen(x, rule, stored or x.q.dtype)
    weights, lse = _softmax(x, rule, _scores(x, rule, q, k, letters, backwards=backwards))
    weights = weights[..., :-1]
    if rule.dropout_p > 0:
        weights = weights * x.kept(rule).to(weights.dtype)
    if stored is not None:
        weights = weights.to(stored).to(v.dtype)
    if backwards:
        weights, v = weights.flip(-1), v.flip(-3)
    return torch.einsum(f"hst,{letters}e->she", weights, v), lse


def _seen(x: Sequence, rule: Rule, stored: torch.dtype) -> tuple[Tensor, Tensor, Tensor, str]:
    """q, and k and v with a head for each of q's, 0 for what is hidden; and the letters of k's and v's
    dimensions.

    Gradients of the heads of a group are added up as ``stored``.
    """
    heads, visible = x.kv_heads, x.visible(rule)
    q = torch.where(visible.any(2).T[..., None], x.q, 0)
    used = visible.any(1).T[..., None]  # what no query sees may hold anything
    k, v = (torch.where(used, y.to(stored)[:, heads].to(y.dtype), 0) for y in (x.k, x.v))
    if k.isfinite().all() and v.isfinite().all() and q.isfinite().all():
        return q, k, v, "th"
    # What some queries see and others do not: each gets keys of its own.
    pairs = visible.permute(1, 2, 0)[..., None]
    return q, torch.where(pairs, k, 0), torch.where(pairs, v, 0), "sth"


def _scores(x: Sequence, rule: Rule, q: Tensor, k: Tensor, letters: str, *, backwards: bool) -> Tensor:
    """``[h, s, t]``, -inf where hidden."""
    if backwards:
        logits = torch.einsum(f"shd,{letters}d->hst", q.flip(-1) * rule.scale, k.flip(-1))
    else:
        logits = torch.einsum(f"shd,{letters}d->hst", q, k) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    if x.slopes is not None:
        logits = logits - x.slopes.to(q.dtype)[:, None, None] * x.distance()
    return logits.masked_fill(~x.visible(rule), -torch.inf)


def scores(x: Sequence, rule: Rule) -> Tensor:
    """Scores ``[h, s, t]`` in the dtype of x, -inf where hidden."""
    q, k, _, letters = _seen(x, rule, x.q.dtype)
    return _scores(x, rule, q, k, letters, backwards=False)


def _softmax(x: Sequence, rule: Rule, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``[h, s, t + 1]``, the sinks' last, and LSE ``[h, s]``; 0 and -inf where there is nothing to
    see.
    """
    sinks = logits.new_full((len(logits),), -torch.inf) if x.sinks is None else x.sinks.to(logits.dtype)
    logits = torch.cat((logits, sinks[:, None, None].expand(*logits.shape[:2], 1)), -1)
    nothing = (logits == -torch.inf).all(-1)
    logits = logits.masked_fill(nothing[..., None], 0)
    lse = torch.logsumexp(logits, -1).masked_fill(nothing, -torch.inf)
    return torch.softmax(logits, -1).masked_fill(nothing[..., None], 0), lse


def chosen(lists: Tensor, block_size: int, heads: int, keys: int) -> Tensor:
    """Bool ``[h, s, t]``, True where lists ``[s, c, n]`` name the block of a key."""
    s, c, _ = lists.shape
    found = torch.zeros(c, s, keys, dtype=torch.bool)
    for query, head, entry in (lists >= 0).nonzero().tolist():
        block = int(lists[query, head, entry])
        found[head, query, block * block_size : (block + 1) * block_size] = True
    return found.repeat_interleave(heads // c, 0)


def magnitudes(x: Sequence, rule: Rule, dout: Tensor, dlse: Tensor) -> tuple[dict[str, Tensor], float]:
    """How large the terms are that add up to each result and gradient, and the terms of the largest score.

    One rounding of every term moves a result by about its magnitude times the precision, whatever cancels.
    """
    finite = replace(x, **{name: getattr(x, name).nan_to_num(0, 0, 0) for name in "qkv"})
    q, k, v, _ = _seen(finite, rule, x.q.dtype)
    p, of_sinks = _softmax(x, rule, _scores(x, rule, q, k, "th", backwards=False))[0].split((len(k), 1), -1)
    q, k, v, dout, dlse = (y.abs() for y in (q, k, v, dout, dlse))
    kept = x.kept(rule) if rule.dropout_p > 0 else torch.ones_like(p)
    out = torch.einsum("hst,the->she", p * kept, v)
    delta = torch.einsum("she,she->hs", dout, out) + dlse
    dlogits = p * (torch.einsum("she,the->hst", dout, v) * kept + delta[..., None])
    group = q.shape[1] // x.k.shape[1]
    sizes = {
        "out": out,
        "dq": rule.scale * torch.einsum("hst,thd->shd", dlogits, k),
        "dk": rule.scale * torch.einsum("hst,shd->thd", dlogits, q).unflatten(1, (-1, group)).sum(2),
        "dv": torch.einsum("hst,she->the", p * kept, dout).unflatten(1, (-1, group)).sum(2),
        "dalibi_slopes": (dlogits * x.distance()).sum((1, 2)),
        "dsinks": (of_sinks[..., 0] * delta).sum(1),
    }
    logits = rule.scale * torch.einsum("shd,thd->hst", q, k)
    if x.slopes is not None:
        logits = logits + x.slopes.abs().to(q.dtype)[:, None, None] * x.distance()
    logits = logits.masked_fill(~x.visible(rule), 0)
    return sizes, float(logits.max()) if logits.numel() else 0.0


class Token(NamedTuple):
    """What one token holds in one layer: k ``[g, d]``, v ``[g, e]`` and its index keys, if any, in fp64."""

    k: Tensor
    v: Tensor
    index: Tensor | None = None


@dataclass
class Memory:
    """What a cache should hold: for each sequence its left padding, and for each layer a list of tokens."""

    layers: int
    padding: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)

    def admit(self, name, padding: int = 0) -> None:
        self.padding[name], self.tokens[name] = padding, [[] for _ in range(self.layers)]

    def fork(self, name, child) -> None:
        self.padding[child], self.tokens[child] = (
            self.padding[name],
            [list(layer) for layer in self.tokens[name]],
        )

    def truncate(self, name, length: int) -> None:
        self.tokens[name] = [layer[:length] for layer in self.tokens[name]]

    def release(self, name) -> None:
        del self.padding[name], self.tokens[name]

    def length(self, name) -> int:
        return len(self.tokens[name][0])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x ``[n, g, d]`` with its first channels turned in pairs by ``[n, p / 2]``, in fp32 or x's fp64, then
    rounded.
    """
    half, turned = cos.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32)).clone()
    for c in range(half):
        a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
        first, second = turned[..., a].clone(), turned[..., b].clone()
        turned[..., a] = first * cos[:, None, c] - second * sin[:, None, c]
        turned[..., b] = second * cos[:, None, c] + first * sin[:, None, c]
    return turned.to(x.dtype)


def quantised(x: Tensor, store: torch.dtype, wiggle: float = 1.0) -> Tensor:
    """x ``[..., d]`` as one byte a value and an fp32 scale a row hold it, in fp64; ``wiggle`` moves what is
    rounded.
    """
    limit = 127.0 if store == torch.int8 else 448.0
    scale = (x.float().abs().amax(-1, keepdim=True) / limit).double()
    steps = (x.double() / torch.where(scale == 0, 1, scale) * wiggle).clamp(-limit, limit)
    return (steps.round() if store == torch.int8 else _as_e4m3(steps)) * scale


def _as_e4m3(x: Tensor) -> Tensor:
    """The nearest number with three bits after the point, and no more below ``2**-6``; ties to even."""
    exponent = x.abs().clamp_min(2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    return (x / step).round() * step


def philox(counter: tuple, seed: int) -> list[np.ndarray]:
    """Four arrays of 32-bit words of Philox-4x32-10 for four counter words that broadcast.

    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011. The key is the two
    words of ``seed``, the low one first.
    """
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = (np.asarray(word).astype(np.uint64) for word in np.broadcast_arrays(*counter))
    keys = [np.uint64(seed % 2**32), np.uint64(seed // 2**32 % 2**32)]
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = right >> 32 ^ b ^ keys[0], right & low, left >> 32 ^ d ^ keys[1], left & low
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return [a, b, c, d]
