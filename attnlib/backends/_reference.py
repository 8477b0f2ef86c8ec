"""The reference backend: attention computed from its definition, one sequence and one query at a time."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call.call import Call, PieceGradients, Score
from ..call.selection import selection_of
from ..call.spec import AttentionSpec
from ..call.statistic import Statistic
from ..fp8 import E4M3, per_token, quantized
from ..internal.philox import dropout_keep
from ..kv import KVView
from ..masks.band import AnyMask, Mask
from ..masks.selection import ShownBlocks
from ..reference import attend
from .operators import result_dtype, wide


def unsupported(spec: AttentionSpec) -> list[str]:
    """Return the reasons why this backend cannot run ``spec``."""
    return spec.without_backward


def slow(spec: AttentionSpec) -> list[str]:
    """Return the reasons why this backend is slow, the same for every call."""
    return ["runs the definition, one query at a time, and copies the keys each query sees"]


def failures(spec: AttentionSpec) -> list[str]:
    """Return no failures, since this backend uses only public functions."""
    return []


def variant(call: Call) -> str:
    """Return an empty name for the kernels, since all calls run the same code."""
    return ""


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and LSE, with gradients if keys and values are tensors."""
    if call.spec.compute_dtype is not None:
        return _in_fp8(call)
    q, k, v, score = call.q, call.k, call.v, call.score
    if call.descales is not None:
        q, k, v = _dequantized(call)
        call = call._replace(q=q, k=k, v=v)
    call = _widened(call)
    solved = [_sequence(n, *each, call) for n, each in enumerate(_sequences(call))]
    outs, lses = [out for out, _ in solved], [lse.mT for _, lse in solved]
    # Queries that belong to no sequence get an output of 0 and an LSE of -inf. The sums of empty slices are
    # 0; they only connect these queries to all other tensors in autograd.
    rest = q.flatten(0, -3)[sum(map(len, outs)) :]
    others = k, v, *score.tensors.values(), *(() if score.function is None else score.function.tensors)
    zero = rest[..., :0].sum(-1) + sum(x.flatten()[:0].to(wide(q)).sum() for x in others if x is not None)
    out = torch.cat((*outs, zero[..., None].expand(-1, -1, call.spec.value_dim)))
    lse = torch.cat((*lses, zero.to(wide(q)) - torch.inf))
    out = out.to(result_dtype(call.spec.dtype))
    return out.view(*q.shape[:-1], call.spec.value_dim), lse.view(q.shape[:-1]).mT


cached_attention = attention


def statistic(call: Call, wanted: Statistic) -> Tensor:
    """Return a statistic of a call, from its scores."""
    call, result = _widened(call), wanted.result(call.q, call.k)
    result.fill_(-torch.inf if wanted.kind == "maxima" else 0)
    row = key = 0
    for n, (q, k, _, start, end) in enumerate(_sequences(call)):
        s, t, packed = len(q), len(k), call.packing is not None
        scores = _scores(n, q, k, start, end, call)
        queries, keys = slice(row, row + s), slice(key, key + t)
        if wanted.kind == "maxima" and t:
            (result[:, queries] if packed else result[n])[:] = scores.amax(-1)
        elif wanted.kind != "maxima":
            given = wanted.lse[:, queries] if packed else wanted.lse[n]
            p = torch.exp(scores - given[..., None]).masked_fill(given[..., None] == -torch.inf, 0)
            first = call.origin.key if isinstance(call.origin.key, int) else int(call.origin.key[n])
            if wanted.kind == "heads":
                own, at = (x[queries] if packed else x[n] for x in (result, wanted.at))
                _add_means(own, p.mean(0), at - first)
            elif wanted.rows is None:
                (result[:, keys] if packed else result[n]).add_(p.sum(1))
            else:
                rows = wanted.rows if wanted.rows.dim() == 1 else wanted.rows[n]
                at = slice(first, first + t) if wanted.kind == "rows" else keys if packed else slice(0, t)
                _add_rows((result if packed else result[n])[..., at], p, (rows - row).tolist())
        row, key = (row + s, key + t) if packed else (0, 0)
    return result


