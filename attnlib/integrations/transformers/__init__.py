"""attnlib as an attention implementation of Hugging Face transformers.

>>> from attnlib.integrations import transformers as hf
>>> hf.register()  # then: AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
"""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import attention_forward
from .masks import attention_mask

NAME = "attnlib"  # without "flash", by which transformers would take it for a package of that kind


def register() -> None:
    """Make ``attn_implementation="attnlib"`` known to transformers, for attention and for masks.

    Any model that supports attention backends runs with it then, in training and in ``generate``; see
    docs/transformers.md. It may be called again.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
