"""Decode on several GPUs: each rank computes some of the heads and stores part of every sequence's cache.

    python examples/serve_parallel.py                            # one process
    torchrun --nproc-per-node 8 examples/serve_parallel.py

Projections and MLPs are sharded by heads and channels (tensor parallelism). The latents of MLA and the only
KV head of MQA serve all query heads, so every rank would have to store them all. Instead, the ranks shard the
cache by tokens and merge their partial results. The example decodes the same prompts on one process first. It
fails if the logits differ, or if a cache does not use the bytes that the formula predicts.
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
from attnlib.sizes.text import human

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
    """Make a model with the same random weights on every rank.

    The embeddings are not tied, because a random model with tied embeddings repeats its input.
    """
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
    """Shard the heads of every attention layer and the channels of every MLP over the ranks, in place."""
    for block in model.blocks:
        parallelize_module(block.attention, mesh, block.attention.parallel_plan(mesh))
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(block.mlp, mesh, plan)
    return model


class Decoded(NamedTuple):
    """Tokens ``[n, steps]``, their logits ``[n, steps, vocab]``, tokens per second, and the cache's bytes."""

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
    """Decode greedily, or feed the ``given`` tokens instead; if there is a ``mesh``, shard the cache over it.

    Raises:
        SystemExit: the cache does not use the bytes that the formula predicts.
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
    tokens.cpu()  # wait for the GPU
    rate = len(prompts) * (steps - 1) / (time.perf_counter() - start)
    lengths = [cache.length(handle) for handle in handles]
    formula = cache_bytes(layouts, lengths, page_size=PAGE_SIZE, ranks=ranks)
    if cache.used_bytes != formula:
        raise SystemExit(f"cache of a rank: expected {formula:,} bytes by formula, got {cache.used_bytes:,}")
    return Decoded(tokens, torch.stack(logits, 1), rate, cache.used_bytes)


def check_same(shared: Decoded, alone: Decoded) -> float:
    """Compare the logits of sharded decoding with those of one process that decoded the same tokens.

    Return the largest difference relative to the largest logit.

    Raises:
        SystemExit: they are further apart than fp32 rounding explains.
    """
    apart = ((shared.logits - alone.logits).abs().max() / alone.logits.abs().max()).item()
    if not apart < CLOSE:
        raise SystemExit(
            f"logits: expected those of one process within {CLOSE:g} of the largest, got {apart:.1e}"
        )
    return apart


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--attention", choices=("mla", "mqa"), default="mla", help="attention variant (default: mla)"
    )
    parser.add_argument("--width", type=int, default=128, help="channels of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument("--prompts", type=int, default=4, help="number of sequences (default: 4)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="length of the longest prompt (default: 512)"
    )
    parser.add_argument("--new-tokens", type=int, default=32, help="new tokens per sequence (default: 32)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to run (default: a GPU if there is one)"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Decode on one process and on all ranks; rank 0 prints the results."""
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
            f"{options.prompts} prompts of up to {options.prompt_tokens:,} tokens, {options.new_tokens} new "
            "tokens each"
        )
        print(f"{'ranks':>6} {'tokens/s':>10} {'cache per rank':>16}")
        for ranks, one in ((1, alone), (mesh.size(), shared)):
            print(f"{ranks:6} {one.rate:10,.0f} {human(one.used_bytes):>16}")
        print(f"the logits agree within {apart:.0e} of the largest")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line.

    Raises:
        SystemExit: the heads cannot be sharded over the ranks, or a check failed.
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
