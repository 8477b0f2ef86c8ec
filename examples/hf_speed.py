"""Compare the speed of transformers models with attnlib and with transformers' own attention.

    python examples/hf_speed.py llama      # Llama-3-8B's sizes, 4 layers: sdpa, attnlib, pages, a CUDA graph
    python examples/hf_speed.py deepseek   # DeepSeek-V3's attention, 4 layers: expanded and absorbed MLA

Weights are random. Tokens are compared first, in fp32 and with short prompts; an implementation whose tokens
differ is not timed. ``--small`` is for machines without a GPU.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from decoder import Decoder
from decoding import greedy, paged_cache, prefill
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnlib.integrations import transformers as hf

PAGE = 64


class Case(NamedTuple):
    """A model config with full and small sizes, and the batch size and context length to time."""

    config: Callable[..., Any]
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    batch: int
    context: int


LLAMA = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
DEEPSEEK = {
    "vocab_size": 32_000, "hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 4,
    "first_k_dense_replace": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 131_072,
}  # fmt: skip
FEWER = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LATENTS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CASES = {
    "llama": Case(LlamaConfig, LLAMA, FEWER | {"num_key_value_heads": 2}, batch=32, context=8192),
    "deepseek": Case(
        DeepseekV3Config, DEEPSEEK, FEWER | LATENTS | {"num_key_value_heads": 4}, batch=8, context=16_384
    ),
}


def models(case: Case, small: bool, device: str, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Make a random model twice, with sdpa and with attnlib as its attention; both share their weights."""
    torch.manual_seed(0)
    config = case.config(
        **dict(case.sizes) | dict(case.small if small else {}), pad_token_id=0, eos_token_id=None
    )
    hf.register()
    with torch.device(device):
        made = {"sdpa": _model(config, dtype, "sdpa")}
    with torch.device("meta"):
        ours = _model(config, dtype, "attnlib")
    ours.load_state_dict(made["sdpa"].state_dict(), assign=True)
    for name, x in made["sdpa"].named_buffers():  # the state dict lacks some of them
        parent, _, last = name.rpartition(".")
        setattr(ours.get_submodule(parent), last, x)
    ours.model.rotary_emb = made["sdpa"].model.rotary_emb
    made["attnlib"] = hf.absorb(ours) if hasattr(config, "kv_lora_rank") else ours
    return made


def _model(config: PreTrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Make a random model with its own copy of the config, because the config selects the attention."""
    config = copy.deepcopy(config)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Return a Decoder (examples/decoder.py) with the weights of a transformers Llama."""
    config, layers = model.config, model.model.layers
    made = Decoder(
        config.vocab_size,
        config.hidden_size,
        len(layers),
        attention=lambda i: hf.from_config(config, i, weights=layers[i].self_attn.state_dict()),
        mlp_size=config.intermediate_size,
        tie_embeddings=False,
        norm_eps=config.rms_norm_eps,
    )
    for block, theirs in zip(made.blocks, layers, strict=True):
        block.mlp.load_state_dict(theirs.mlp.state_dict(), assign=True)
        block.attention_norm.load_state_dict(theirs.input_layernorm.state_dict(), assign=True)
        block.mlp_norm.load_state_dict(theirs.post_attention_layernorm.state_dict(), assign=True)
    made.embed.weight, made.lm_head.weight = model.model.embed_tokens.weight, model.lm_head.weight
    made.norm.load_state_dict(model.model.norm.state_dict(), assign=True)
    return made.eval()


def by_generate(model: PreTrainedModel, **options: Any) -> Callable[[Tensor, int], Tensor]:
    """Return a function of prompts ``[b, t]`` and a token count that runs transformers' ``generate``."""

    def run(ids: Tensor, new: int) -> Tensor:
        wanted = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **wanted, **options)[
            :, ids.shape[1] :
        ]

    return run


