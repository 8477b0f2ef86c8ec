"""attnlib as an attention implementation for Hugging Face transformers.

>>> from attnlib.integrations import transformers as hf
>>> hf.register()  # then: AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...internal.signatures import kind
from ...packing import Tree
from .building import layer_from
from .doors import register_functions, spare_masks
from .latents import keep_latents
from .paged import NAME, PagedCache
from .replacing import replace_attention
from .trees import inputs_of

__all__ = ["PagedCache", "absorb", "from_config", "register", "replace", "tree_inputs"]


@kind
def register() -> None:
    """Register attnlib's attention and masks with transformers as ``attn_implementation="attnlib"``.

    Afterwards, any model that supports attention backends can use it, in training and in ``generate``; see
    docs/transformers.md. Repeated calls have no effect.
    """
    register_functions()


@kind
def absorb(model: nn.Module) -> nn.Module:
    """Make a transformers model with multi-head latent attention decode without expanding its cached latents.

    The model is changed in place and returned. It must have MLA layers, as DeepSeek-V2 and its successors do.
    Steps with few queries absorb the up-projections into queries and outputs if that is cheaper. Prompts and
    training expand the latents, and so do layers whose ``kv_b_proj`` is not an ordinary weight (LoRA,
    quantized).

    Raises:
        ValueError: the model has no MLA layer.
        NotImplementedError: its layers select keys with an indexer of a family that attnlib does not know.
    """
    register()
    keep_latents(model, NAME)
    model.set_attn_implementation(NAME)
    return model


@kind
def from_config(
    config: Any,
    layer_index: int = 0,
    *,
    part: str = "self",
    weights: Mapping[str, Tensor] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Build layer ``layer_index`` of a model with this transformers config, as an attnlib layer.

    ``part`` is "self", or "cross" or "encoder" if the model has such attention. ``weights`` are the tensors
    of the model's own attention module under its own names. The layer takes them without a copy if possible
    and keeps their dtype; fused weights are split, and transposed weights are transposed back.

    Raises:
        NotImplementedError: the family, or a field of the config, is unknown.
        ValueError: the weights do not belong to such a layer.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4)
    >>> from_config(config, device="meta").num_heads
    4
    """
    return layer_from(config, layer_index, part, weights, {"device": device, "dtype": dtype})


@kind
def replace(model: nn.Module) -> nn.Module:
    """Replace a transformers model's attention with attnlib layers that have the same weights.

    The model is changed in place and returned. Each attention module holds its attnlib layer as ``layer``.
    The model works as before, in training and in ``generate``, and its state dict keeps transformers' names
    and shapes, so ``save_pretrained`` writes a stock folder.

    Raises:
        ValueError: the model has no attention of a known family.
        NotImplementedError: the family is known, but a field of the config is not.
    """
    replace_attention(model)
    register()
    spare_masks(model)
    model.set_attn_implementation(NAME)
    return model


@kind
def tree_inputs(tree: Tree) -> dict[str, Any]:
    """Return the arguments with which a model computes a tree: ``model(**hf.tree_inputs(tree))``.

    ``tree`` comes from :func:`attnlib.packing.tree`. The model must have selected ``attnlib``; other
    implementations would ignore the branches. ``logits[0, tree.rows[n]]`` are the logits of sequence ``n``,
    and windows count positions in the sequences.

    The arguments are ``input_ids``, ``attention_mask``, ``position_ids`` and ``use_cache=False``. A model
    raises NotImplementedError if its attention is not causal or has a bias of scores, if layers other than
    attention mix tokens, or under ``torch.compile``.
    """
    return inputs_of(tree)
