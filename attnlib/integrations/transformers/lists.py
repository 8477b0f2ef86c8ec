"""The lists of keys or blocks that index branches pass to attention, and the masks that blocks require."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...indexing import Chosen
from ...internal.checks import came, is_recorded
from .handed import HandedMask

# The arguments with lists, and the form that attention reads.
LISTS = MappingProxyType(
    {
        "indices": "int32 lists of keys [b, s, n]",
        "block_indices": "integer lists of blocks [b, 1 or heads, s, n], of an indexer with a block_size",
    }
)


def chosen_of(module: nn.Module, query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Chosen | None:
    """Return the keys that an index branch chose for queries ``[b, h, s, d]``, or None for all keys.

    transformers' layers pass keys as ``indices`` int32 ``[b, s, n]``, and blocks as ``block_indices``
    ``[b, c, s, n]``; replaced layers pass ``chosen``.

    Raises:
        NotImplementedError: the lists have another form, or there are offsets of packed sequences.
    """
    name = next((name for name in (*LISTS, "chosen") if given.get(name) is not None), None)
    if name is None:
        return None
    lists, (b, h, s, _) = given[name], query.shape
    if name == "indices":
        lists = _keys(lists, (b, s))
    elif name == "block_indices":
        lists = _blocks(module, lists, [(b, c, s) for c in (1, key.shape[1], h)])
    if lists is None:
        raise NotImplementedError(
            f"{name}: expected {LISTS[name]}, for queries of {b} rows and {s} tokens, got "
            f'{came(given[name])}; use "eager"'
        )
    refuse_offsets(given)
    return lists


def refuse_offsets(given: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for offsets of packed sequences, since lists count the keys of a row."""
    if given.get("cu_seq_lens_q") is not None:
        raise NotImplementedError(
            "cu_seq_lens_q: expected None with lists of chosen keys, which count the keys of a row, got "
            "offsets; leave them out, pass use_cache=False, and position_ids that restart with each sequence"
        )


def _keys(lists: Any, rows: tuple[int, int]) -> Chosen | None:
    """Return lists of keys ``[b, s, n]`` as a choice, or None if they have another form."""
    if not isinstance(lists, Tensor) or lists.dtype != torch.int32 or lists.shape[:-1] != rows:
        return None
    return Chosen(lists[:, :, None])


def _blocks(module: nn.Module, lists: Any, shapes: list[tuple[int, int, int]]) -> Chosen | None:
    """Return lists of blocks ``[b, c, s, n]`` as a choice, or None if they have another form."""
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(lists, Tensor) or lists.dtype not in (torch.int32, torch.int64):
        return None
    if not isinstance(size, int) or lists.shape[:-1] not in shapes:
        return None
    return Chosen(lists.transpose(1, 2).int(), size)


def check_padding(module: nn.Module, mask: Tensor | None, keys: int, size: int) -> None:
    """Raise NotImplementedError unless a mask over ``keys`` keys hides only keys at the end of rows.

    transformers' index branches score hidden keys too, and count blocks of ``size`` keys from the start of
    the row, so hidden keys would change the choice of all later queries. A single block is always chosen.
    The first layer of a model reads the mask for all layers of its type; compiled code reads none.
    """
    if mask is None or keys <= size or is_recorded(mask) or not _is_first(module):
        return
    shown, is_tree = _plain(mask), getattr(mask, "tree", None) is not None
    if not is_tree and shown.dim() == 2 and shown.dtype == torch.bool and _is_prefix(shown):
        return
    raise NotImplementedError(
        f"attention_mask: expected padding on the right only, since transformers' index branch also counts "
        f"hidden keys into its blocks of {size}, got another mask over {keys} keys; pad on the right, or "
        "pass sequences one by one"
    )


def check_positions(
    module: nn.Module,
    position_ids: Tensor | None,
    mask: Tensor | None,
    end: int | Tensor,
    keys: int,
    size: int,
) -> None:
    """Raise NotImplementedError unless position ids are the slots of tokens, the last ``end - 1``.

    transformers' index branches choose among the slots up to a token's position id.
    """
    if position_ids is None or keys <= size or is_recorded(position_ids) or not _is_first(module):
        return
    count = position_ids.shape[-1]
    slots = torch.arange(count, device=position_ids.device) + (end - count)
    differ = position_ids != slots
    if mask is not None:  # padding may have any positions
        differ = differ & _plain(mask).bool()[:, slots]
    if differ.any():
        raise NotImplementedError(
            "position_ids: expected 0, 1, 2, ... in each row, since transformers' index branch takes them as "
            f"places of keys in the row to choose blocks of {size}, got others; pass sequences one by one"
        )


def _is_first(module: nn.Module) -> bool:
    """True if a layer is the first one of its type in its model, or may be."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return kinds is None or kinds.index(kinds[module.layer_idx]) == module.layer_idx


def _is_prefix(shown: Tensor) -> bool:
    """True if only the first keys are shown in each row of a mask ``[b, t]``, and at least one."""
    return bool(shown[:, 0].all() and (shown[:, :-1] | ~shown[:, 1:]).all())


def _plain(mask: Tensor) -> Tensor:
    return mask.plain if isinstance(mask, HandedMask) else mask
