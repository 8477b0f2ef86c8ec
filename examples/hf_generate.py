"""Generate with a transformers model on attnlib, and compare tokens and speed with transformers' attention.

Runs the same prompts with transformers' "eager" and "sdpa" attention, with attnlib's attention ("attnlib"),
with attnlib's attention over a paged cache ("pages"), and with attnlib's layers in place of the model's
("layers").

``--model`` takes a folder or a name on the Hub; by default, a small Llama with random weights is used.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attnlib.integrations import transformers as hf


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(prog="hf_generate.py", description=__doc__)
    made.add_argument("--model", help="folder of a transformers model, or its name on the Hub")
    made.add_argument("--batch", type=int, default=4, metavar="N", help="number of sequences (4)")
    made.add_argument(
        "--prompt", type=int, default=64, metavar="N", help="tokens per prompt, drawn at random (64)"
    )
    made.add_argument("--new", type=int, default=32, metavar="N", help="tokens to generate (32)")
    return made


def load(name: str | None, device: str) -> PreTrainedModel:
    """Load a model by name, or make a small Llama with random weights."""
    torch.manual_seed(0)
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=512, num_attention_heads=8, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config).to(device).eval()


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Generate with each attention; return 1 if the tokens differ in fp32, else 0."""
    options = parser().parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hf.register()
    model = load(options.model, device)
    prompt = torch.randint(
        3, model.config.get_text_config().vocab_size, (options.batch, options.prompt), device=device
    )
    mask = torch.ones_like(prompt)
    for row in range(options.batch):  # pad on the left, as in a batch of prompts with different lengths
        mask[row, : row * options.prompt // (2 * options.batch)] = 0
    wanted = {
        "attention_mask": mask,
        "max_new_tokens": options.new,
        "min_new_tokens": options.new,
        "do_sample": False,
    }
    found, pages = {}, options.batch * (-(-(options.prompt + options.new) // 64) + 1)
    for name in ("eager", "sdpa", "attnlib", "pages", "layers"):
        if name == "pages" and hasattr(model.config, "kv_lora_rank"):
            hf.absorb(model)
        elif name == "layers":
            hf.replace(model)
        elif name != "pages":
            model.set_attn_implementation(name)
        cache = {}
        if name == "pages":
            cache = hf.PagedCache(model, pages=pages, max_sequences=options.batch).as_argument
        model.generate(prompt, **wanted | {"max_new_tokens": 2, "min_new_tokens": 2}, pad_token_id=0, **cache)
        for made in cache.values():
            made.reset()
        start = time.perf_counter()
        found[name] = model.generate(prompt, **wanted, pad_token_id=0, **cache)
        seconds = time.perf_counter() - start
        print(f"{name:8} {options.batch * options.new / seconds:8.0f} tokens/s")
    same = all(torch.equal(x, found["eager"]) for x in found.values())
    print("the same tokens" if same else f"the tokens differ (computed in {model.dtype})")
    return int(not same and model.dtype == torch.float32)


if __name__ == "__main__":
    raise SystemExit(main())
