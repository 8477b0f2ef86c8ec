"""Decoding with a Decoder: from a cache, prompt by prompt and token by token, and without one, to compare.

>>> cache = paged_cache(model, sequences=2, length=64)
>>> handles, logits = prefill(model, cache, [torch.tensor([7, 8, 9]), torch.tensor([5])])
>>> for tokens in stream(model, cache, handles, logits, choose=greedy, steps=4):
...     print(tokens)
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from decoder import Decoder
from torch import Tensor

from attnlib import KVCache
from attnlib.cache.pages import Handle

# A tie, when two logits differ by less than this share of the largest: sums of other shapes round otherwise.
TIE = 256 * torch.finfo(torch.float32).eps


def paged_cache(
    model: Decoder, *, sequences: int, length: int, page_size: int = 16, shared_prefixes: int = 0
) -> KVCache:
    """A paged cache with room for ``sequences`` sequences of ``length`` tokens each."""
    return KVCache.paged(
        model.kv_layouts(),
        pages=sequences * -(-length // page_size),
        page_size=page_size,
        max_sequences=sequences,
        max_length=length,
        shared_prefixes=shared_prefixes,
        device=model.embed.weight.device,
    )


@torch.no_grad()
def prefill(model: Decoder, cache: KVCache, prompts: Sequence[Tensor]) -> tuple[list[Handle], Tensor]:
    """Store prompts of any lengths in one packed step: their handles, and the logits ``[n, vocab]`` after
    each.
    """
    handles = cache.admit(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    with cache.step(dict(zip(handles, lengths, strict=True))) as layers:
        logits = model(torch.cat(list(prompts)), caches=layers)
    last = torch.tensor(lengths, device=logits.device).cumsum(0) - 1
    return handles, logits[last]


@torch.no_grad()
def stream(
    model: Decoder, cache: KVCache, handles: Sequence[Handle], logits: Tensor, *, choose: Callable, steps: int
) -> Iterator[Tensor]:
    """Yield the next tokens ``[n]`` of these sequences, ``steps`` times.

    ``choose`` picks tokens ``[n]`` from logits ``[n, vocab]``; ``logits`` are those after what is stored, as
    :func:`prefill` gives them. The last tokens yielded are not stored.
    """
    for remaining in reversed(range(steps)):
        tokens = choose(logits)
        yield tokens
        if remaining:
            with cache.step(dict.fromkeys(handles, 1)) as layers:
                logits = model(tokens, caches=layers)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row: a ``choose`` for :func:`stream`."""
    return logits.argmax(-1)


@torch.no_grad()
def decode_uncached(model: Decoder, prompts: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Greedy continuations ``[n, steps]`` that read everything anew for each token, and their logits, on the
    CPU.
    """
    sequences, chosen, all_logits = list(prompts), [], []
    for _ in range(steps):
        ends = torch.tensor([0, *map(len, sequences)], dtype=torch.int32, device=prompts[0].device).cumsum(0)
        logits = model(torch.cat(sequences), cu_seqlens=ends.int())[ends[1:] - 1]
        tokens = greedy(logits)
        sequences = [
            torch.cat((sequence, token[None])) for sequence, token in zip(sequences, tokens, strict=True)
        ]
        chosen.append(tokens)
        all_logits.append(logits)
    return torch.stack(chosen, 1).cpu(), torch.stack(all_logits, 1).cpu()


def check_same(cached: Tensor, plain: Tensor, logits: Tensor) -> str:
    """Compare greedy continuations ``[n, steps]``; ``logits`` ``[n, steps, vocab]`` are those behind
    ``plain``.

    Returns a note on sequences that part at a tie, after which they cannot be compared; empty if there is
    none.

    Raises:
        SystemExit: a sequence parts where its logits are further apart than fp32 rounding explains.
    """
    notes = []
    for row in (cached != plain).any(1).nonzero().flatten().tolist():
        step = (cached[row] != plain[row]).nonzero()[0].item()
        at, ours, theirs = logits[row, step], cached[row, step].item(), plain[row, step].item()
        gap, tie = (at[theirs] - at[ours]).item(), TIE * at.abs().max().item()
        what = (
            f"sequence {row} parts at new token {step}: {ours} cached, {theirs} uncached, logit gap {gap:.2e}"
        )
        if not gap <= tie:
            raise SystemExit(
                f"cached and uncached greedy decoding differ: {what}, a tie is at most {tie:.2e}"
            )
        notes.append(f"{what} (a tie: at most {tie:.2e})")
    return "; ".join(notes)
