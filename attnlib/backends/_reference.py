"""The reference backend: the definition, sequence by sequence and query by query."""

from itertools import pairwise

import torch
from torch import Tensor

from ..call import Call
from ..kv import KVView
from ..philox import kept
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
        t = k.shape[1]
        starts = [0] * len(q) if call.key_starts is None else call.key_starts.tolist()
        ends = [t] * len(q) if call.key_ends is None else call.key_ends.tolist()
        solved = [_sequence(n, q[n], k[n], v[n], (starts[n], ends[n]), call) for n in range(len(q))]
        if not solved:
            return _nothing(q, v.shape[-1], k, v)
        return tuple(torch.stack(x) for x in zip(*solved, strict=True))
    rows, keys = call.packing.read(queries=q.shape[0], keys=k.shape[0])
    solved = []
    for n, ((r0, r1), (k0, k1)) in enumerate(zip(pairwise(rows), pairwise(keys), strict=True)):
        solved.append(_sequence(n, q[r0:r1], k[k0:k1], v[k0:k1], (0, k1 - k0), call))
    outs, lses = zip(*solved, _nothing(q[rows[-1] :], v.shape[-1], k, v), strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def cached_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Attention over stored keys and its LSE."""
    solved, call = [], _widened(call)
    q, kv = call.q, call.kv
    cu = None if kv.cu_seqlens_q is None else kv.cu_seqlens_q.tolist()
    for n, (start, length) in enumerate(zip(kv.starts.tolist(), kv.lengths.tolist(), strict=True)):
        k, v = _stored(kv, n, start, length)
        queries = q[n] if cu is None else q[cu[n] : cu[n + 1]]
        solved.append(_sequence(n, queries, k, v, (start, length), call))
    if cu is None and solved:
        return tuple(torch.stack(x) for x in zip(*solved, strict=True))
    outs, lses = zip(*solved, _nothing(q if cu is None else q[cu[-1] :], kv.layout.value_dim), strict=True)
    return torch.cat(outs), torch.cat(lses, -1)


def prepare(call: Call) -> None:
    """No call is quicker the second time."""


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _widened(call: Call) -> Call:
    """Slopes and sinks in the dtype of scores, once, so that their gradients add up in it."""
    score, wide = call.score, _wide(call.q)
    slopes, sinks = (x if x is None else x.to(wide) for x in (score.alibi_slopes, score.sinks))
    return call._replace(score=score._replace(alibi_slopes=slopes, sinks=sinks))


def _nothing(q: Tensor, value_dim: int, *others: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries that belong to no sequence: of no channel of these tensors, but of all to autograd."""
    zero = q[..., :0].sum(-1) + sum(x[..., :0].sum() for x in others)
    return zero[..., None].expand(*q.shape[:-1], value_dim), zero.transpose(-1, -2).to(_wide(q)) - torch.inf


def _sequence(n: int, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, int], call: Call) -> tuple[Tensor, Tensor]:
    """One sequence: q ``[s, h, d]``, k ``[t, g, d]``, v ``[t, g, e]``, keys visible within ``bounds``."""
    (s, h, _), t, score = q.shape, k.shape[0], call.score
    stored = torch.arange(t, device=q.device)
    query, key, head, sequence = (x if isinstance(x, int) else int(x[n]) for x in call.origin)
    i, j = query + torch.arange(t - s, t, device=q.device)[:, None], key + stored
    visible = call.mask.visible(i, j) & (stored >= bounds[0]) & (stored < bounds[1])
    bias = weight = None
    if score.alibi_slopes is not None:
        slopes = score.alibi_slopes if score.alibi_slopes.dim() == 1 else score.alibi_slopes[n]
        bias = -slopes[:, None, None] * (i - j).abs()
    if call.dropout.p > 0:
        weight = _kept(i[:, 0], j, head + torch.arange(h, device=q.device), sequence + n, call)
        weight = weight.to(_wide(q)) / (1 - call.dropout.p)
    options = {name: x for name, x in score._asdict().items() if name != "alibi_slopes"}
    return attend(q, k, v, visible, bias=bias, weight=weight, **options)


def _kept(i: Tensor, j: Tensor, heads: Tensor, sequence: int, call: Call) -> Tensor:
    """Which probabilities ``[h, s, t]`` of queries ``i`` and keys ``j`` dropout keeps."""
    where = {"sequences": torch.tensor([sequence], device=i.device), "heads": heads, "rows": i}
    first = int(j[0]) if len(j) else 0
    return kept(int(call.dropout.seed), call.dropout.p, **where, first=first, last=first + len(j))[0]


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

    def read(plane: Tensor, scale: Tensor | None) -> Tensor:
        x = plane[page, offset].to(kv.layout.dtype) if scale is None else _dequantised(plane, scale, page, offset, kv)
        return torch.cat((x.new_zeros(start, *x.shape[1:]), x))

    k, v = read(kv.k, kv.k_scale), read(kv.v, kv.v_scale)
    return (k if kv.k_tail is None else torch.cat((k, read(kv.k_tail, None)), -1)), v


def _dequantised(plane: Tensor, scale: Tensor, page: Tensor, offset: Tensor, kv: KVView) -> Tensor:
    return (plane[page, offset].float() * scale[page, offset][..., None]).to(kv.layout.dtype)
