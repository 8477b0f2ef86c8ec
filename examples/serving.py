"""Serve requests as they arrive, and measure at every step how the memory is used."""

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from decoder import Decoder
from scheduler import Request, Scheduler, Stream
from tqdm import tqdm

from attnlib import packing
from attnlib.sizes import cache_bytes


class Sample(NamedTuple):
    """Measurements of one step: requests that ran or waited, stored tokens, and the cache's memory in bytes.

    ``used`` counts the bytes of allocated pages, and ``filled`` those that hold tokens. ``external`` is the
    free memory that external fragmentation wastes: it would suffice for the first waiting request, which has
    to wait all the same.
    """

    live: int
    waiting: int
    tokens: int
    filled: int
    used: int
    external: int


class Run(NamedTuple):
    """The result of serving a trace: its streams (one per request), steps, preemptions, and total seconds."""

    streams: list[Stream]
    samples: list[Sample]
    preemptions: int
    seconds: float

    @property
    def answers(self) -> list[list[int]]:
        """The new tokens of each request."""
        return [stream.answer for stream in self.streams]


@torch.no_grad()
def serve(model: Decoder, scheduler: Scheduler, requests: Sequence[Request], *, label: str = "") -> Run:
    """Serve requests, sorted by arrival, until all are answered greedily; each step is one model call."""
    cache, device = scheduler.cache, model.embed.weight.device
    streams, samples, start = [], [], time.perf_counter()
    quick = sys.stderr.isatty()
    bar = tqdm(
        total=len(requests), desc=label, unit="request", disable=not label, mininterval=0.2 if quick else 15
    )
    while len(streams) < len(requests) or scheduler.live or scheduler.waiting:
        while len(streams) < len(requests) and requests[len(streams)].arrival <= len(samples):
            streams.append(scheduler.submit(requests[len(streams)]))
        plan, likeliest = scheduler.plan(), []
        if plan:
            chunks = [stream.text[(at := scheduler.stored(stream)) : at + n] for stream, n in plan.items()]
            tokens = torch.tensor(sum(chunks, []), device=device)  # noqa: RUF017
            with cache.step({stream.handle: n for stream, n in plan.items()}) as layers:
                last = packing.last_rows(layers[0].cu_seqlens)
                likeliest = model(tokens, caches=layers, rows=last).argmax(-1).tolist()
        samples.append(measure(scheduler, sum(plan.values())))
        bar.update(len(scheduler.advance(plan, likeliest)))
    bar.close()
    return Run(streams, samples, scheduler.preemptions, time.perf_counter() - start)


def measure(scheduler: Scheduler, tokens: int) -> Sample:
    """Measure the memory after a step of ``tokens`` tokens, before finished requests free their pages.

    Raises:
        SystemExit: the cache does not use exactly the pages that the sequences and the shared prompt need.
    """
    cache, live, waiting = scheduler.cache, scheduler.live, scheduler.waiting
    stored = [n for n in map(scheduler.stored, live) if n]
    copied = scheduler.shared_length % cache.page_size  # shared tokens that each sequence copies
    held = -(-scheduler.shared_length // cache.page_size) + sum(map(scheduler.pages_for, stored))
    if cache.used_bytes != held * scheduler.page_bytes:
        formula = held * scheduler.page_bytes
        raise SystemExit(f"cache: expected {formula} bytes in use by formula, measured {cache.used_bytes}")
    # The pages that remain if each live request holds only the pages that its tokens need so far.
    free = scheduler.pages - sum(scheduler.pages_for(len(stream.text)) for stream in live)
    blocked = waiting and scheduler.pages_for(len(waiting[0].text)) <= free
    return Sample(
        len(live),
        len(waiting),
        tokens,
        (scheduler.shared_length + sum(n + copied for n in stored))
        * cache_bytes(cache.layouts, [1], page_size=1),
        cache.used_bytes,
        free * scheduler.page_bytes if blocked else 0,
    )


def first_fit(
    requests: Sequence[Request], answers: Sequence[Sequence[int]], *, memory: int, budget: int
) -> list[Sample]:
    """Simulate serving without pages: each request gets one contiguous extent of its maximum length.

    Requests are placed in order of priority, then arrival, each into the first hole that is large enough, and
    are never preempted. A request takes as many steps as if it were alone: its prompt in chunks of ``budget``
    tokens, then one step per new token. ``memory``, and ``used`` and ``external`` of the samples, count
    tokens instead of bytes; ``filled`` is 0.
    """
    extents: list[tuple[int, int, int]] = []  # (begin, end, step that frees it), sorted by address
    samples, waiting, coming = [], [], list(enumerate(requests))
    while coming or waiting or extents:
        step = len(samples)
        extents = [extent for extent in extents if extent[2] > step]
        while coming and coming[0][1].arrival <= step:
            waiting.append(coming.pop(0))
        waiting.sort(key=lambda item: (-item[1].priority, item[0]))
        while waiting:
            number, request = waiting[0]
            place = _hole(extents, _declared(request), memory)
            if place is None:
                break
            steps = -(-len(request.prompt) // budget) + len(answers[number]) - 1
            extents = sorted([*extents, (place, place + _declared(request), step + steps)])
            del waiting[0]
        used = sum(end - begin for begin, end, _ in extents)
        blocked = waiting and _declared(waiting[0][1]) <= memory - used
        samples.append(Sample(len(extents), len(waiting), 0, 0, used, memory - used if blocked else 0))
    return samples


def _declared(request: Request) -> int:
    return len(request.prompt) + request.new_tokens - 1


def _hole(extents: Sequence[tuple[int, int, int]], size: int, memory: int) -> int | None:
    """Return the start of the first hole in memory that fits ``size`` tokens, or None."""
    begins = [0, *(end for _, end, _ in extents)]
    ends = [*(begin for begin, _, _ in extents), memory]
    return next((begin for begin, end in zip(begins, ends, strict=True) if end - begin >= size), None)
