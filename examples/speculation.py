"""Greedy decoding with drafts from the sequence so far: prompt lookup decoding (Saxena, 2023)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from decoder import Decoder
from decoding import greedy, prefill
from torch import Tensor

from attnlib import KVCache

LONGEST_MATCH = 8  # guesses come from an earlier match of at most this many last tokens


class Burst(NamedTuple):
    """The tokens of a step (one, plus the accepted guesses), and how many tokens were guessed."""

    tokens: list[int]
    guessed: int


@torch.no_grad()
def speculate(model: Decoder, cache: KVCache, prompt: Tensor, *, draft: int, steps: int) -> Iterator[Burst]:
    """Yield the ``steps`` greedy tokens after ``prompt`` in bursts: one token, plus the accepted guesses.

    Each step feeds the last token and up to ``draft`` guesses at once, and rolls the cache back to the
    accepted ones.
    """
    [handle], logits = prefill(model, cache, [prompt])
    text = bytearray(prompt.tolist())
    burst, guess = greedy(logits).tolist(), b""
    while True:
        text.extend(burst)
        yield Burst(burst, len(guess))
        missing = len(prompt) + steps - len(text)
        if missing == 0:
            return
        guess = look_up(text, min(draft, missing - 1))
        stored = cache.length(handle)  # the cache holds all tokens of the text except the last one
        with cache.step({handle: 1 + len(guess)}) as layers:
            logits = model(torch.tensor([text[-1], *guess], device=prompt.device), caches=layers)
        burst = greedy(logits).tolist()
        right = next((i for i, token in enumerate(guess) if token != burst[i]), len(guess))
        burst = burst[: right + 1]
        cache.truncate(handle, stored + 1 + right)


def look_up(text: bytes | bytearray, count: int) -> bytes:
    """Guess the next ``count`` tokens: find an earlier occurrence of the last tokens, and copy what followed.

    The longest match (up to LONGEST_MATCH tokens) is used. If fewer than ``count`` tokens followed it, these
    tokens are repeated. The guess is empty if there is no earlier occurrence.
    """
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return (bytes(text[at + length :]) * count)[:count]
    return b""
