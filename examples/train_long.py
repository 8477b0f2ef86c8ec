"""Train a language model on sequences sharded over several GPUs: each rank has some tokens of every sequence.

    python examples/train_long.py                                       # one process
    torchrun --nproc-per-node 8 examples/train_long.py --tokens 131072 --sequences 1 --checkpointing

Each group of --context-parallel ranks shares its sequences; different groups read different sequences. All
ranks shard the weights, the gradients and the optimizer state (FSDP2). The example runs on CPUs with gloo and
on GPUs with NCCL, and the losses are the same for any number of ranks. Only attention sees the tokens of
other ranks. Fails if the model learned too little.
"""

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from decoder import Decoder
from text import VOCAB_SIZE, Corpus, load
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from attnlib import CAUSAL, GroupedQueryAttention, MultiHeadLatentAttention, Rope
from attnlib.parallel import ContextParallel, shard
from attnlib.sizes import GroupedShape, LatentShape, exchange_bytes
from attnlib.sizes.text import human

WARM_UP = 10  # the learning rate rises during this many steps
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
GROUPED = {"num_kv_heads": 2, "head_dim": 32}
HEADS = 4


def begin(device: str) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks that torchrun started, or of this process only."""
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (dist.get_world_size(),))


def end() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Reference cycles in torch keep gloo's threads alive. If the process exits before them, it aborts.
    gc.collect()


def make_model(options: argparse.Namespace, shared: ContextParallel) -> Decoder:
    """Make a model with the same weights on every rank; only its attention layers know of the sharding."""
    torch.manual_seed(0)

    def attention(i: int) -> nn.Module:
        made = {"mask": CAUSAL, "context_parallel": shared}
        if options.attention == "mla":
            return MultiHeadLatentAttention(
                options.width, HEADS, rope=Rope(16, interleaved=True), **LATENT, **made
            )
        return GroupedQueryAttention(options.width, HEADS, rope=Rope(32), **GROUPED, **made)

    return Decoder(VOCAB_SIZE, options.width, options.layers, attention=attention)


def share_weights(model: Decoder, mesh: DeviceMesh, *, checkpointing: bool) -> None:
    """Shard every weight over the ranks; a block gathers its weights while it computes."""
    for block in model.blocks:
        if checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches(corpus: Corpus, *, steps: int, sequences: int, tokens: int) -> Iterator[Tensor]:
    """Yield windows ``[sequences, tokens + 1]`` of training text, the same ones on every rank."""
    text = corpus.train.flatten()
    if tokens >= len(text):
        raise ValueError(
            f"--tokens: expected fewer than the text's {len(text):,}, got {tokens:,}; use a longer --text"
        )
    generator, window = torch.Generator().manual_seed(0), torch.arange(tokens + 1)
    for _ in range(steps):
        start = torch.randint(len(text) - tokens, (sequences, 1), generator=generator)
        yield text[start + window].long()


def bits(model: Decoder, text: Tensor, group: int, groups: int, shared: ContextParallel) -> Tensor:
    """Return the mean bits per byte over the tokens that this rank holds of its group's sequences."""
    own = text.chunk(groups)[group]
    given, wanted = (shard(x, shared.mesh) for x in (own[:, :-1], own[:, 1:]))
    logits = model(given).float()  # default positions: those in the whole sequence
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / math.log(2)


