"""``python llama_cpp_says.py GGUF OUT OPTIONS TOKENS...``: llama.cpp's logits of tokens, in a process of its
own.

What it asserts ends a process. ``OPTIONS`` are others of ``llama_cpp.Llama``, in JSON.
"""

import json
import sys

import torch
from llama_cpp import Llama
from safetensors.torch import save_file

FP32 = 0  # of the cache: ggml.h, GGML_TYPE_F32


def main(gguf: str, out: str, options: str, *tokens: str) -> None:
    """Read the tokens at once and write the logits of each."""
    model = Llama(
        gguf, n_ctx=256, logits_all=True, type_k=FP32, type_v=FP32, flash_attn=False, **json.loads(options)
    )
    model.eval([int(token) for token in tokens])
    save_file({"logits": torch.tensor(model.scores[: len(tokens)])}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
