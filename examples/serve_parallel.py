"""Decode with several GPUs: each has some of the heads, and a part of every sequence's cache.

    python examples/serve_parallel.py                            # one process
    torchrun --nproc-per-node 8 examples/serve_parallel.py

Projections and MLPs are shared out by heads and channels (tensor parallelism). MLA's latents and MQA's only
KV head are the same for all of them: without more, every rank would store them all. So the ranks deal the
tokens out, and merge what each of them finds. Decodes the same prompts on one process first. Fails where the
logits differ, or a cache holds other bytes than the formula says.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from decoder import Decoder
from decoding import greedy, prefill, stream
from text import VOCAB_SIZE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_long import begin, end

from attnlib import CAUSAL, KVCache, MultiHeadLatentAttention, MultiQueryAttention, Rope
from attnlib.sizes import cache_bytes
from attnlib.sizes.report import human

LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
HEADS, PAGE_SIZE = 8, 16
CLOSE = 1e-4


def make_model(options: argparse.Namespace) -> Decoder:
    """The same random weights on every rank; embeddings untied, or the model would repeat its input."""
    torch.manual_seed(0)

    def attention(i: int) -> nn.Module:
        if options.attention == "mqa":
            return MultiQueryAttention(options.width, HEADS, mask=CAUSAL, rope=Rope(options.width // HEADS))
        return MultiHeadLatentAttention(
            options.width, HEADS, mask=CAUSAL, rope=Rope(16, interleaved=True), **LATENT
        )

    model = Decoder(VOCAB_SIZE, options.width, options.layers, attention=attention, tie_embeddings=False)
    nn.init.normal_(model.embed.weight)
    nn.init.normal_(model.lm_head.weight)
    return model.to(options.device).eval()


def share_heads(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Give each rank some heads of every layer and some channels of every MLP, in place."""
    for block in model.blocks:
        parallelize_module(block.attention, mesh, block.attention.parallel_plan(mesh))
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(block.mlp, mesh, plan)
    return model


class Decoded(NamedTuple):
    """Tokens ``[n, steps]``, the logits ``[n, steps, vocab]`` behind them, tokens a second, and bytes of the
    cache.
    """

    tokens: Tensor
    logits: Tensor
    rate: float
    used_bytes: int


def decode(
    model: Decoder,
    prompts: Sequence[Tensor],
    steps: int,
    *,
    mesh: DeviceMesh | None = None,
    given: Tensor | None = None,
) -> Decoded:
    """Greedy continuations over a cache, whose tokens the ranks of a mesh share; or those ``given``.

    Raises:
        SystemExit: the cache holds other bytes than the formula says.
    """
    layouts, ranks = model.kv_layouts(), 1 if mesh is None else mesh.size()
    pages = KVCache.pages_for(
        layouts, [len(prompt) + steps for prompt in prompts], page_size=PAGE_SIZE, ranks=ranks
    )
    sizes = {"pages": pages, "page_size": PAGE_SIZE, "max_sequences": len(prompts)}
    cache, logits = KVCache.paged(layouts, **sizes, device=prompts[0].device, mesh=mesh), []

    def choose(found: Tensor) -> Tensor:
        logits.append(found)
        return greedy(found) if given is None else given[:, len(logits) - 1]

    handles, first = prefill(model, cache, prompts)
    start = time.perf_counter()
    tokens = torch.stack(list(stream(model, cache, handles, first, choose=choose, steps=steps)), 1)
    tokens.cpu()  # a GPU has done all of it only now
    rate = len(prompts) * (steps - 1) / (time.perf_counter() - start)
    lengths = [cache.length(handle) for handle in handles]
    formula = cache_bytes(layouts, lengths, page_size=PAGE_SIZE, ranks=ranks)
    if cache.used_bytes != formula:
        raise SystemExit(f"cache of a rank: expected {formula:,} bytes by formula, got {cache.used_bytes:,}")
    return Decoded(tokens, torch.stack(logits, 1), rate, cache.used_bytes)


def check_same(shared: Decoded, alone: Decoded) -> float:
    """How far the logits of ranks are from those of one process behind the same tokens, relative to the
    largest.

    Raises:
        SystemExit: further than fp32 rounds.
    """
    apart = ((shared.logits - alone.logits).abs().max() / alone.logits.abs().max()).item()
    if not apart < CLOSE:
        raise SystemExit(
            f"logits: expected those of one process within {CLOSE:g} of the largest, got {apart:.1e}"
        )
    return apart


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", choices=("mla", "mqa"), default="mla", help="default: mla")
    parser.add_argument("--width", type=int, default=128, help="channels of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--prompts", type=int, default=4, help="sequences (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the longest prompt (default: 512)")
    parser.add_argument("--new-tokens", type=int, default=32, help="default: 32")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to run (default: a GPU if there is one)"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Decode on one process and on all ranks; the first one tells what it took."""
    mesh = begin(options.device)
    lengths = [max(1, options.prompt_tokens * (n + 1) // options.prompts) for n in range(options.prompts)]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).to(options.device) for n in lengths]
    model = make_model(options)
    alone = decode(model, prompts, options.new_tokens)
    shared = decode(share_heads(model, mesh), prompts, options.new_tokens, mesh=mesh, given=alone.tokens)
    apart = check_same(shared, alone)
    if mesh.get_rank() == 0:
        print(
            f"{options.prompts} prompts of up to {options.prompt_tokens:,} tokens, {options.new_tokens} more "
            "of each"
        )
        print(f"{'ranks':>6} {'tokens/s':>10} {'cache of a rank':>16}")
        for ranks, one in ((1, alone), (mesh.size(), shared)):
            print(f"{ranks:6} {one.rate:10,.0f} {human(one.used_bytes):>16}")
        print(f"the same logits within {apart:.0e} of the largest")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line.

    Raises:
        SystemExit: ranks cannot share the heads, or a check failed.
    """
    options = parse(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        run(options)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    finally:
        end()


if __name__ == "__main__":
    main()
