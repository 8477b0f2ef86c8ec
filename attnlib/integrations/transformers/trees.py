"""Trees of sequences that share prefixes, as inputs of transformers models."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ...masks.band import AnyMask
from ...masks.trees import until
from ...packing import Tree
from .choosing import source_of
from .handed import HandedMask, handed
from .masks import is_band

# Models that number tokens themselves, whatever position_ids they get.
OWN_POSITIONS = re.compile(
    r"create_position_ids_from_input_ids|position_ids` were provided but will be ignored"
)


def inputs_of(tree: Tree) -> dict[str, Any]:
    """Return the arguments with which a model computes a tree; see :func:`.tree_inputs`."""
    if not isinstance(tree, Tree):
        raise TypeError(f"tree: expected what packing.tree() returned, got {type(tree).__name__}")
    ends, positions = tree.ends[None], tree.positions[None]
    mask = handed(ends, tree=(ends, positions), keys=ends.shape[1])
    return {
        "input_ids": tree.tokens[None],
        "attention_mask": mask,
        "position_ids": positions,
        "use_cache": False,
    }


def tree_of(mask: Any) -> HandedMask | None:
    """Return the mask of a tree, also if transformers has converted it to bool; None for other masks."""
    if not isinstance(mask, HandedMask):
        return None
    return mask if mask.tree is not None else tree_of(mask.numbers)


def why_refused(kind: type[PreTrainedModel]) -> str | None:
    """Return the reason why models of this class cannot compute a tree, or None if they can."""
    if kind._is_stateful:
        return "recurrent layers, through which branches would see each other"
    if "position_ids" not in inspect.signature(kind.forward).parameters or OWN_POSITIONS.search(
        source_of(kind)
    ):
        return "a model that makes positions itself, from rows"
    return None


def mask_of(mask: HandedMask, named: Mapping[str, Any], reasons: Sequence[str | None]) -> HandedMask:
    """Return the mask of a tree for layers that request a causal mask, with or without a window.

    ``named`` are the arguments of the request, and ``reasons`` what :func:`why_refused` says of the model
    classes that may have made it.

    Raises:
        NotImplementedError: all these classes are refused, or the request is for another mask or has a cache.
    """
    if reasons and all(reasons):
        _refuse(reasons[0])
    if not is_band(named):
        _refuse("layers that are not causal, or that keep their window to themselves")
    if not named["q_length"] == named["kv_length"] == mask.plain.shape[1]:
        _refuse(f"{named['q_length']} queries and {named['kv_length']} keys")
    return mask


def restricted(mask: AnyMask, tree: tuple[Tensor, Tensor], bias: Tensor | None) -> AnyMask:
    """Restrict a layer's causal mask to a tree; its window counts positions in the sequences.

    Raises:
        NotImplementedError: the model adds a bias to its scores, which would count rows of the tree.
    """
    if bias is not None:
        _refuse("a bias of scores, which counts rows and not positions")
    return mask & until(*tree)


def _refuse(got: str) -> None:
    raise NotImplementedError(
        "attention_mask: expected causal attention without a cache over a tree of sequences, got "
        f"{got}; pass the sequences one by one"
    )
