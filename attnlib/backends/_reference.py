"""The reference backend: the definition, sequence by sequence and query by query."""

from itertools import pairwise

import torch
from torch import Tensor

from ..call import Call, Score
from ..kv import KVView
from ..philox import dropout_keep
from ..reference import attend
from ..spec import AttentionSpec


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    if spec.kind == "cached" and spec.grad:
        return ["cached attention has no backward; wrap the call in torch.no_grad()"]
    return []


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V, materialise scores, or wait for the device."""
    return ["runs the definition, one query at a time, and copies the keys each query sees"]


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE, with gradients."""
    call = _widened(call)
    q, k, v = call.q, call.k, call.v
    if call.packing is None:
        starts = [0] * len(q) if call.key_starts is None else call.key_starts.tolist()
        ends = [k.shape[1]] * len(q) if call.key_ends is None else call.key_ends.tolist()
        solved = [_sequence(n, q[n], k[n], v[n], (starts[n], ends[n]), call) for n in range(len(q))]
        return _joined(solved, q, None, v.shape[-1], k, v)
    rows, keys = call.packing.read(queries=q.shape[0], keys=k.shape[0])
    solved = []
    for n, ((r0, r1), (k0, k1)) in enumerate(zip(pairwise(rows), pairwise(keys), strict=True)):
        solved.append(_sequence(n, q[r0:r1], k[k0:k1], v[k0:k1], (0, k1 - k0), call))
    return _joined(solved, q, rows[-1], v.shape[-1], k, v)


def cached_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    solved, call = [], _widened(call)
    q, kv = call.q, call.kv
    rows = None if kv.cu_seqlens_q is None else kv.cu_seqlens_q.tolist()
    for n, (start, length) in enumerate(zip(kv.starts.tolist(), kv.lengths.tolist(), strict=True)):
        queries = q[n] if rows is None else q[rows[n] : rows[n + 1]]
        solved.append(_sequence(n, queries, *_stored(kv, n, start, length), (start, length), call))
    return _joined(solved, q, None if rows is None else rows[-1], kv.layout.value_dim)


def prepare(call: Call) -> None:
    """No call is quicker the second time."""


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _widened(call: Call) -> Call:
    """The tensors of the score in its dtype, once, so that their gradients add up in it."""
    wide = _wide(call.q)
    return call._replace(score=Score(*(x.to(wide) if isinstance(x, Tensor) else x for x in call.score)))


def _joined(
    solved: list[tuple[Tensor, Tensor]], q: Tensor, used: int | None, value_dim: int, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and LSE of all sequences. Packed queries from ``used`` on belong to none; of dense ones it is None.

    What belongs to no sequence depends on no channel of q and these others, but on all of them to autograd.
    """
    if used is None and solved:
        return tuple(torch.stack(x) for x in zip(*solved, strict=True))
    q = q[used:]
    zero = q[..., :0].sum(-1) + sum(x[..., :0].sum() for x in others)
    solved.append((zero[..., None].expand(*q.shape[:-1], value_dim), zero.mT.to(_wide(q)) - torch.inf))
    outs, lses = zip(*solved, strict=True)
    return torch.cat(outs), torch.cat(lses, -1)


def _sequence(n: int, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, int], call: Call) -> tuple[Tensor, Tensor]:
    """One sequence: q ``[s, h, d]``, k ``[t, g, d]``, v ``[t, g, e]``, keys visible within ``bounds``."""
    (s, h, _), t, p, options = q.shape, k.shape[0], call.dropout.p, call.score._asdict()
    stored = torch.arange(t, device=q.device)
    query, key, head, sequence = (x if isinstance(x, int) else int(x[n]) for x in call.origin)
    i, j = query + torch.arange(t - s, t, device=q.device)[:, None], key + stored
    visible = call.mask.visible(i, j) & (stored >= bounds[0]) & (stored < bounds[1])
    bias = weight = None
    slopes = options.pop("alibi_slopes")
    if slopes is not None:
        bias = -(slopes if slopes.dim() == 1 else slopes[n])[:, None, None] * (i - j).abs()
    if p > 0:
        heads = torch.arange(head, head + h, device=q.device)
        sequences = torch.tensor([sequence + n], device=q.device)
        where = {"sequences": sequences, "heads": heads, "rows": i[:, 0], "first": key, "last": key + t}
        weight = dropout_keep(int(call.dropout.seed), p, **where)[0].to(_wide(q)) / (1 - p)
    return attend(q, k, v, visible, bias=bias, weight=weight, **options)


def _stored(kv: KVView, n: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of sequence ``n``, ``[length, g, *]``; zeros before ``start``, which padding may still be."""
    start = max(0, min(start, length))
    capacity, pages = kv.table.shape[1] * kv.page_size, kv.k.shape[0]
    if length > capacity:
        raise ValueError(f"lengths: expected at most {capacity} tokens like the table, got {length}")
    at = torch.arange(start, length, device=kv.k.device)
    page, offset = kv.table[n, at // kv.page_size].long(), at % kv.page_size
    if start < length and not (page.min() >= 0 and page.max() < pages):
        raise ValueError(f"table: expected pages in [0, {pages}), got {page.min()} to {page.max()} in sequence {n}")

    def read(plane: Tensor, scale: Tensor | None = None) -> Tensor:
        x = plane[page, offset]
        x = (x if scale is None else x.float() * scale[page, offset][..., None]).to(kv.layout.dtype)
        return torch.cat((x.new_zeros(start, *x.shape[1:]), x))

    k, v = read(kv.k, kv.k_scale), read(kv.v, kv.v_scale)
    return (k if kv.k_tail is None else torch.cat((k, read(kv.k_tail)), -1)), v
