"""flash-attn's ``flash_attn_with_kvcache``: write new tokens to a cache, then attend to all tokens in it."""

import torch
from torch import Tensor

from ...dispatch.storage import write_cache
from ...functional import cached_attention_with_lse
from ...internal.signatures import kind
from ...kv import KVLayout, KVView
from ...masks.band import Mask
from ...rope.rope import Angles, rotate


@kind
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values to a cache in place, then compute attention of q ``[b, s, h, d]`` over it.

    ``k_cache`` and ``v_cache`` are rows ``[n, t, g, d]``, from which ``cache_batch_idx`` selects one per
    sequence. With a ``block_table`` ``[b, n]``, they are pages ``[pages, page_size, g, d]``.
    ``cache_seqlens`` is the number of tokens stored so far. New ``k`` and ``v`` ``[b, s_new, g, d]`` are
    written after these, with k rotated by ``rotary_cos`` and ``rotary_sin`` ``[t, p / 2]`` at its positions.
    q is rotated at the same positions with a causal mask or a window, and otherwise at the position of the
    first new token. The first ``cache_leftpad`` tokens of each row are hidden. ``num_splits`` is ignored:
    attnlib chooses the splits itself.

    With ``return_softmax_lse``, also returns the LSE ``[b, h, s]``, which is inf for a query that sees no
    key. There is no backward.

    Raises:
        ValueError: new keys come without new values or without lengths, or a rotation without new keys.
    """
    b, s = q.shape[:2]
    rows = (
        torch.arange(b, dtype=torch.int32, device=q.device)
        if cache_batch_idx is None
        else cache_batch_idx.int()
    )
    table = rows[:, None] if block_table is None else block_table
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("k, v: expected both or neither, and cache_seqlens with them")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: expected new keys with it, got k=None")
    stored = _lengths(
        k_cache.shape[1] * table.shape[1] if cache_seqlens is None else cache_seqlens, b, q.device
    )
    mask = band(causal, window_size)
    lengths = stored if k is None else stored + k.shape[1]
    view = pages_of(k_cache, v_cache, table=table, lengths=lengths, starts=cache_leftpad)
    if k is not None:
        at = stored[:, None] + torch.arange(k.shape[1], dtype=torch.int32, device=q.device)
        angles = None if rotary_cos is None else _angles(rotary_cos, rotary_sin, at, rotary_interleaved)
        write_cache(view, k, v, _slots(table, at, k_cache.shape[1]), angles=angles)
    if rotary_cos is not None:
        step = torch.arange(s, dtype=torch.int32, device=q.device)
        at = stored[:, None] + (step if mask != Mask(None, None) else step * 0)
        q = rotate(q, _angles(rotary_cos, rotary_sin, at, rotary_interleaved))
    out, lse = cached_attention_with_lse(
        q,
        view,
        mask=mask,
        scale=softmax_scale,
        softcap=softcap or None,
        alibi_slopes=alibi_slopes,
    )
    return (out, flash_lse(lse)) if return_softmax_lse else out


def flash_lse(lse: Tensor) -> Tensor:
    """Convert an LSE to flash-attn's convention: inf instead of -inf for a query that sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def pages_of(
    k: Tensor,
    v: Tensor,
    *,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> KVView:
    """Return a KVView of pages ``[pages, page_size, g, d]``; a cache without pages has one page per row.

    Raises:
        ValueError, TypeError: shapes or dtypes do not match.
    """
    layout = KVLayout.grouped(k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    starts = torch.zeros_like(lengths) if starts is None else starts.int()
    return KVView(
        layout,
        k.shape[1],
        k=k,
        v=v,
        table=table,
        starts=starts,
        lengths=lengths,
        cu_seqlens_q=cu_seqlens_q,
    )


def band(causal: bool, window_size: tuple[int, int]) -> Mask:
    """Convert flash-attn's ``causal`` and ``window_size``, which is ``(left, right)``, to a mask.

    A query sees ``left`` keys before its own position and ``right`` keys after it. A negative size means no
    limit; ``causal`` sets ``right`` to 0.
    """
    left, right = (None if size < 0 else size for size in window_size)
    return Mask(left, 0 if causal else right)


def _lengths(given: int | Tensor, b: int, device: torch.device) -> Tensor:
    if isinstance(given, Tensor):
        return given.to(device, torch.int32).expand(b).contiguous()
    return torch.full((b,), given, dtype=torch.int32, device=device)


def _angles(cos: Tensor, sin: Tensor | None, at: Tensor, interleaved: bool) -> Angles:
    if sin is None:
        raise ValueError("rotary_sin: expected it with rotary_cos, got None")
    return Angles(cos.float()[at], sin.float()[at], interleaved)


def _slots(table: Tensor, at: Tensor, page_size: int) -> Tensor:
    """Return where the cache stores positions ``at``: indices ``page * page_size + offset``, ``[b * s]``."""
    pages = table.long().gather(1, at.long() // page_size)
    return (pages * page_size + at % page_size).flatten()