def by_pages(model: PreTrainedModel) -> Callable[[Tensor, int], Tensor]:
    """Return a function that runs transformers' ``generate`` with a new paged cache for every call."""

    def run(ids: Tensor, new: int) -> Tensor:
        pages = ids.shape[0] * -(-(ids.shape[1] + new) // PAGE)
        cache = hf.PagedCache(model, pages=pages, page_size=PAGE, max_sequences=ids.shape[0])
        return by_generate(model, **cache.as_argument)(ids, new)

    return run


class ByGraph:
    """Generates with a Decoder over a paged cache; on a GPU, each step replays a CUDA graph.

    A graph is captured once for each shape of the prompts. Without a GPU, steps run eagerly.
    """

    def __init__(self, model: Decoder):
        self.model, self.size = model, None

    @torch.no_grad()
    def __call__(self, ids: Tensor, new: int) -> Tensor:
        """Return ``new`` tokens after prompts ``[b, t]``."""
        size = len(ids), ids.shape[1] + new
        if size != self.size:
            self.cache = paged_cache(self.model, sequences=size[0], length=size[1], page_size=PAGE)
            self.size, self.graph, self.tokens = size, None, ids.new_zeros(len(ids))
        handles, logits = prefill(self.model, self.cache, list(ids))
        self.tokens.copy_(greedy(logits))
        found = [self.tokens.clone()]
        for _ in range(new - 1):
            with self.cache.step(dict.fromkeys(handles, 1), replay=self.graph is not None) as layers:
                self._step(layers)
            found.append(self.tokens.clone())
        self.cache.release(*handles)
        return torch.stack(found, 1)

    def _step(self, layers: Sequence) -> None:
        """Decode one step: overwrite each sequence's last token with the next one, in place."""
        if self.graph is not None:
            self.graph.replay()
        elif self.tokens.is_cuda:
            self.graph = _captured(lambda: self._next(layers), self.tokens)
        else:
            self._next(layers)

    def _next(self, layers: Sequence) -> None:
        self.tokens.copy_(greedy(self.model(self.tokens, caches=layers)))


def _captured(step: Callable[[], Tensor], tokens: Tensor) -> torch.cuda.CUDAGraph:
    """Warm up ``step``, restore ``tokens``, capture ``step`` as a CUDA graph, and replay the graph once."""
    before, stream = tokens.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        tokens.copy_(before)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph


def ways(made: Mapping[str, PreTrainedModel]) -> dict[str, Callable[[Tensor, int], Tensor]]:
    """Return the implementations to compare, by name."""
    sdpa, ours = made["sdpa"], made["attnlib"]
    found = {
        "sdpa": by_generate(sdpa),
        "sdpa, static, compiled": by_generate(sdpa, cache_implementation="static"),
        "attnlib": by_generate(ours),
        "attnlib, pages": by_pages(ours),
    }
    if ours.config.model_type == "llama":
        found["a graph over pages"] = ByGraph(decoder_of(sdpa))
    return found


def seconds(run: Callable[[], object], device: str, calls: int = 3) -> float:
    """Return the time of the fastest of ``calls`` calls, after one warm-up call."""
    taken = []
    for _ in range(calls + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Compare tokens, then time; return 1 if tokens differ, else 0."""
    parser = argparse.ArgumentParser(prog="hf_speed.py", description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--small", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens to time (64)")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[options.case]
    batch, context = (2, 24) if options.small else (case.batch, case.context)
    exact = ways(models(case, options.small, device, torch.float32))
    ids = torch.randint(1, 64, (2, 24 if options.small else 256), device=device)
    expected = exact["sdpa"](ids, 16)
    different = [name for name, run in exact.items() if not torch.equal(run(ids, 16), expected)]
    print(f"tokens in fp32: {', '.join(different) + ' differ' if different else 'all the same'}")
    del exact
    torch.compiler.reset()
    timed = ways(models(case, options.small, device, torch.float32 if options.small else torch.bfloat16))
    ids = torch.randint(1, 64, (batch, context), device=device)
    print(f"{options.case}, {batch} x {context:,} on {device}")
    for name, run in timed.items():
        if name in different:
            continue
        prompt = seconds(lambda run=run: run(ids, 1), device)
        whole = seconds(lambda run=run: run(ids, options.new + 1), device)
        rate = batch * options.new / max(whole - prompt, 1e-9)
        print(f"{name:24} prompt {prompt * 1e3:9.1f} ms   {rate:9.0f} tokens/s")
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
