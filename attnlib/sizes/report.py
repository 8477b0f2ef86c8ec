"""Report a model's attention sizes at several contexts and batches, as rows of numbers."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

import torch

from ..internal.signatures import kind, leading_to
from ..kv import KVLayout
from .attention import LatentShape, Shape, decode_bytes, decode_flops, prefill_flops
from .cache import cache_bytes, largest_batch, longest_context
from .catalogue import CHIPS, Chip
from .exchange import FORMS, exchange_bytes, shares_heads
from .models import Model


@kind
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The serving setup for which a report computes sizes.

    ``memory`` is the number of bytes that one rank has for its weights and its cache; None means the chip's
    memory. ``weights`` is the number of bytes of one rank's weights. None means the weights of each model in
    ``dtype``, or 0 if the model's parameters outside attention are unknown. The rest is for the cache.

    ``ranks`` tensor-parallel ranks divide the heads between them. ``context_ranks`` ranks divide the tokens
    of each cache, and of each sequence in training: first the tensor-parallel ranks that hold the same KV
    heads, then additional ranks.

    Raises:
        ValueError: a size is below 1, or ``memory`` or ``weights`` is negative.
    """

    contexts: tuple[int, ...] = (4_096, 32_768, 131_072)
    batches: tuple[int, ...] = (1, 8, 64)
    dtype: torch.dtype = torch.bfloat16
    storage_dtype: torch.dtype | None = None
    page_size: int = 64
    ranks: int = 1
    context_ranks: int = 1
    chip: Chip = CHIPS[0]
    memory: int | None = None
    weights: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("contexts", min(self.contexts, default=0)),
            ("batches", min(self.batches, default=0)),
        ):
            if least < 1:
                raise ValueError(f"{name}: expected sizes of at least 1, got {getattr(self, name)}")
        if self.page_size < 1:
            raise ValueError(f"page_size: expected at least 1 token, got {self.page_size}")
        if self.context_ranks < 1:
            raise ValueError(f"context_ranks: expected at least 1, got {self.context_ranks}")
        for name, size in (("memory", self.memory), ("weights", self.weights)):
            if size is not None and size < 0:
                raise ValueError(f"{name}: expected at least 0 bytes, got {size}")

    @property
    def rank_memory(self) -> int:
        """The number of bytes that one rank has for its weights and its cache."""
        return self.chip.memory if self.memory is None else self.memory

    def weight_bytes(self, model: Model) -> int:
        """Return how many bytes the weights of ``model`` take on one rank."""
        if self.weights is not None:
            return self.weights
        return (model.shard(self.ranks).total_parameters or 0) * self.dtype.itemsize

    def sharing(self, model: Model) -> int:
        """Return how many ranks shard both the tokens of the cache and the heads."""
        return gcd(self.context_ranks, *(_copies(shape, self.ranks) for shape in model.layers))


@leading_to("rows(models, setting) makes them")
@dataclass(frozen=True, slots=True)
class Row:
    """The sizes of one variant of a model at one context and batch, per rank except ``total_token_bytes``.

    If ranks share the tokens of a cache, the numbers are those of the rank with the most tokens.

    Attributes:
        token_bytes: bytes of one token on a rank that stores it, while all sliding windows include the token.
        total_token_bytes: bytes of one token on all ranks together.
        prefill_flops: FLOPs for the prompt of one sequence.
        weight_bytes: bytes of the weights, as :class:`Setting` counts them.
        decode_flops, decode_bytes: FLOPs and bytes read in a decoding step of the whole batch.
        bound: what limits a decoding step, "memory" or "compute"; empty unless the dtype has 16 bits.
        longest_context: the longest context at this batch; None means no limit.
        least_ranks: the fewest tensor-parallel ranks whose memory holds the weights and one page of the
            cache; None if no number of ranks does, or if the ``Setting`` gives the weights of one rank.
        ring_bytes, gather_bytes, heads_bytes: bytes that a rank receives in training on one sequence, forward
            and backward, in each form of context parallelism; None if the ranks cannot divide the heads.
    """

    variant: str
    context: int
    batch: int
    parameters: int
    weight_bytes: int
    token_bytes: int
    total_token_bytes: int
    cache_bytes: int
    prefill_flops: int
    decode_flops: int
    decode_bytes: int
    bound: str
    longest_context: int | None
    largest_batch: int
    least_ranks: int | None
    ring_bytes: int
    gather_bytes: int
    heads_bytes: int | None

    @property
    def intensity(self) -> float:
        """The FLOPs per byte read in a decoding step."""
        return self.decode_flops / self.decode_bytes


