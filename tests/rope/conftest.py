"""The functions of transformers that ropes are compared with."""

from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def hf():
    """The functions of transformers that are compared with, imported once (it takes seconds)."""
    pytest.importorskip("transformers", minversion="5")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.llama import modeling_llama
    from transformers.models.llama.configuration_llama import LlamaConfig

    return SimpleNamespace(
        init=ROPE_INIT_FUNCTIONS,
        llama=modeling_llama,
        deepseek=modeling_deepseek_v3,
        LlamaConfig=LlamaConfig,
        DeepseekV3Config=DeepseekV3Config,
    )