def train(
    model: Decoder, texts: Iterator[Tensor], loss_of, *, steps: int, rate: float, device: str
) -> Iterator[float]:
    """Take one step per batch, and yield the mean loss of all ranks.

    The loss of every rank covers equally many tokens, and FSDP2 averages gradients over the ranks. The result
    is the gradient of the mean loss over all tokens.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, text in enumerate(texts):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / WARM_UP) * (1 - step / steps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(text.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        yield total.item() / dist.get_world_size()


def describe(options: argparse.Namespace, ranks: int) -> str:
    """Describe how tokens are sharded and how many bytes each rank receives from other ranks."""
    cp, shape = options.context_parallel, {"hidden_size": options.width, "num_heads": HEADS}
    shape = LatentShape(**shape, **LATENT) if options.attention == "mla" else GroupedShape(**shape, **GROUPED)
    summary = (
        f"ranks: {ranks}, {cp} per sequence, with {options.tokens // cp:,} of {options.tokens:,} tokens each"
    )
    if options.form is None or cp == 1:
        return summary
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    sent = exchange_bytes(shape, options.tokens, ranks=cp, form=options.form, dtype=dtype)
    return (
        f"{summary}; per sequence, a layer receives {human(sent.forward)} in the forward pass "
        f"and {human(sent.backward)} in the backward pass"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, help="a text file to learn (default: Python's own standard library)"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="bytes per sequence (default: 1024)")
    parser.add_argument(
        "--sequences", type=int, default=2, help="sequences per step, on all ranks together (default: 2)"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument(
        "--attention", choices=("gqa", "mla"), default="gqa", help="attention variant (default: gqa)"
    )
    parser.add_argument("--width", type=int, default=128, help="channels of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument(
        "--context-parallel", type=int, metavar="N", help="ranks that share a sequence (default: all)"
    )
    parser.add_argument(
        "--form",
        choices=("ring", "gather", "heads"),
        help="form of context-parallel attention (default: the fastest)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: 2e-3)")
    parser.add_argument(
        "--margin", type=float, default=0.1, help="required fraction below the unigram entropy (default: 0.1)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to run (default: a GPU if there is one)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for the weights, one file per rank (default: not saved)"
    )
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, ranks: int) -> None:
    """Raise ValueError if sequences and tokens cannot be divided evenly among the ranks."""
    cp = options.context_parallel
    if cp < 1 or ranks % cp:
        raise ValueError(f"--context-parallel: expected a divisor of the {ranks} ranks, got {cp}")
    if options.sequences % (ranks // cp):
        raise ValueError(
            f"--sequences: expected a multiple of the {ranks // cp} groups of ranks, got {options.sequences}"
        )
    if options.tokens < 1 or options.tokens % (2 * cp):
        raise ValueError(f"--tokens: expected a multiple of 2 x {cp} ranks, got {options.tokens}")


def run(options: argparse.Namespace) -> None:
    """Train on all ranks; rank 0 reports the progress."""
    ranks, corpus = begin(options.device), load(options.text)
    options.context_parallel = options.context_parallel or ranks.size()
    check(options, ranks.size())
    cp, device, is_first = options.context_parallel, options.device, ranks.get_rank() == 0
    say = partial(tqdm.write, file=sys.stdout) if is_first else lambda *_: None
    groups = init_device_mesh(device, (ranks.size() // cp, cp), mesh_dim_names=("groups", "context"))
    shared = ContextParallel(groups["context"], form=options.form)
    model = make_model(options, shared).to(device)
    share_weights(model, ranks, checkpointing=options.checkpointing)
    entropy = corpus.unigram_entropy()
    say(f"{corpus.name}: {corpus.size:,} bytes; a unigram model needs {entropy:.3f} bits/byte")
    say(describe(options, ranks.size()))
    loss_of = partial(
        bits, model, group=groups["groups"].get_local_rank(), groups=groups["groups"].size(), shared=shared
    )
    texts = batches(corpus, steps=options.steps, sequences=options.sequences, tokens=options.tokens)
    losses, start = [], time.perf_counter()
    progress = tqdm(texts, "training", options.steps, unit="step", disable=not is_first, mininterval=5)
    for loss in train(model, progress, loss_of, steps=options.steps, rate=options.rate, device=device):
        losses.append(loss)
        if len(losses) in (1, options.steps) or len(losses) % max(1, options.steps // 10) == 0:
            say(f"step {len(losses):5}  {loss:.5f} bits/byte")
    rate = options.steps * options.sequences * options.tokens / (time.perf_counter() - start)
    memory = f", at most {human(torch.cuda.max_memory_allocated())} on a GPU" if device == "cuda" else ""
    say(f"{rate:,.0f} tokens/s{memory}")
    if options.out is not None:
        # Leave out lm_head.weight, because it is tied to the embedding.
        weights = {name: x for name, x in get_model_state_dict(model).items() if name != "lm_head.weight"}
        dcp.save(
            weights, storage_writer=dcp.HuggingFaceStorageWriter(str(options.out), save_distributed=True)
        )
        say(f"wrote the weights to {options.out}")
    late = sum(losses[-5:]) / len(losses[-5:])
    if not late <= (1 - options.margin) * entropy:
        raise ValueError(
            f"bits/byte: expected at most {(1 - options.margin) * entropy:.3f}, got {late:.3f}; train longer"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example from the command line.

    Raises:
        SystemExit: the ranks cannot share the work, or the model learned too little.
    """
    options = parse(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        run(options)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    finally:
        end()


if __name__ == "__main__":
    main()