@kind
def rows(models: Sequence[Model], setting: Setting) -> list[Row]:
    """Return one row for each model, context and batch.

    >>> from attnlib.sizes import model
    >>> [row] = rows([model("llama-2-7b")], Setting(contexts=(4096,), batches=(1,)))
    >>> row.token_bytes, row.cache_bytes, row.bound
    (524288, 2147483648, 'memory')

    Raises:
        ValueError: a model cannot be sharded over the ranks.
    """
    least_ranks = [_least_ranks(model, setting) for model in models]
    return [
        _row(model, setting, context=context, batch=batch, least_ranks=least)
        for model, least in zip(models, least_ranks, strict=True)
        for context in setting.contexts
        for batch in setting.batches
    ]


def _row(model: Model, setting: Setting, *, context: int, batch: int, least_ranks: int | None) -> Row:
    rank = model.shard(setting.ranks)
    stored = {"dtype": setting.dtype, "storage_dtype": setting.storage_dtype}
    layouts, shared = rank.layouts(**stored), {"ranks": setting.context_ranks}
    paged = {"page_size": setting.page_size} | shared
    weights = setting.weight_bytes(model)
    cache_memory = setting.rank_memory - weights
    flops = batch * sum(_step_flops(shape, context, setting, setting.sharing(model)) for shape in rank.layers)
    read = sum(decode_bytes(shape, context, batch=batch, **stored, **shared) for shape in rank.layers)
    bound = "compute" if flops / read > setting.chip.ridge else "memory"
    return Row(
        variant=model.kind,
        context=context,
        batch=batch,
        parameters=rank.parameters,
        weight_bytes=weights,
        token_bytes=sum(layout.token_bytes for layout in layouts),
        total_token_bytes=_on_all_ranks(model, layouts, setting),
        cache_bytes=cache_bytes(layouts, [context], **paged) * batch,
        prefill_flops=sum(prefill_flops(shape, context) for shape in rank.layers),
        decode_flops=flops,
        decode_bytes=read,
        bound=bound if setting.dtype.itemsize == 2 else "",
        longest_context=longest_context(layouts, cache_memory, batch=batch, **paged),
        largest_batch=largest_batch(layouts, cache_memory, context=context, **paged),
        least_ranks=least_ranks,
        **{f"{form}_bytes": _received(rank, context, setting, form) for form in FORMS},
    )


def _least_ranks(model: Model, setting: Setting) -> int | None:
    """Return the fewest tensor-parallel ranks whose memory holds the weights and one page of the cache."""
    if setting.weights is not None:
        return None
    heads = gcd(*(shape.num_heads for shape in model.layers))
    for ranks in (ranks for ranks in range(1, heads + 1) if heads % ranks == 0):
        with suppress(ValueError):  # the KV heads cannot be sharded over this number of ranks
            layouts = model.shard(ranks).layouts(dtype=setting.dtype, storage_dtype=setting.storage_dtype)
            free = setting.rank_memory - replace(setting, ranks=ranks).weight_bytes(model)
            if largest_batch(
                layouts, free, context=1, page_size=setting.page_size, ranks=setting.context_ranks
            ):
                return ranks
    return None


def _copies(shape: Shape, ranks: int) -> int:
    """Return how many tensor-parallel ranks store the same keys and values, or the same latents."""
    return (
        ranks
        if isinstance(shape, LatentShape)
        else ranks * shape.shard(ranks).num_kv_heads // shape.num_kv_heads
    )


def _step_flops(shape: Shape, context: int, setting: Setting, sharing: int) -> int:
    """Return the FLOPs of one rank and layer to decode one token.

    Unless the layer has a window, ``sharing`` ranks divide the tokens of the same KV heads between them, and
    each computes the query heads of all of these ranks over its own tokens.
    """
    own, projections = decode_flops(shape, context, ranks=setting.context_ranks), 2 * shape.weights
    return own if shape.window is not None else projections + sharing * (own - projections)


def _on_all_ranks(model: Model, layouts: Sequence[KVLayout], setting: Setting) -> int:
    """Return how many bytes all ranks together use to store one token.

    If ranks share a cache, only one of them stores the token, except in windowed layers, where each does.
    """
    ranks = setting.ranks * setting.context_ranks // setting.sharing(model)
    apart = (ranks // setting.context_ranks if layout.window is None else ranks for layout in layouts)
    return sum(layout.token_bytes * count for layout, count in zip(layouts, apart, strict=True))


def _received(rank: Model, context: int, setting: Setting, form: str) -> int | None:
    """Return how many bytes a rank receives over all layers while training on one sequence.

    The result is None if the ranks cannot divide the heads evenly.
    """
    ranks = setting.context_ranks
    if form == "heads" and not all(shares_heads(shape, ranks) for shape in rank.layers):
        return None
    options = {"ranks": ranks, "form": form, "dtype": setting.dtype}
    found = (exchange_bytes(shape, context, **options) for shape in rank.layers)
    return sum(one.forward + one.backward for one in found)
