"""The expanded and absorbed forms of MLA: a rule that selects one, and the expanded form over a cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cache.sequences import Prompt
from ..call.call import Call, Origin, Packing, Score
from ..call.selection import refuse_selection
from ..dispatch.run import attend
from ..functional import varlen_attention_with_lse
from ..kv import KVView
from ..masks.band import FULL, AnyMask, Mask
from ..merge import merge_states
from ..scores import ScoreFunction
from .context_parallel import ContextParallel, KeyValueSource, check_context_parallel
from .positions import sequence_of
from .tensor_parallel import MARK, local_weight

# The number of stored tokens, over all sequences, that are expanded to K and V at once. With DeepSeek-V3's
# 128 heads of 192 + 128 channels in bf16, K and V take 640 MiB. Computing them is enough work to fill a GPU.
CHUNK = 8192
# A prompt of a packed step is expanded only if that saves this many multiplications, summed over heads.
# Smaller savings would not pay for writing and reading K and V and for the extra launches. The table has
# times of a step with one prompt and 31 or 63 other sequences (H200, CUDA graph replay, 2026-11):
#   prompt tokens  history  heads  saved    absorbed  expanded
#             300       8k    128  2**36.7   2.76 ms   3.48 ms
#             512       8k    128  2**38     4.26 ms   3.83 ms
#            1024       8k    128  2**39.5   8.20 ms   5.01 ms
#            2048      32k     16  2**39.6   7.68 ms   3.28 ms
WORTH = 1 << 38


FORMS = ("auto", "expanded", "absorbed")


def check_form(form: str, ranks: ContextParallel | None) -> None:
    """Raise ValueError or TypeError for an unknown form, or for "absorbed" with context parallelism."""
    check_context_parallel(ranks)
    if not isinstance(form, str) or form not in FORMS:
        raise ValueError(f"form: expected one of {FORMS}, got {form!r}")
    if form == "absorbed" and ranks is not None:
        raise ValueError(
            "context_parallel: expected form='auto' or 'expanded', since ranks expand the latents that they "
            "receive, got form='absorbed'"
        )


def cheaper_form(
    queries: int, keys: int, *, rank: int, nope: int, rope: int, value: int, least: int = 0
) -> str:
    """Return the form of MLA that needs fewer multiplications per head, for ``queries`` over ``keys``.

    The expanded form up-projects every key. The absorbed form projects every query, and computes scores and
    weighted sums with more channels:

        expanded = keys * rank * (nope + value) + queries * keys * (nope + rope + value)
        absorbed = queries * rank * (nope + value) + queries * keys * (2 * rank + rope)

    Over many keys, expanding is cheaper from about ``rank * (nope + value) / (2 * rank - nope - value)``
    queries on: 171 with DeepSeek-V3's sizes 512, 128 and 128. Pairs that a mask hides count in both forms.
    Over a cache, ``queries`` is the mean over a step's sequences and ``keys`` an upper bound. The expanded
    form is returned only if it saves at least ``least`` multiplications.
    """
    expanded = keys * rank * (nope + value) + queries * keys * (nope + rope + value)
    absorbed = queries * rank * (nope + value) + queries * keys * (2 * rank + rope)
    return "expanded" if absorbed - expanded >= least else "absorbed"


def attend_expanded(
    q: Tensor,
    view: KVView,
    expand: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
    *,
    longest: int | None = None,
    row: int = 0,
    head: int = 0,
    mask: AnyMask,
    scale: float,
    score: ScoreFunction | None,
    backend: str | None,
) -> Tensor:
    """Return attention of q ``[b, s, h, n + p]``, or packed ``[t, h, n + p]``, over stored latents.

    The result is ``[..., h, e]``. ``expand`` computes K ``[c, h, n + p]`` and V ``[c, h, e]`` from latents
    ``[c, r]`` and rotary keys ``[c, p]`` (None if p is 0). It gets ``CHUNK`` tokens at a time, or as many as
    there are queries if that is more: K and V are then no larger than q, and fewer partial results need
    merging. No sequence is longer than ``longest``; None means the capacity of the page table. Mask and score
    functions count sequences from ``row`` and heads from ``head``.

    Raises:
        ValueError: q does not fit the cache step, or the mask reaches further left than the layout's window.
        TypeError: K and V have another dtype than the cache.
        NotImplementedError: a gradient is needed.
    """
    _check(q, view, mask)
    b, capacity = view.lengths.shape[0], view.table.shape[1] * view.page_size
    longest = capacity if longest is None else min(longest, capacity)
    rows, cu_q, queries = q, view.cu_seqlens_q, q.shape[-3]
    if cu_q is None:
        rows, cu_q = q.flatten(0, 1), torch.arange(b + 1, dtype=torch.int32, device=q.device) * queries
    size = max(1, max(CHUNK, rows.shape[0]) // max(1, b))

    state = None
    for starts, ends, band in _chunks(view, mask, size, longest, queries):
        latent, k_rope, cu_k = _read(view, starts, ends, b * size)
        k, v = expand(latent, k_rope)
        check_heads(q, k)
        _check_values(q, v, view)
        if score is None and isinstance(mask, Mask):
            offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            out, lse = varlen_attention_with_lse(
                rows, k, v, **offsets, mask=band, scale=scale, backend=backend
            )
        else:  # mask and score functions need indices within whole sequences
            origin = Origin((view.lengths - cu_k.diff()).int(), starts.int(), head=head, sequence=row)
            options, packing = Score(scale, function=score), Packing(cu_q, cu_k)
            call = Call(rows, mask, options, k, v, packing=packing, origin=origin, lse=True)
            out, lse = attend(call, backend)
        if state is not None:  # merge in fp32, since rounding errors of chunks would add up
            out, lse = merge_states(state[0].to(lse.dtype), state[1], out.to(lse.dtype), lse)
        state = out, lse
    return state[0].to(v.dtype).unflatten(0, q.shape[:-2])


def _chunks(
    view: KVView, mask: AnyMask, size: int, longest: int, queries: int
) -> Iterator[tuple[Tensor, Tensor, Mask]]:
    """Yield disjoint ranges ``[starts, ends)`` of at most ``size`` tokens, each with the mask for its call.

    Ranges are counted back from the ends of the sequences, where the queries are. Range ``n`` is then equally
    far from the queries in every sequence, and the same shifted mask fits all sequences. A mask's prefix, and
    the first tokens that a window retains, are counted from the start.
    """
    (window, first), reach = mask.kept, mask.band.reach
    starts, prefix, band = view.starts, max(mask.band.prefix, first), mask.band.without_prefix()
    reach = window - 1 if reach is None and window is not None else reach
    # This many tokens at the end of a sequence can be visible to its queries.
    visible = longest if reach is None else min(longest, reach + queries)
    for n in range(max(1, -(-visible // size))):
        ends, shifted = view.lengths - n * size, band.shift(n * size)
        hides = not shifted.covers(size - queries, size, 0, size)
        yield torch.maximum(starts.clamp(min=prefix), ends - size), ends, shifted if hides else FULL
    for first in range(0, min(prefix, longest), size):
        yield starts.clamp(min=first), view.lengths.clamp(max=min(first + size, prefix)), FULL


def _read(view: KVView, starts: Tensor, ends: Tensor, capacity: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the latents ``[capacity, r]`` and rotary keys ``[capacity, p]`` of ranges, packed, with offsets.

    Rows past the last offset are not used. They repeat the last token of a range, so that every index stays
    inside the page table.
    """
    cu_k = pad((ends - starts).clamp(min=0).cumsum(0), (1, 0))
    token = torch.arange(capacity, device=cu_k.device)
    n = sequence_of(token, cu_k).clamp(max=starts.shape[0] - 1)
    at = torch.minimum(starts[n] + token - cu_k[n], ends[n] - 1).clamp(min=0)
    page, slot = view.table[n, at // view.page_size].clamp(0, view.k.shape[0] - 1).long(), at % view.page_size
    latent = view.k[page, slot]
    if view.k_scale is not None:
        latent = (latent.float() * view.k_scale[page, slot][..., None]).to(view.layout.dtype)
    k_rope = None if view.k_rope is None else view.k_rope[page, slot].squeeze(-2)
    return latent.squeeze(-2), k_rope, cu_k.int()


def attend_mixed(
    attend_stored: Callable[..., Tensor],
    q_nope: Tensor,
    q_rope: Tensor,
    view: KVView,
    prompts: Sequence[Prompt],
) -> Tensor:
    """Return attention of a packed step: expanded for ``prompts``, absorbed for all other sequences.

    The function calls ``attend_stored(q_nope, q_rope, view, form)``, and for a prompt also passes ``longest``
    and ``row``.
    """
    sizes = runs(prompts, q_nope.shape[0])
    parts = list(zip(q_nope.split(sizes), q_rope.split(sizes), strict=True))
    others = (torch.cat(x) for x in zip(*parts[::2], strict=True))
    outs = list(attend_stored(*others, without(view, prompts), "absorbed").split(sizes[::2]))
    for n, prompt in enumerate(prompts):
        limits = {"longest": prompt.history + prompt.tokens, "row": prompt.row}
        outs.insert(
            2 * n + 1, attend_stored(*parts[2 * n + 1], of_sequence(view, prompt.row), "expanded", **limits)
        )
    return torch.cat(outs)


def source_of(
    expand: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor | None,
    weights: Sequence[Tensor],
) -> KeyValueSource:
    """Return the latents and rotary keys that ranks send each other in context parallelism."""

    def expanded(latent: Tensor, k_rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v = expand(latent, k_rope)
        check_heads(q, k)
        return k, v

    return KeyValueSource(
        (latent,) if k_rope is None else (latent, k_rope),
        expanded,
        tuple(x for x in weights if x.requires_grad),
    )


def runs(prompts: Sequence[Prompt], tokens: int) -> list[int]:
    """Return the token counts of a packed step's runs, in turn: other tokens, a prompt, other tokens, ...

    >>> runs([Prompt(row=2, first=2, tokens=50, history=0)], 55)
    [2, 50, 3]
    """
    ends = [end for x in prompts for end in (x.first, x.first + x.tokens)]
    return [end - start for start, end in pairwise([0, *ends, tokens])]


def without(view: KVView, prompts: Sequence[Prompt]) -> KVView:
    """Return the view of a packed step, with no queries for the sequences of ``prompts``."""
    counts = view.cu_seqlens_q.diff()
    for prompt in prompts:
        counts[prompt.row].zero_()
    return replace(view, cu_seqlens_q=pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), check=False)


def of_sequence(view: KVView, row: int) -> KVView:
    """Return the view of a single sequence of a packed step."""
    rows = slice(row, row + 1)
    of = {"table": view.table[rows], "starts": view.starts[rows], "lengths": view.lengths[rows]}
    first = view.cu_seqlens_q[rows]
    return replace(
        view, **of, cu_seqlens_q=view.cu_seqlens_q[row : row + 2] - first, schedule=None, check=False
    )


def check_heads(q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless q ``[..., s, h, *]`` and k ``[..., t, h, *]`` have the same head count."""
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"kv_b_proj: expected h={q.shape[-2]} heads like the projection of q, got {k.shape[-2]}; shard "
            "both the same way"
        )


def _check(q: Tensor, view: KVView, mask: AnyMask) -> None:
    if view.is_partial:
        raise NotImplementedError(
            "kv_b_proj: expected the absorbed form over a cache that ranks share, got the expanded one, "
            "which needs all latents on each rank; use form='auto' and a plain nn.Linear as kv_b_proj, "
            "sharded by heads like q"
        )
    if view.split_size:
        raise NotImplementedError(
            "batch_invariant: expected the absorbed form over a batch-invariant cache, got the expanded one"
        )
    refuse_selection(
        mask, "in the expanded form over a cache", "use form='auto' and a plain nn.Linear as kv_b_proj"
    )
    b, packed = view.lengths.shape[0], view.cu_seqlens_q is not None
    if q.dim() != (3 if packed else 4) or not (packed or q.shape[0] == b):
        step = "[t, h, d]" if packed else f"[b={b}, s, h, d]"
        raise ValueError(f"q: expected {step} like the step of the cache, got {tuple(q.shape)}")
    view.layout.check_reach(mask)


def _check_values(q: Tensor, v: Tensor, view: KVView) -> None:
    if v.dtype != view.layout.dtype:
        raise TypeError(
            f"q: expected {view.layout.dtype} like the cache, got {v.dtype}; cast it, or the cache's layout"
        )
    if torch.is_grad_enabled() and (q.requires_grad or v.requires_grad):
        raise NotImplementedError("cached attention has no backward; wrap the call in torch.no_grad()")


def is_plain_matmul(module: nn.Module, q: Tensor | None = None, heads: int = 1) -> bool:
    """True if ``module(x)`` is ``x @ module.weight.T``, without adapters, quantization, sharding or hooks.

    For attention over a cache, pass its q ``[..., h, n]`` and the number of ``heads`` on all ranks. The
    weight may then be sharded by ``parallelize_module``, if this rank's shard has as many heads as q.
    """
    if type(module) is not nn.Linear or module.bias is not None or "forward" in vars(module):
        return False
    hooks = max(len(module._forward_hooks), len(module._forward_pre_hooks))
    if type(module.weight) in (nn.Parameter, Tensor):
        return hooks == 0
    if (
        q is None or hooks > 1 or not getattr(module, MARK, False)
    ):  # parallelize_module adds one forward hook and one pre-hook
        return False
    return local_weight(module).shape[0] * heads == module.weight.shape[0] * q.shape[-2]
