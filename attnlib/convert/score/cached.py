"""Run a model over windows of text with attention that reads a paged cache, to see what its store costs."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..check.comparison import NONE, Outputs
from ..check.head import Head
from ..checkpoint.errors import RequestError
from ..stock import quiet, stock
from .stores import Store

PAGE = 64


def cached_outputs(
    folder: Path,
    tokens: Tensor,
    store: Store,
    *,
    device: torch.device | str = "cpu",
    follow_links: bool = False,
    advance: Callable[[], object] = lambda: None,
) -> Outputs | str:
    """Return the outputs of a folder's model for ``tokens`` ``[windows, n]``, or why there are none.

    Products are computed in fp32. Keys and values are rounded to the store's dtype and stored as its cache
    stores them; every query after the first token of a window reads all its keys from the cache. The whole
    model is in memory. ``advance`` is called after each window.

    Raises:
        CheckpointError: as :func:`attnlib.load_pretrained`.
        RequestError: the model has no paged cache.
    """
    stock()
    from ...integrations import load_pretrained
    from .rounded import RoundedCache

    try:
        with quiet():
            model = load_pretrained(folder, dtype=torch.float32, device=device, follow_links=follow_links)
        head = model.get_output_embeddings()
        if head is None:
            return NONE
        n = tokens.shape[1]
        cache = RoundedCache(
            model,
            store.dtype,
            pages=math.ceil(n / PAGE) + 1,
            max_sequences=1,
            storage_dtype=store.storage_dtype,
        )
    except NotImplementedError as error:
        raise RequestError(
            f"{store.name}: expected a model with a paged cache, got {folder.name}: {error}; leave out "
            "the store"
        ) from error
    states: list[Tensor] = []
    # The head computes only one position here, since its logits are not needed.
    hook = head.register_forward_pre_hook(lambda _, given: (states.append(given[0][0]), given[0][:, -1:])[1])
    with torch.no_grad():
        for window in tokens.to(device):
            for part in (window[:1], window[1:]):
                model(part[None], **cache.as_argument)
            states[-2:] = [torch.cat(states[-2:])]
            cache.reset()
            advance()
    hook.remove()
    return Outputs(states, Head.of_model(model))
