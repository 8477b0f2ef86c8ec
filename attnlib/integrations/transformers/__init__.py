"""attnlib as an attention implementation of Hugging Face transformers.

>>> from attnlib.integrations import transformers as hf
>>> hf.register()  # then: AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...internal.signatures import kind
from .building import layer_from
from .doors import register_doors
from .latents import keep_latents
from .paged import NAME, PagedCache
from .replacing import replace_attention

__all__ = ["PagedCache", "absorb", "from_config", "register", "replace"]


@kind
def register() -> None:
    """Make ``attn_implementation="attnlib"`` known to transformers, for attention and for masks.

    Any model that supports attention backends runs with it then, in training and in ``generate``; see
    docs/transformers.md. It may be called again.
    """
    register_doors()


@kind
def absorb(model: nn.Module) -> nn.Module:
    """The same model of transformers, which decodes from its latent cache as it is stored, without expanding
    it.

    It is for layers over latents, DeepSeek-V2's and those after it. Steps of few queries absorb the
    up-projections, where that is cheaper; prompts and training expand, as do layers whose ``kv_b_proj`` is no
    plain weight (LoRA, quantised).

    Raises:
        ValueError: the model has no such layer.
        NotImplementedError: its layers choose keys by an indexer.
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
    """The attention layer ``layer_index`` of a model with this config, as a layer of attnlib.

    ``part`` is "self", or "cross" or "encoder" of a model that has them. ``weights`` are the tensors of the
    model's own module by its names; the layer takes them as they are, in their dtype, whatever is fused or
    transposed there.

    Raises:
        NotImplementedError: the family, or a field of the config, is not known.
        ValueError: the weights are not those of such a layer.

    >>> from transformers import LlamaConfig
    >>> from_config(LlamaConfig(hidden_size=32, num_attention_heads=4), device="meta").num_heads
    4
    """
    return layer_from(config, layer_index, part, weights, {"device": device, "dtype": dtype})


@kind
def replace(model: nn.Module) -> nn.Module:
    """The same model of transformers, whose attention is layers of attnlib with its weights.

    They lie in ``layer`` of each attention module. The model runs as before, in training and in ``generate``;
    its state dict keeps transformers' names and shapes, so that ``save_pretrained`` writes a folder of the
    family's own.

    Raises:
        ValueError: the model has no attention of a known family.
        NotImplementedError: of a known one, a field of the config is not known.
    """
    replace_attention(model)
    register()
    model.set_attn_implementation(NAME)
    return model
