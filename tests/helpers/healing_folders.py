"""A small Llama, the same with half of its KV heads, a text for both, and the command that heals one by the
other.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from attnlib.__main__ import main

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
TEXT = "".join(f"{i} green bottles, standing on the wall\n" for i in range(60))
SMALL = (
    "--steps",
    8,
    "--batch",
    4,
    "--context",
    16,
    "--windows",
    5,
    "--rate",
    3e-3,
    "--device",
    "cpu",
    "--quiet",
)
logging.disable_progress_bar()
logging.set_verbosity_error()


def make_original(folder: Path, **options) -> Path:
    """A Llama of random numbers, always the same, with a tokenizer of characters."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | options)).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def make_half(original: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The same with every two KV heads averaged."""
    source = AutoModelForCausalLM.from_pretrained(original)
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 2})
    weights = source.state_dict()
    for name, x in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = x.unflatten(0, (2, 2, 8)).mean(1).flatten(0, 1)
    half = LlamaForCausalLM(config)
    half.load_state_dict(weights)
    half.to(dtype).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path, shift: int = 0) -> None:
    """One token for each character of ASCII."""
    tokenizer = Tokenizer(
        models.WordLevel({chr(n): n + shift for n in range(10, 127)} | {"?": 0}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def heal(folders: Path, out: Path, *options, source: str = "half", teacher: str = "original") -> int:
    """The exit code of the command on what is in ``folders``."""
    given = ("--teacher", folders / teacher, "--text", folders / "text", *SMALL, *options)
    return main([str(x) for x in ("finetune", folders / source, out, *given)])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; the report without what it says of time and device."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    if "finetune_report.json" in found:
        report = json.loads(found["finetune_report.json"])
        found["finetune_report.json"] = json.dumps(report | {"run": None}).encode()
    return found
