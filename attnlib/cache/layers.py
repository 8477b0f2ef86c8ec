"""Operations that a cache performs on all of its layers."""

from collections.abc import Mapping, Sequence

import torch

from ..dispatch.storage import copy_pages
from ..kv import KVLayout, StepInfo
from .layer_cache import LayerCache
from .pages import StepPlan, Window
from .sequences import Freed, Request, Sequences
from .step import PerStep, PerWindow

PREFILL = 16  # a step is a prefill if some sequence gets more than this many tokens


def make_layers(
    layouts: Sequence[KVLayout], sequences: Sequences, page_size: int, device: torch.device
) -> tuple[LayerCache, ...]:
    """Return the layers of a cache, one per layout, each with the page count of its window class."""
    totals = {window: allocator.total for window, allocator in sequences.allocators.items()}
    info = StepInfo()
    return tuple(
        LayerCache(layout, totals[layout.window_class], page_size, device, info) for layout in layouts
    )


def prepare_layers(
    layers: Sequence[LayerCache], page_size: int, step: PerStep, windows: Mapping[Window, PerWindow]
) -> None:
    """Prepare the views that all layers hand out in cache steps of one shape."""
    for layer in layers:
        layer._prepare(page_size, step, windows[layer.layout.window_class])


def open_layers(layers: Sequence[LayerCache], request: Request, *, replay: bool) -> None:
    """Let all prepared layers enter a step or read; ``replay`` as in :meth:`attnlib.KVCache.step`."""
    longest = max((holding.length for holding in request.holdings), default=0)
    prefill = max(request.tokens.values(), default=0) > PREFILL
    for layer in layers:
        layer._open()
    if layers:
        info = layers[0].info
        info.prefill, info.history = prefill, 1 << (longest - 1).bit_length() if longest else 0
        info.padded = any(holding.padding for holding in request.holdings)
        info.replay = replay
        info.prompts = request.prompts(PREFILL + 1) if prefill else ()


def copy_shared(layers: Sequence[LayerCache], plans: Mapping[Window, StepPlan]) -> None:
    """Copy, in every layer, the shared pages that a step writes to."""
    for layer in layers:
        if pairs := plans[layer.layout.window_class].copies:
            copy_pages(layer._view, pairs)


def check_appended(layers: Sequence[LayerCache], tokens: int, *, replay: bool) -> None:
    """Raise RuntimeError unless every layer has appended, or none needed to."""
    missing = [i for i, layer in enumerate(layers) if not layer.appended]
    if len(missing) == len(layers) and (replay or not tokens):
        return
    if missing:
        raise RuntimeError(
            f"step: layers {missing} of {len(layers)} did not append, so the step was undone; call every "
            "layer of the cache in each step, or say step(..., replay=True) where a captured CUDA graph "
            "appends"
        )


def poison(layers: Sequence[LayerCache], freed: Freed) -> None:
    """Overwrite freed pages with NaN, so that a stale read shows."""
    for window, pages in freed:
        for layer in layers if pages else ():
            if layer.layout.window_class == window:
                layer._poison(pages)