def _add_means(own: Tensor, p: Tensor, at: Tensor) -> None:
    """Add probabilities ``[s, t]`` at the keys ``at`` to ``own``; both are ``[s, n]``."""
    exists = (at >= 0) & (at < p.shape[-1])
    own[exists] += p[exists.nonzero()[:, 0], at[exists]]


def _add_rows(own: Tensor, p: Tensor, rows: list[int]) -> None:
    """Add the probabilities of some rows of ``p`` ``[h, s, t]`` to ``own``: ``[h, r, t]``, or their sum."""
    for slot, row in enumerate(rows):
        if 0 <= row < p.shape[1]:
            (own[:, slot] if own.dim() == 3 else own).add_(p[:, row])


def gradients(call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
    """Return what ``call``, a chunk of a larger call, contributes to the gradients of that larger call.

    ``dout``, ``out`` and ``lse`` belong to the larger call, and have only the queries of the chunk. The
    output of the larger call is the sum of its chunks' outputs, each weighted by exp of the chunk's LSE minus
    ``lse``.
    """
    leaves = {name: getattr(call, name).detach().requires_grad_() for name in ("q", "k", "v")}
    # The only tensor option is the ALiBi slopes, since a chunk has no sinks.
    options = {name: x.detach().requires_grad_() for name, x in call.score.tensors.items()}
    function, captured = call.score.function, []
    if function is not None:
        captured = [x.detach().requires_grad_(x.is_floating_point()) for x in function.tensors]
        options["function"] = function.reading(captured)
    slopes = [x for x in options.values() if isinstance(x, Tensor)]
    with torch.enable_grad():
        own_out, own_lse = attention(call._replace(**leaves, score=call.score._replace(**options)))
        weight = torch.exp(own_lse - lse).masked_fill(own_lse == -torch.inf, 0).detach()
        dlse = ((own_out - out) * dout).sum(-1).mT.to(lse.dtype) * weight
        inputs = [*leaves.values(), *slopes, *(x for x in captured if x.requires_grad)]
        given = dout * weight.mT.unsqueeze(-1).to(dout.dtype), dlse
        grads = torch.autograd.grad((own_out, own_lse), inputs, given, materialize_grads=True)
    rest = iter(grads[3 + len(slopes) :])
    captured_grads = [next(rest) if x.requires_grad else None for x in captured]
    return PieceGradients(*grads[:3], grads[3] if slopes else lse.new_empty(0), captured_grads)


def prepare(call: Call) -> None:
    """Return None: this backend has no faster way to repeat a call."""


def _widened(call: Call) -> Call:
    """Convert slopes, sinks and similar tensors to the dtype of scores, once for all sequences.

    Their gradients are then also summed in that dtype.
    """
    dtype = wide(call.q)
    return call._replace(score=Score(*(x.to(dtype) if isinstance(x, Tensor) else x for x in call.score)))


def _in_fp8(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and LSE of a call whose forward rounds q, k and v to e4m3.

    With gradients, they are the output and LSE of the e4m3 call plus terms of value 0. The derivatives of
    these terms are those of the call in fp32 on the rounded numbers, with the probabilities and outputs of
    the e4m3 call.
    """
    q, k, v, packing, spec = call.q, call.k, call.v, call.packing, call.spec._replace(compute_dtype=None)
    offsets = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    x = quantized((q.detach(), k.detach(), v.detach()), offsets, (call.key_starts, call.key_ends))
    given = {"q": x.q, "k": x.k, "v": x.v, "descales": x.descales}
    with torch.no_grad():
        out, lse = attention(call._replace(spec=spec._replace(dtype=E4M3), **given))
    if not spec.grad:
        return out.to(q.dtype), lse
    rounded = _dequantized(call._replace(**given))
    wide = {
        name: x.to(q.dtype).float() + (y.float() - y.detach().float())
        for name, x, y in zip("qkv", rounded, (q, k, v), strict=True)
    }
    own, own_lse = attention(call._replace(spec=spec._replace(dtype=torch.float32), **wide))
    own_lse, out = own_lse.masked_fill(own_lse == -torch.inf, 0), out.to(q.dtype).float()
    # Clamped, because infinity times 0 would be NaN.
    weight = torch.exp(own_lse - lse).masked_fill(lse == -torch.inf, 0).detach()
    weight = weight.clamp(max=torch.finfo(weight.dtype).max)
    step = (own_lse - own_lse.detach()) * weight
    out = out + (own - own.detach()) * weight.mT[..., None] + (own.detach() - out) * step.mT[..., None]
    return out.to(q.dtype), lse + step


def _dequantized(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Multiply q, k and v by their descales, and return them in fp32.

    Over a cache, k and v are None here: cached keys and values are scaled when they are read.
    """
    descales, packing = call.descales, call.packing
    if call.kv is not None:
        return _scaled(call.q, descales.q_descale, call.kv.cu_seqlens_q), None, None
    cu_seqlens_q, cu_seqlens_k = (
        (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    )
    k, v = (
        _scaled(call.k, descales.k_descale, cu_seqlens_k),
        _scaled(call.v, descales.v_descale, cu_seqlens_k),
    )
    return _scaled(call.q, descales.q_descale, cu_seqlens_q), k, v


def _scaled(x: Tensor, descale: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return x.float() * per_token(descale, x.shape[-3], cu_seqlens)


def _sequences(call: Call) -> Iterator[tuple[Tensor, Tensor, Tensor, int, int]]:
    """Yield q ``[s, h, d]``, k ``[t, g, d]``, v ``[t, g, e]`` and the visible key range of each sequence."""
    q, k, v, kv = call.q, call.k, call.v, call.kv
    if kv is not None:
        queries = (
            q if kv.cu_seqlens_q is None else [q[r0:r1] for r0, r1 in pairwise(kv.cu_seqlens_q.tolist())]
        )
        for n, bounds in enumerate(zip(kv.starts.tolist(), kv.lengths.tolist(), strict=True)):
            yield queries[n], *_stored(kv, n, *bounds), *bounds
    elif call.packing is not None:
        rows, keys = call.packing.read(queries=q.shape[0], keys=k.shape[0])
        for (r0, r1), (k0, k1) in zip(pairwise(rows), pairwise(keys), strict=True):
            yield q[r0:r1], k[k0:k1], v[k0:k1], 0, k1 - k0
    else:
        starts = [0] * len(q) if call.key_starts is None else call.key_starts.tolist()
        ends = [k.shape[1]] * len(q) if call.key_ends is None else call.key_ends.tolist()
        yield from zip(q, k, v, starts, ends, strict=True)


def _scores(n: int, q: Tensor, k: Tensor, start: int, end: int, call: Call) -> Tensor:
    """Return the scores ``[h, s, t]`` of sequence ``n``: -inf for hidden pairs."""
    options, shape = _options(n, q, k, start, end, call), (q.shape[1], len(q), len(k))
    own, scores = options.pop("change"), q.new_full(shape, -torch.inf, dtype=wide(q))

    def record(score: Tensor, row: int, keys: Tensor) -> Tensor:
        scores[:, row, keys] = score if own is None else own(score, row, keys)
        return score

    attend(q, k, k[..., :0], change=record, **options)
    return scores.masked_fill(~options["visible"], -torch.inf)


def _sequence(
    n: int, q: Tensor, k: Tensor, v: Tensor, start: int, end: int, call: Call
) -> tuple[Tensor, Tensor]:
    """Return the output and LSE of sequence ``n``, whose keys outside ``[start, end)`` are hidden."""
    return attend(q, k, v, **_options(n, q, k, start, end, call))


def _options(n: int, q: Tensor, k: Tensor, start: int, end: int, call: Call) -> dict[str, Any]:
    """Return the arguments of ``attend`` for sequence ``n``, except q, k and v."""
    (s, h, _), t, p, options = q.shape, k.shape[0], call.dropout.p, call.score._asdict()
    function = options.pop("function")
    stored = torch.arange(t, device=q.device)
    query, key, head, sequence = (x if isinstance(x, int) else int(x[n]) for x in call.origin)
    i, j = query + torch.arange(t - s, t, device=q.device)[:, None], key + stored
    heads = torch.arange(head, head + h, device=q.device)
    own, first = torch.tensor(sequence + n, device=q.device), torch.tensor(query + t - s, device=q.device)
    visible = _visible(call.mask, own, heads, i, j, first) & (stored >= start) & (stored < end)
    if (selection := selection_of(call.mask)) is not None:
        lists = selection._replace(indices=_rows(selection.indices, n, s, call)[None])
        visible = visible & ShownBlocks.of(lists, key, key + t).keys(j, h)[0].expand(h, s, t)
    bias = weight = change = None
    if function is not None:

        def change(score: Tensor, row: int, keys: Tensor) -> Tensor:
            return function.definition(score, own, heads[:, None], i[row], j[keys], first).to(score.dtype)

    slopes = options.pop("alibi_slopes")
    if slopes is not None:
        bias = -(slopes if slopes.dim() == 1 else slopes[n])[:, None, None] * (i - j).abs()
    if p > 0:
        where = {"sequences": own[None], "heads": heads, "rows": i[:, 0], "first": key, "last": key + t}
        weight = dropout_keep(int(call.dropout.seed), p, **where)[0].to(wide(q)) / (1 - p)
    return {"visible": visible, "bias": bias, "change": change, "weight": weight, **options}


def _visible(mask: AnyMask, b: Tensor, heads: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
    """Return a bool tensor ``[s, t]`` that is True if query ``i`` may see key ``j``.

    For a mask function, the tensor is ``[h, s, t]``. ``i`` is ``[s, 1]``, and ``j`` is ``[t]``.
    """
    if isinstance(mask, Mask):
        return mask.visible(i, j)
    mask = mask.with_lists(None)
    return mask.visible(b, heads[:, None, None], i, j, first).expand(len(heads), len(i), len(j))


def _rows(x: Tensor, n: int, s: int, call: Call) -> Tensor:
    """Return the rows of the ``s`` queries of sequence ``n``, from ``x`` ``[b, s, ...]`` or packed."""
    if call.q.dim() == 4:
        return x[n]
    offsets = call.packing.cu_seqlens_q if call.kv is None else call.kv.cu_seqlens_q
    return x.narrow(0, int(offsets[n]), s)


def _stored(kv: KVView, n: int, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the cached keys and values ``[length, g, *]`` of sequence ``n``.

    Tokens before ``start`` may be padding, so they are replaced with zeros.
    """
    start = max(0, min(start, length))
    capacity, pages = kv.table.shape[1] * kv.page_size, kv.k.shape[0]
    if length > capacity:
        raise ValueError(f"lengths: expected at most {capacity} tokens like the table, got {length}")
    at = torch.arange(start, length, device=kv.k.device)
    page, offset = kv.table[n, at // kv.page_size].long(), at % kv.page_size
    if start < length and not (page.min() >= 0 and page.max() < pages):
        raise ValueError(
            f"table: expected pages in [0, {pages}), got {page.min()} to {page.max()} in sequence {n}"
        )

    def read(plane: Tensor, scale: Tensor | None = None) -> Tensor:
        x = plane[page, offset]
        x = (x if scale is None else x.float() * scale[page, offset][..., None]).to(kv.layout.dtype)
        return torch.cat((x.new_zeros(start, *x.shape[1:]), x))

    k, v = read(kv.k, kv.k_scale), read(kv.v, kv.v_scale)
    return (k if kv.k_rope is None else torch.cat((k, read(kv.k_rope)), -1)), v
