"""Attention over cache pages, and placeholder tensors that carry the pages through a transformers model."""

from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ...functional import cached_attention
from ...indexing import Chosen
from ...kv import KVView
from ...layers.inspected import TakenStatistic
from ...layers.latent_forms import attend_expanded
from ...masks.band import CAUSAL, AnyMask, Mask, sliding
from ...masks.ready_made import mask_tensor
from ...masks.selection import selected
from ...packing import bounds_of
from ...scores import bias_tensor
from .handed import read
from .latents import absorbed, expanded, may_absorb, require_absorption, unabsorbed


class HandedPages:
    """The cache pages of one layer in a step of ``tokens`` per row, which placeholders carry in the model."""

    def __init__(self, layer: int, view: KVView, tokens: int):
        self.layer = layer
        self.view = view
        self.tokens = tokens
        self.was_read = False


def placeholder(x: Tensor, tokens: int, pages: HandedPages) -> Tensor:
    """Return a placeholder ``[b, g, tokens, d]`` for keys or values ``x`` ``[b, g, s, d]``.

    The placeholder is an expanded NaN scalar, so it takes no memory. Its attribute ``handed_pages`` is
    ``pages``.
    """
    standing = x.new_full((), torch.nan).expand(*x.shape[:2], tokens, x.shape[3])
    standing.handed_pages = pages
    return standing


def pages_of(key: Tensor, value: Tensor) -> HandedPages | None:
    """Return the pages behind placeholder keys and values, or None if both tensors are ordinary.

    Raises:
        NotImplementedError: the two tensors do not stand for the same pages.
    """
    pages, of_value = (getattr(x, "handed_pages", None) for x in (key, value))
    if pages is not of_value:
        changed, handed = ("key", of_value) if pages is None else ("value", pages)
        raise NotImplementedError(
            f"layer {handed.layer}, {changed}: expected what hf.PagedCache returned, got another tensor; "
            "the model changes cached keys or values before attention, so use a DynamicCache for it"
        )
    return pages


class ForwardHook:
    """A forward hook that notifies a cache while the cache exists; in a copied model, it does nothing."""

    def __init__(self, cache: Any = None):
        self._cache = None if cache is None else ref(cache)

    def cache(self) -> Any:
        """Return the cache, or None if the hook has no cache, it was freed, or a compiler is tracing."""
        return None if self._cache is None or torch.compiler.is_compiling() else self._cache()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class BeginOfForward(ForwardHook):
    """The hook that runs before a model's forward: it notifies the cache that the forward begins."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if (cache := self.cache()) is not None:
            cache.begin_of_forward(model)


class EndOfForward(ForwardHook):
    """The hook that runs after a model's forward, even one that raised: it notifies the cache of the end."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (cache := self.cache()) is not None:
            cache.end_of_forward(model, output)


def attention_to_pages(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    bias: Tensor | None,
    chosen: Chosen | None,
    options: dict[str, object],
) -> Tensor:
    """Compute attention of ``query`` ``[b, h, s, d]`` over the pages behind the placeholder ``key``.

    Returns ``[b, s, h, e]``. The queries are the last ``s`` tokens of each row. ``attention_mask`` has one
    of three forms:

    - bool ``[b, t]`` hides the padding on the left; padding on the right is hidden by the causal mask anyway.
    - bool ``[b, 1, s, t]`` is the whole mask except for the layer's window.
    - float masks are added to ``bias``.

    ``chosen`` are the keys that an index branch chose, with lists ``[b, s, c, n]``, or None.

    Raises:
        NotImplementedError: the mask holds document numbers, because positions restart within a row; weights
            are taken from latents that are expanded; or keys are chosen of latents that must be expanded.
    """
    (b, _, s, _), pages = query.shape, key.handed_pages
    pages.was_read, view = True, pages.view
    if s != pages.tokens:  # Gemma 4 computes only the last tokens in layers that read another layer's keys
        offsets = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=query.device)
        view = replace(view, cu_seqlens_q=offsets, schedule=None, step=None, check=False)
    window = view.layout.window
    mask: AnyMask = CAUSAL if window is None else sliding(window)
    if attention_mask is not None and attention_mask.dim() == 2:
        bounds, attention_mask = read(attention_mask)
        if attention_mask.dtype != torch.bool:
            raise NotImplementedError(
                "position_ids: expected one sequence per cache row, got positions that restart within a row"
            )
        starts, _ = bounds or bounds_of(attention_mask)
        view = replace(view, starts=torch.maximum(view.starts, starts), schedule=None, check=False)
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = mask_tensor(attention_mask)  # not causal: queries may see later keys, as in images
        mask = mask if window is None else Mask(window - 1, None) & mask
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    if chosen is not None:
        mask = mask & selected(chosen.indices.flatten(0, 1), chosen.block_size)
        if view.layout.is_latent:
            require_absorption(module, query)
    options = options | {"mask": mask, "score": None if bias is None else bias_tensor(bias)}
    q = query.transpose(1, 2).flatten(0, 1)
    if not view.layout.is_latent:
        out = cached_attention(q, view, **options)
    elif chosen is not None or may_absorb(module, query, key.shape[2]):
        out = unabsorbed(module, cached_attention(absorbed(module, q), view, **options))
    elif isinstance(options["backend"], TakenStatistic):
        raise NotImplementedError(
            "output_attentions: expected pages of keys, or few queries over pages of latents, "
            f"which are absorbed, got {s} queries a row; use a DynamicCache"
        )
    else:
        options = {name: options[name] for name in ("mask", "score", "scale", "backend")}
        out = attend_expanded(q, view, partial(_keys, module), longest=key.shape[2], **options)
    return out.unflatten(0, (b, s))


def _keys(module: nn.Module, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Expand latents ``[c, r]`` and rotary keys ``[c, p]`` to K ``[c, h, n + p]`` and V ``[c, h, e]``."""
    k, v = expanded(module, k_rope[None, None], latent[None, None])
    return k[0].transpose(0, 1), v[0].transpose(0, 1)
