"""Decode with a Decoder: with a KV cache (prefill, then token by token), or without one for comparison.

>>> cache = paged_cache(model, sequences=2, length=64)
>>> handles, logits = prefill(model, cache, [torch.tensor([7, 8, 9]), torch.tensor([5])])
>>> for tokens in stream(model, cache, handles, logits, choose=greedy, steps=4):
...     print(tokens)
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from decoder import Decoder
from torch import Tensor

from attnlib import KVCache, SequenceHandle, packing

# Two tokens are tied if their logits differ by less than this fraction of the largest logit. Decoding with
# and without a cache sums in different orders, so rounding may decide such ties differently.
TIE = 256 * torch.finfo(torch.float32).eps


def paged_cache(
    model: Decoder, *, sequences: int, length: int, page_size: int = 16, shared_prefixes: int = 0
) -> KVCache:
    """Make a paged cache for ``sequences`` sequences of up to ``length`` tokens each."""
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
def prefill(model: Decoder, cache: KVCache, prompts: Sequence[Tensor]) -> tuple[list[SequenceHandle], Tensor]:
    """Store prompts of any lengths in one packed step; return their handles and logits ``[n, vocab]``.

    The logits are those after the last token of each prompt.
    """
    handles = cache.admit(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    with cache.step(dict(zip(handles, lengths, strict=True))) as layers:
        last = packing.last_rows(layers[0].cu_seqlens)
        logits = model(torch.cat(list(prompts)), caches=layers, rows=last)
    return handles, logits


@torch.no_grad()
def stream(
    model: Decoder,
    cache: KVCache,
    handles: Sequence[SequenceHandle],
    logits: Tensor,
    *,
    choose: Callable,
    steps: int,
) -> Iterator[Tensor]:
    """Yield the next tokens ``[n]`` of the sequences, ``steps`` times.

    ``choose`` picks tokens ``[n]`` from logits ``[n, vocab]``. ``logits`` are the logits after the stored
    tokens, as :func:`prefill` returns them. The last yielded tokens are not stored.
    """
    for remaining in reversed(range(steps)):
        tokens = choose(logits)
        yield tokens
        if remaining:
            with cache.step(dict.fromkeys(handles, 1)) as layers:
                logits = model(tokens, caches=layers)


def greedy(logits: Tensor) -> Tensor:
    """Choose the most likely token of each row of logits; pass this as ``choose`` to :func:`stream`."""
    return logits.argmax(-1)


def decode_cached(model: Decoder, prompts: Sequence[Tensor], steps: int) -> Tensor:
    """Decode greedily with a paged cache; return the tokens ``[n, steps]``."""
    cache = paged_cache(model, sequences=len(prompts), length=max(map(len, prompts)) + steps)
    handles, logits = prefill(model, cache, prompts)
    return torch.stack(list(stream(model, cache, handles, logits, choose=greedy, steps=steps)), 1)


@torch.no_grad()
def decode_uncached(model: Decoder, prompts: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Decode greedily without a cache; return the tokens ``[n, steps]`` and their logits, on the CPU.

    Every step runs the model over the whole sequences again.
    """
    sequences, chosen, all_logits = list(prompts), [], []
    for _ in range(steps):
        lengths = torch.tensor([0, *map(len, sequences)], device=prompts[0].device)
        cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
        logits = model(torch.cat(sequences), cu_seqlens=cu_seqlens, rows=packing.last_rows(cu_seqlens))
        tokens = greedy(logits)
        sequences = [
            torch.cat((sequence, token[None])) for sequence, token in zip(sequences, tokens, strict=True)
        ]
        chosen.append(tokens)
        all_logits.append(logits)
    return torch.stack(chosen, 1).cpu(), torch.stack(all_logits, 1).cpu()


def check_same(cached: Tensor, plain: Tensor, logits: Tensor) -> str:
    """Check that decoding with a cache and without one gives the same tokens ``[n, steps]``.

    ``logits`` ``[n, steps, vocab]`` are those from which ``plain``, the tokens without a cache, were chosen.
    If two tokens are tied, a sequence may diverge there, and its later tokens cannot be compared. Return a
    note on such sequences, or "" if there are none.

    Raises:
        SystemExit: a sequence diverges where the logits are further apart than fp32 rounding explains.
    """
    notes = []
    for row in (cached != plain).any(1).nonzero().flatten().tolist():
        step = (cached[row] != plain[row]).nonzero()[0].item()
        at, ours, theirs = logits[row, step], cached[row, step].item(), plain[row, step].item()
        gap, tie = (at[theirs] - at[ours]).item(), TIE * at.abs().max().item()
        what = (
            f"sequence {row} diverges at new token {step}: {ours} cached, {theirs} uncached, "
            f"logit gap {gap:.2e}"
        )
        if not gap <= tie:
            raise SystemExit(
                f"cached and uncached greedy decoding differ: {what}; the gap of a tie is at most {tie:.2e}"
            )
        notes.append(f"{what} (a tie: at most {tie:.2e})")
    return "; ".join(notes)
