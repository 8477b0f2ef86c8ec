"""Bugs to plant in the library, one at a time, and the kind of case that should meet each of them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from attnlib import Mask, MaskFunction
from attnlib.backends import _torch, autograd
from attnlib.backends._torch import implementations, statistics, tiles
from attnlib.backends.operators import outputs
from attnlib.cache import layers
from attnlib.cache.pages import PageAllocator
from attnlib.cache.step import StepBuffers, TableBuffers
from attnlib.call import trees
from attnlib.masks import function
from attnlib.masks.selection import ShownBlocks
from attnlib.scores import Score, ScoreFunction
from attnlib.tracing import evaluation, program, trace

Bug = Callable[[Callable], object]  # what takes the attribute that it is put in the place of


def seen_one_too_far(visible: Callable) -> Callable:
    return lambda mask, i, j: visible(mask, i + 1, j)


def scale_squared(filled: Callable) -> Callable:
    def changed(score, head_dim):
        score = filled(score, head_dim)
        return score._replace(scale=score.scale**2)

    return changed


def lse_without_sink(forward: Callable) -> Callable:
    def changed(batch):
        return forward(batch)[0], forward(batch._replace(score=batch.score._replace(sinks=None)))[1]

    return changed


def group_by_remainder(rows: Callable) -> Callable:
    """Query head h reads KV head h % g."""
    return lambda x, g: rows(x.unflatten(2, (-1, g)).transpose(2, 3).flatten(2, 3), g)


def starts_ignored(batches: Callable) -> Callable:
    return lambda a: batches(a._replace(starts=torch.zeros_like(a.starts)))


def tail_cut_off(key_ranges: Callable) -> Callable:
    """The last keys are left out unless they fill eight."""

    def changed(keys, block):
        for a, b in key_ranges(keys, block):
            yield a, max(a, b - b % 8) if b == keys.stop and b - a > 8 else b

    return changed


def dropout_not_made_up_for(dropout: Callable) -> Callable:
    return lambda batch, *tile: dropout(batch, *tile) * (1 - batch.dropout.p)


def cap_without_gradient(tile: Callable) -> Callable:
    return lambda *where: tile(*where)._replace(tanh=None)


def slopes_of_one_sequence(slopes: Callable) -> Callable:
    return lambda batch, block: slopes(batch._replace(sequence=0), block)


def lse_without_gradient(gradients: Callable) -> Callable:
    return lambda operators, ctx, dout, dlse: gradients(operators, ctx, dout, None)


def strangers_by_zero(batches: Callable) -> Callable:
    """Keys of others, and of nobody, are multiplied by zero."""
    return lambda a: batches(a._replace(q=a.q + 0 * a.k.sum()))


def rows_moved(runs: Callable) -> Callable:
    """The rows of which probabilities are asked are counted from 1."""
    return lambda batch, rows: runs(batch, rows if rows is None else [row - 1 for row in rows])


def uninitialised(nothing: Callable) -> Callable:
    return outputs


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
    """Of the owners of a page who all write, the shortest keeps it, and writes over what the others
    stored.
    """

    def changed(ledger, tokens):
        kept = heirs(ledger, tokens)
        for page in kept:
            owners = [x for x in tokens if page in ledger._holdings[x].pages]
            kept[page] = min(owners, key=lambda x: ledger._holdings[x].length)
        return kept

    return changed


def widened(promoted: Callable) -> Callable:
    """Bools and small integers are added up as integers of 64 bits (F8)."""

    def changed(kinds, constants):
        kind = promoted(kinds, constants)
        return kind if kind == "float" else "int64"

    return changed


def clamped_from_below(index_at: Callable) -> Callable:
    """Constant indices below 0 are clamped to the first element (F11)."""
    return lambda index, size, brought, kind: brought(index, kind).clamp(0, size - 1)


def as_small_as_what_is_read(definition: Callable) -> Callable:
    """A score that does not read the key is one number for all keys."""

    def changed(function, score, *indices):
        inputs = dict(zip(program.SCORED, (score, *indices), strict=True))
        return evaluation.evaluated(function.program, inputs, function.tensors, score.dtype)

    return changed


def errors_as_they_are(called: Callable) -> Callable:
    """Pass on whatever a function raises for a stand-in (F10)."""
    return lambda name, function, arguments: function(*arguments)


def with_its_function(getstate: Callable) -> Callable:
    """A mask keeps the function that it was made of (F19)."""
    return lambda mask: getstate(mask) | {"versions": lambda: None}


def one_list(keys: Callable) -> Callable:
    """All heads see what the first list shows."""
    return lambda x, j, heads: keys(x._replace(shown=x.shown[:, :1]), j, heads)


def lists_of_the_first_queries(shown_to: Callable) -> Callable:
    def changed(batch, sequences, queries, *keys):
        return shown_to(batch, sequences, slice(0, queries.stop - queries.start), *keys)

    return changed


def first_argument(original: Callable) -> Callable:
    """A program stays as it is."""
    return lambda program, *arguments: program


def without_index_keys(copy_pages: Callable) -> Callable:
    def changed(view, pairs):
        plain = replace(view.layout, index_dim=0, index_heads=1, index_dtype=None)
        copy_pages(replace(view, layout=plain, check=False), pairs)

    return changed


# name -> the kind of case that meets it, how many cases it may take, where it is, and the bug
PLANTED: dict[str, tuple[str, int, object, str, Bug]] = {
    "the mask sees one key too far": ("dense", 20, Mask, "visible", seen_one_too_far),
    "scale squared": ("varlen", 20, Score, "filled", scale_squared),
    "an LSE without sink": ("dense", 40, tiles, "forward", lse_without_sink),
    "head h reads h % g": ("varlen", 20, tiles, "rows", group_by_remainder),
    "a tail cut off": ("dense", 20, tiles, "key_ranges", tail_cut_off),
    "dropout without 1 / (1 - p)": ("dense", 60, tiles, "_dropout", dropout_not_made_up_for),
    "no gradient of the softcap": ("dense", 40, tiles, "tile_of", cap_without_gradient),
    "no gradient of the LSE": ("dense", 20, autograd.Operators, "gradients", lse_without_gradient),
    "slopes of the first sequence": ("varlen", 120, tiles, "_slopes", slopes_of_one_sequence),
    "NaN times zero": ("varlen", 20, implementations, "batches", strangers_by_zero),
    "rows one after the asked": ("varlen", 60, statistics, "_runs", rows_moved),
    "rows of nobody left": ("varlen", 20, implementations, "_nothing", uninitialised),
    "left padding seen": ("cached", 40, implementations, "cached_batches", starts_ignored),
    "a forked page not copied": ("cached", 60, layers, "copy_pages", nothing),
    "a forked page without its index keys": ("cached", 60, layers, "copy_pages", without_index_keys),
    "a forked page lost in a failed step": ("cached", 150, PageAllocator, "_writers_in_place", shortest_heir),
    "a stale table after a failed step": ("cached", 120, StepBuffers, "forget", nothing),
    "stale starts behind a window": ("cached", 60, TableBuffers, "_update_starts", nothing),
    "a stale length in a read": ("cached", 20, StepBuffers, "_update_per_step", stale_length),
    "bools and small integers widened": ("function", 25, program, "promoted", widened),
    "t[-1] is t[0]": ("function", 25, evaluation, "index_at", clamped_from_below),
    "a score without the key": ("function", 25, ScoreFunction, "definition", as_small_as_what_is_read),
    "untraceable, in any words": ("function", 25, trace, "_called", errors_as_they_are),
    "a mask that cannot be pickled": ("function", 25, MaskFunction, "__getstate__", with_its_function),
    "a window of a tree that counts rows": ("tree", 40, function, "by_depth", first_argument),
    "packed trees without offsets": ("tree", 40, trees, "rebased", first_argument),
    "one list for all heads": ("selected", 20, ShownBlocks, "keys", one_list),
    "lists of the first queries": ("selected", 60, tiles, "shown_to", lists_of_the_first_queries),
    "int8 rounded down": ("cached", 20, _torch, "quantise", rounded_down),
}
