"""Attention to pages, and what stands for them where a model of transformers hands on keys and values."""

from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ...functional import cached_attention
from ...kv import KVView
from ...layers.latent_forms import attend_expanded
from ...masks.band import CAUSAL, AnyMask, Mask, sliding
from ...masks.ready_made import mask_tensor
from ...packing import bounds_of
from ...scores import bias_tensor
from .handed import read
from .latents import absorbed, expanded, may_absorb, unabsorbed


class HandedPages:
    """The pages of one layer in one step, for which stand-ins of keys and values are handed to the model."""

    def __init__(self, layer: int, view: KVView):
        self.layer = layer
        self.view = view
        self.was_read = False


def stand_in(x: Tensor, tokens: int, pages: HandedPages) -> Tensor:
    """Return NaN in the shape of ``x`` ``[b, g, s, d]`` over ``tokens``, which takes no memory and names the
    pages.
    """
    standing = x.new_full((), torch.nan).expand(*x.shape[:2], tokens, x.shape[3])
    standing.handed_pages = pages
    return standing


def pages_of(key: Tensor, value: Tensor) -> HandedPages | None:
    """The pages that keys and values stand for; None of tensors that stand for themselves.

    Raises:
        NotImplementedError: only one of them came back as it was handed out.
    """
    pages, of_value = (getattr(x, "handed_pages", None) for x in (key, value))
    if pages is not of_value:
        changed, handed = ("key", of_value) if pages is None else ("value", pages)
        raise NotImplementedError(
            f"layer {handed.layer}, {changed}: expected what hf.PagedCache handed out, got another tensor; "
            "the model computes with its cached keys or values before attention: use a DynamicCache for it"
        )
    return pages


class ForwardHook:
    """A hook that tells a cache of a model's forwards, as long as the cache lives; copies of the model tell
    nobody.
    """

    def __init__(self, cache: Any = None):
        self._cache = None if cache is None else ref(cache)

    def cache(self) -> Any:
        """Return the cache; None if there is none, or under a compiler."""
        return None if self._cache is None or torch.compiler.is_compiling() else self._cache()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class BeginOfForward(ForwardHook):
    """The hook before a forward."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if (cache := self.cache()) is not None:
            cache.begin_of_forward(model)


class EndOfForward(ForwardHook):
    """The hook after a forward, also one that raised: its output is None then."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (cache := self.cache()) is not None:
            cache.end_of_forward(model, output)


def attention_to_pages(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    bias: Tensor | None,
    options: dict[str, object],
) -> Tensor:
    """Attention ``[b, s, h, e]`` of query ``[b, h, s, d]``, the last tokens of rows, to what ``key`` stands
    for.

    A bool ``attention_mask`` ``[b, t]`` hides what is padded, on the left, since what comes later is hidden
    anyway; one ``[b, 1, s, t]`` says all but the window; an additive one is added to the ``bias``.

    Raises:
        NotImplementedError: documents, which begin again within a row.
    """
    (b, _, s, _), pages = query.shape, key.handed_pages
    pages.was_read, view = True, pages.view
    window = view.layout.window
    mask: AnyMask = CAUSAL if window is None else sliding(window)
    if attention_mask is not None and attention_mask.dim() == 2:
        bounds, attention_mask = read(attention_mask)
        if attention_mask.dtype != torch.bool:
            raise NotImplementedError(
                "position_ids: they begin again within a row of a cache, which keeps one sequence"
            )
        starts, _ = bounds or bounds_of(attention_mask)
        view = replace(view, starts=torch.maximum(view.starts, starts), schedule=None, check=False)
    elif attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = mask_tensor(attention_mask)  # which may show what comes later, as parts of an image
        mask = mask if window is None else Mask(window - 1, None) & mask
    elif attention_mask is not None:
        bias = attention_mask if bias is None else bias + attention_mask
    options = options | {"mask": mask, "score": None if bias is None else bias_tensor(bias)}
    q = query.transpose(1, 2).flatten(0, 1)
    if not view.layout.is_latent:
        out = cached_attention(q, view, **options)
    elif may_absorb(module, query, key.shape[2]):
        out = unabsorbed(module, cached_attention(absorbed(module, q), view, **options))
    else:
        options = {name: options[name] for name in ("mask", "score", "scale")}
        out = attend_expanded(q, view, partial(_keys, module), longest=key.shape[2], backend=None, **options)
    return out.unflatten(0, (b, s))


def _keys(module: nn.Module, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[c, h, n + p]`` and values ``[c, h, e]`` of latents ``[c, r]`` and rotary keys ``[c, p]``."""
    k, v = expanded(module, k_rope[None, None], latent[None, None])
    return k[0].transpose(0, 1), v[0].transpose(0, 1)
