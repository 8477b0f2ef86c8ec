"""attnlib as an attention implementation of Hugging Face transformers.

>>> from attnlib.integrations import transformers as hf
>>> hf.register()  # then: AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
"""

from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import attention_forward
from .latents import keep_latents
from .masks import attention_mask

NAME = "attnlib"  # without "flash", by which transformers would take it for a package of that kind


def register() -> None:
    """Make ``attn_implementation="attnlib"`` known to transformers, for attention and for masks.

    Any model that supports attention backends runs with it then, in training and in ``generate``; see
    docs/transformers.md. It may be called again.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def absorb(model: nn.Module) -> nn.Module:
    """The same model of transformers, which decodes from its latent cache as it is stored, without expanding it.

    It is for layers over latents, DeepSeek-V2's and those after it. Steps of few queries absorb the up-projections,
    where that is cheaper; prompts and training expand, as do layers whose ``kv_b_proj`` is no plain weight (LoRA,
    quantised).

    Raises:
        ValueError: the model has no such layer.
        NotImplementedError: its layers choose keys by an indexer.
    """
    register()
    keep_latents(model, NAME)
    model.set_attn_implementation(NAME)
    return model
