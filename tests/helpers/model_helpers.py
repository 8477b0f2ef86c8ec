"""Small models of transformers, made of random numbers and saved as it saves them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 4,
    "vocab_size": 130,
    "max_position_embeddings": 128,
}
KINDS = {
    "llama": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
}
TEXT = "".join(chr(33 + n * n % 7 * n % 90) for n in range(1500))
logging.disable_progress_bar()
logging.set_verbosity_error()


def model_of(kind: str, kv_heads: int = 8, **options):
    """A model whose every weight is a random number, biases and gains included."""
    config, own = KINDS[kind]
    model = AutoModelForCausalLM.from_config(
        config(**SIZES | own | {"num_key_value_heads": kv_heads} | options)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3 + ("norm" in name))
    return model.eval()


def save(
    folder: Path, kind: str, kv_heads: int = 8, *, equal: int | None = None, dtype="float32", **options
) -> Path:
    """A source folder of several shards; with ``equal``, KV heads of each of so many groups are the same."""
    model = model_of(kind, kv_heads, **options)
    if equal is not None:
        for name, parameter in model.named_parameters():
            if "k_proj" in name or "v_proj" in name:
                groups = parameter.data.unflatten(0, (equal, -1, model.config.head_dim))
                groups[:] = groups[:, :1].clone()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="20KB")
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """One token for each character of ASCII, and one before all, which no text has."""
    tokenizer = Tokenizer(models.WordLevel({chr(n): n for n in range(33, 127)} | {"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="? $A", special_tokens=[("?", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def load(folder: Path):
    """A folder as stock transformers loads it, with anything missing, unexpected or mismatched an error."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(found.values()), found
    for parameter in model.parameters():
        parameter.data = (
            parameter.data.clone()
        )  # out of the file: products depend on how their factors are aligned
    return model.eval()


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(torch.arange(60).view(2, 30)).logits
