"""Load a transformers model's folder into the Decoder of examples/decoder.py, and generate with attnlib.

    python examples/load_hf.py FOLDER 'The capital of France is' 'def main(' --new 40

The weights stream from safetensors to the device, one layer at a time. No code from the folder is executed,
and transformers reads only its config and tokenizer. ``--check`` also loads transformers' own model, and
compares the tokens.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from decoder import Decoder
from decoding import TIE, decode_cached
from folders import their_name, tokens_by
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig

from attnlib.checkpoint_files.folder import Checkpoint, read_folder
from attnlib.convert.stock import load_model, read_config
from attnlib.convert.text.tokens import tokenizer_of
from attnlib.integrations import transformers as hf

# These model families have the same blocks as a Decoder: pre-norm, with a gated SiLU MLP.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
FIXED = {"hidden_act": "silu", "mlp_bias": False}
LAYER, ATTENTION = "model.layers.{}.", "self_attn."


def load(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Decoder, Checkpoint]:
    """Load the model of a folder, in its own dtype or in ``dtype``; return it and the validated folder.

    Raises:
        ValueError: the folder is not a checkpoint, is unsafe to open, or needs a feature that a Decoder
        lacks.
    """
    checkpoint = read_folder(folder)
    config = read_config(checkpoint)
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {config.model_type!r}")
    for name, expected in FIXED.items():
        if getattr(config, name, expected) != expected:
            raise ValueError(f"{name}: expected {expected!r} for a Decoder, got {getattr(config, name)!r}")
    with torch.device("meta"):
        model = Decoder(
            config.vocab_size,
            config.hidden_size,
            config.num_hidden_layers,
            attention=lambda i: hf.from_config(config, i),
            mlp_size=config.intermediate_size,
            tie_embeddings=config.tie_word_embeddings,
            norm_eps=config.rms_norm_eps,
        )
    _fill(model, config, checkpoint, lambda x: x.to(device, dtype))
    return model.eval(), checkpoint


def _fill(
    model: Decoder, config: PreTrainedConfig, checkpoint: Checkpoint, place: Callable[[Tensor], Tensor]
) -> None:
    """Load every parameter; raise ValueError if the folder has too few or too many."""
    left = set(checkpoint.tensors)

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"{name}: expected it in the folder, as config.json says")
        left.remove(name)
        return place(checkpoint.tensors[name].load())

    weights = {}
    for index in tqdm(range(config.num_hidden_layers), desc="loading", unit="layer", leave=False):
        prefix = LAYER.format(index) + ATTENTION
        own = {name.removeprefix(prefix): take(name) for name in sorted(left) if name.startswith(prefix)}
        layer = hf.from_config(config, index, weights=own)
        weights |= {f"blocks.{index}.attention.{name}": x for name, x in layer.state_dict().items()}
    for name, _ in model.named_parameters():
        if name not in weights:
            weights[name] = take(their_name(name))
    spare = {"lm_head.weight"} if config.tie_word_embeddings else set()  # the file may store tied weights
    if extra := sorted(name for name in left - spare if not name.endswith("rotary_emb.inv_freq")):
        raise ValueError(f"{extra[0]}: a Decoder has no such weight")
    model.load_state_dict(weights, assign=True, strict=not config.tie_word_embeddings)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed.weight


@torch.no_grad()
def check(model: Decoder, checkpoint: Checkpoint, prompts: Sequence[Tensor], found: Tensor) -> str:
    """Compare generated tokens with those of transformers' own model, which reads each sequence in one pass.

    Raises:
        SystemExit: a token differs by more than rounding.
    """
    theirs = load_model(checkpoint, dtype=model.embed.weight.dtype, device=found.device)
    for prompt, more in zip(prompts, found, strict=True):
        logits = theirs(torch.cat((prompt, more))[None, :-1]).logits[0, len(prompt) - 1 :].float()
        gaps = logits.amax(-1) - logits.gather(-1, more[:, None])[:, 0]
        slack = TIE * logits.abs().max() * torch.finfo(theirs.dtype).eps / torch.finfo(torch.float32).eps
        if gaps.max() > slack:
            raise SystemExit(f"transformers prefers another token by {gaps.max():.2e}, more than {slack:.2e}")
    return "transformers' own model chooses the same tokens"


def main(argv: Sequence[str] | None = None) -> int:
    """Load a model, generate, and print the speed."""
    parser = argparse.ArgumentParser(prog="load_hf.py", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("prompts", nargs="+", help="texts to continue")
    parser.add_argument("--new", type=int, default=40, metavar="N", help="tokens to generate (40)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="compare with transformers' own model")
    options = parser.parse_args(argv)
    try:
        model, checkpoint = load(options.folder, device=options.device)
        encode = tokens_by(checkpoint)
        prompts = [encode(text.encode()).long().to(options.device) for text in options.prompts]
    except (ValueError, NotImplementedError) as error:
        raise SystemExit(f"load_hf.py: {error}") from error
    start = time.perf_counter()
    found = decode_cached(model, prompts, options.new)
    seconds = time.perf_counter() - start
    for text, tokens in zip(options.prompts, found.tolist(), strict=True):
        print(f"{text}{_text(checkpoint, tokens)}\n")
    print(f"{found.numel() / seconds:,.0f} tokens/s")
    if options.check:
        print(check(model, checkpoint, prompts, found))
    return 0


def _text(checkpoint: Checkpoint, tokens: list[int]) -> str:
    """Decode tokens with the folder's tokenizer if it has one, else as bytes."""
    if not any(file.name.startswith("tokenizer") for file in checkpoint.copied):
        return bytes(token % 256 for token in tokens).decode(errors="replace")
    return tokenizer_of(checkpoint).decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    raise SystemExit(main())
