"""Bugs to plant in the library, one at a time, and the kind of case that should meet each of them."""

from collections.abc import Callable

import torch

from attnlib import Mask, call
from attnlib.backends import _torch, autograd
from attnlib.backends._torch import implementations, pages, tiles
from attnlib.cache import kv_cache
from attnlib.cache.pages import PageAllocator
from attnlib.cache.step import StepBuffers, TableBuffers

Bug = Callable[[Callable], object]  # what takes the attribute that it is put in the place of


def seen_one_too_far(visible: Callable) -> Callable:
    return lambda mask, i, j: visible(mask, i + 1, j)


def scale_squared(filled: Callable) -> Callable:
    def changed(score, head_dim):
        score = filled(score, head_dim)
        return score._replace(scale=score.scale**2)

    return changed


def lse_without_sink(forward: Callable) -> Callable:
    def changed(part, rule, out, lse):
        forward(part, rule, out, lse)
        forward(part._replace(sinks=None), rule, torch.empty_like(out), lse)

    return changed


def group_by_remainder(rows: Callable) -> Callable:
    """Query head h reads KV head h % g."""
    return lambda x, g, wide: rows(x.unflatten(2, (-1, g)).transpose(2, 3).flatten(2, 3), g, wide)


def starts_ignored(batch: Callable) -> Callable:
    return lambda table, starts, *rest: batch(table, [0] * len(starts), *rest)


def tail_cut_off(query_tiles: Callable) -> Callable:
    """The last keys are left out unless they fill eight."""

    def changed(part):
        for i0, i1, spans in query_tiles(part):
            cut = [(a, max(a, b - b % 8) if b == part.high and b - a > 8 else b) for a, b in spans]
            yield i0, i1, cut

    return changed


def dropout_not_made_up_for(dropout: Callable) -> Callable:
    return lambda part, rule, *tile: dropout(part, rule, *tile) * (1 - rule.dropout_p)


def cap_without_gradient(scores: Callable) -> Callable:
    return lambda *tile: scores(*tile)._replace(tanh=None)


def slopes_of_one_sequence(per_head: Callable) -> Callable:
    return lambda slopes, sinks, sequence, q: per_head(slopes, sinks, 0, q)


def lse_without_gradient(gradients: Callable) -> Callable:
    return lambda operators, ctx, dout, dlse: gradients(operators, ctx, dout, None)


def strangers_by_zero(part_of: Callable) -> Callable:
    """Keys of others, and of nobody, are multiplied by zero."""
    return lambda q, k, *rest: part_of(q + 0 * k.sum(), k, *rest)


def nothing(original: Callable) -> Callable:
    return lambda *arguments, **more: None


def rounded_down(quantise: Callable) -> Callable:
    def changed(x, store):
        values, scale = quantise(x, store)
        return ((x.float() / scale[..., None]).floor().to(store) if store == torch.int8 else values), scale

    return changed


def stale_length(update: Callable) -> Callable:
    """What a read shows are the lengths of the step before."""

    def changed(buffers, request, counts, *, counted):
        lengths = buffers.lengths.tensor.clone()
        update(buffers, request, counts, counted=counted)
        if not counted:
            buffers.lengths.tensor.copy_(lengths)

    return changed


def shortest_heir(heirs: Callable) -> Callable:
    """Of the owners of a page who all write, the shortest keeps it, and writes over what the others stored."""

    def changed(ledger, tokens):
        kept = heirs(ledger, tokens)
        for page in kept:
            owners = [x for x in tokens if page in ledger._holdings[x].pages]
            kept[page] = min(owners, key=lambda x: ledger._holdings[x].length)
        return kept

    return changed


# name -> the kind of case that meets it, how many cases it may take, where it is, and the bug
PLANTED: dict[str, tuple[str, int, object, str, Bug]] = {
    "the mask sees one key too far": ("dense", 20, Mask, "visible", seen_one_too_far),
    "scale squared": ("varlen", 20, call, "_filled", scale_squared),
    "an LSE without sink": ("dense", 40, tiles, "forward", lse_without_sink),
    "head h reads h % g": ("varlen", 20, tiles, "_rows", group_by_remainder),
    "a tail cut off": ("dense", 20, tiles, "_query_tiles", tail_cut_off),
    "dropout without 1 / (1 - p)": ("dense", 60, tiles, "_dropout", dropout_not_made_up_for),
    "no gradient of the softcap": ("dense", 40, tiles, "_scores", cap_without_gradient),
    "no gradient of the LSE": ("dense", 20, autograd.Operators, "gradients", lse_without_gradient),
    "slopes of the first sequence": ("varlen", 120, tiles, "per_head", slopes_of_one_sequence),
    "NaN times zero": ("varlen", 20, implementations, "part_of", strangers_by_zero),
    "rows of nobody left": ("varlen", 20, implementations, "_fill_nothing", nothing),
    "left padding seen": ("cached", 40, pages, "Batch", starts_ignored),
    "a forked page not copied": ("cached", 60, kv_cache, "copy_pages", nothing),
    "a forked page lost in a failed step": ("cached", 150, PageAllocator, "_writers_in_place", shortest_heir),
    "a stale table after a failed step": ("cached", 120, StepBuffers, "forget", nothing),
    "stale starts behind a window": ("cached", 60, TableBuffers, "_update_starts", nothing),
    "a stale length in a read": ("cached", 20, StepBuffers, "_update_per_step", stale_length),
    "int8 rounded down": ("cached", 20, _torch, "quantise", rounded_down),
}
