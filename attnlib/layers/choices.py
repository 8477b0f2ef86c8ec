"""The choice of keys in a layer: make its index branch, compute index keys, and choose, or stay dense."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..indexing import Chosen, Indexer, IndexTensors, StoredKeys, choose, reads_stored
from ..internal.checks import came, is_recorded
from ..kv import KVLayout, KVView
from ..masks.band import CAUSAL, FULL, AnyMask, refuse_mask
from ..rope.rope import Angles
from .inputs import Inputs, computed_dtype
from .positions import angles_of, positions_of, sequence_of
from .shared_keys import refuse_own_keys

REFUSED_RANKS = (
    "context_parallel: expected None with select=, since a rank has the index keys of its own tokens only; "
    "train with tensor parallelism, or pass whole sequences"
)


def check_select(
    layer: nn.Module, select: Indexer | None, *, kv_heads: int | None, q_lora_rank: int | None
) -> None:
    """Raise an error unless an index branch fits a layer; ``kv_heads`` is None in a latent layer.

    Raises:
        TypeError: ``select`` is not an Indexer.
        ValueError: the indexer does not fit the layer.
    """
    if select is None:
        return
    if not isinstance(select, Indexer):
        raise TypeError(f"select: expected an Indexer or None, got {type(select).__name__}")
    if layer.mask != CAUSAL:
        raise ValueError(
            "mask: expected CAUSAL with select=, since an index branch chooses among all keys up to a "
            f"query, got {layer.mask.spelled}"
        )
    if layer.context_parallel is not None:
        raise ValueError(REFUSED_RANKS)
    if select.source == "latent" and q_lora_rank is None:
        kind = "a grouped layer" if kv_heads is not None else "q_lora_rank=None"
        raise ValueError(
            f"select.source: expected 'x' or 'normed' for {kind}, which has no q latent, got 'latent'"
        )
    if select.per == "group" and select.heads != kv_heads:
        expected = "per='all' in a latent layer" if kv_heads is None else f"num_kv_heads={kv_heads} heads"
        raise ValueError(f"select: expected {expected}, got per='group' with {select.heads} heads")
    if select.rope is not None and select.rope.axes is not None and select.rope != layer.rope:
        raise ValueError(
            f"select.rope: expected axes only in the rope of the layer, {layer.rope}, got {select.rope}"
        )


def index_sizes(select: Indexer | None) -> dict[str, int]:
    """Return the options of a KVLayout that store the index keys of a branch."""
    return {} if select is None else {"index_dim": select.head_dim}


def index_layout(layer: nn.Module) -> KVLayout:
    """Return the cache layout of a layer without keys of its own, which stores the keys of its index branch.

    Raises:
        ValueError: the layer has no index branch.
    """
    refuse_own_keys(layer.select is not None)
    dtype = computed_dtype(layer.indexer.k_proj.weight)
    return KVLayout.index_only(**index_sizes(layer.select), dtype=dtype)


def check_index_cache(layer: nn.Module, given: Inputs) -> None:
    """Raise ValueError unless ``kv`` stores what the layer appends, and ``keys`` are of the same step.

    A layer that reads the keys of another one appends its index keys only.
    """
    kv, keys, reads = given.kv, given.keys, layer.select is not None and not layer.own_keys
    if kv is not None and kv.layout.has_keys == reads:
        stored = ("index keys only", "own keys")
        raise ValueError(
            f"kv: expected a layer that stores {stored[not reads]}, got one that stores {stored[reads]}; "
            "make the cache with the kv_layout of each layer"
        )
    if not reads or keys is None:
        return
    if kv is None and isinstance(keys, KVView) and given.selected is None:
        raise ValueError(
            "kv: expected the cache of this layer's index keys with keys= of a cache, got None; pass kv=, or "
            "selected= of another layer"
        )
    if kv is not None and getattr(keys, "step", None) is not kv.info:
        raise ValueError(
            "keys: expected the view() of a layer in the same cache step as kv=, since both must have the "
            f"same tokens, got another {type(keys).__name__}; pass keys=layers[owner].view()"
        )


def given_choice(selected: Chosen | Tensor, own: Indexer | None) -> Chosen:
    """Return ``selected=`` as a choice; the blocks of a tensor are those of the layer's ``own`` branch.

    Raises:
        TypeError: ``selected`` is neither a choice nor a tensor.
    """
    if isinstance(selected, Chosen):
        return selected
    if not isinstance(selected, Tensor):
        raise TypeError(
            f"selected: expected what layer.choose() returns, or int32 lists, got {came(selected)}"
        )
    return Chosen(selected, 1 if own is None else own.block_size)


def chosen_by(
    layer: nn.Module, x: Tensor, given: Inputs, angles: Angles | None, latent: Tensor | None = None
) -> tuple[Chosen, Tensor | None]:
    """Return what the layer's index branch chooses, and the index keys of x if it computed them.

    ``angles`` are the layer's own. ``latent`` is the q latent of x, if it is known.

    Raises:
        NotImplementedError, ValueError: the branch cannot choose among these keys.
    """
    _check_chooses(given)
    select = layer.select
    if _tokens(x, given) <= select.top * select.block_size:
        return Chosen(None, select.block_size), None
    cu_seqlens = given.cu_seqlens if given.kv is None else given.kv.cu_seqlens
    if cu_seqlens is not None and is_recorded(x):
        raise NotImplementedError(
            "select: expected dense steps in compiled code and CUDA graphs, since the offsets of packed "
            "sequences are read to choose, got a packed one; pass selected="
        )
    index = index_tensors_of(layer, x, given, angles, latent)
    if given.kv is not None:
        lists = _lists_of_step(layer, index, given.kv, is_replayed=is_recorded(x))
    elif cu_seqlens is not None:
        lists = _lists(layer, index, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    else:
        lists = _lists(layer, _after(index, given.key_starts), starts=given.key_starts)
    return Chosen(lists, select.block_size), index.keys


def index_keys_of(layer: nn.Module, x: Tensor, given: Inputs, angles: Angles | None) -> Tensor:
    """Return only the index keys ``[..., dI]`` of x, for a cache."""
    return layer.indexer.keys(x, _index_angles(layer, x, given, angles))


def index_tensors_of(
    layer: nn.Module, x: Tensor, given: Inputs, angles: Angles | None, latent: Tensor | None = None
) -> IndexTensors:
    """Return the index queries, keys and weights of x; the arguments are those of :func:`chosen_by`."""
    if layer.select.source != "latent":
        latent = None
    elif latent is None:
        with torch.no_grad():
            latent = layer.query_source(x)
    positions = _positions(layer, x, given) if layer.select.query_scale else None
    return layer.indexer(x, latent, angles=_index_angles(layer, x, given, angles), positions=positions)


def _tokens(x: Tensor, given: Inputs) -> int:
    """Return how many tokens a sequence may have, by the sizes that the host knows.

    Compiled code and CUDA graphs are replayed for longer sequences, up to the capacity of their cache.
    """
    if given.kv is None:
        return x.shape[-2]
    return given.kv.capacity if is_recorded(x) else given.kv.history + x.shape[-2]


def _check_chooses(given: Inputs) -> None:
    """Raise NotImplementedError or ValueError if the keys are not those that an index branch scores."""
    if given.context_parallel is not None:
        raise NotImplementedError(REFUSED_RANKS)
    if not isinstance(given.mask, AnyMask | None):
        refuse_mask(given.mask)
    if given.mask not in (None, CAUSAL, FULL):
        raise NotImplementedError(
            "mask: expected None, CAUSAL or FULL in a layer that chooses its keys, since the index branch "
            f"does not know the mask, got {given.mask.spelled}; pass selected=, pack sequences with "
            "cu_seqlens=, or pad them on one side"
        )
    if given.context is not None or (isinstance(given.keys, KVView) and given.kv is None):
        name = "keys" if given.context is None else "context"
        raise NotImplementedError(
            f"{name}: expected keys of the tokens of x in a layer that chooses its keys, since it scores "
            "their index keys, got others; pass selected="
        )
    if given.kv is not None and given.kv.step_view is not None and given.kv.step_view.is_partial:
        raise NotImplementedError(
            "kv: expected a cache that no ranks share, since an index branch scores all keys, got a sharded "
            "one; make the cache without mesh="
        )


def _positions(layer: nn.Module, x: Tensor, given: Inputs) -> Tensor:
    """Return the positions at which the index branch rotates x.

    Pooled keys rotate at the storage index of their block, so there all tokens count from the start of
    storage, whatever positions are given.
    """
    if not layer.select.norm_after_pool:
        return positions_of(layer.rope, x, given, "the index branch")
    has_axes, own = layer.rope is not None and layer.rope.axes is not None, (given.positions, given.angles)
    if has_axes and any(x is not None for x in own):
        raise NotImplementedError(
            "positions: expected neither positions nor angles with norm_after_pool and a rope of several "
            "axes, since pooled keys rotate at the storage index of their block, got some; pass selected="
        )
    positions = positions_of(None, x, given._replace(positions=None, angles=None))
    if given.kv is None:
        return positions
    view = given.kv.step_view
    if view.cu_seqlens_q is None:
        return positions + view.starts[:, None]
    return positions + view.starts[sequence_of(torch.arange(x.shape[0], device=x.device), view.cu_seqlens_q)]


def _index_angles(layer: nn.Module, x: Tensor, given: Inputs, angles: Angles | None) -> Angles | None:
    """Return the angles of the index branch; the layer's own if it rotates alike."""
    rope = layer.select.rope
    if rope is None or (rope == layer.rope and not layer.select.norm_after_pool):
        return None if rope is None else angles
    positions = _positions(layer, x, given)
    return angles_of(rope, x, given._replace(angles=None)) if rope.needs_length else rope.angles(positions)


def _after(index: IndexTensors, starts: Tensor | None) -> IndexTensors:
    """Return index tensors whose keys before ``starts`` ``[b]``, which are padding, are 0, as in a cache."""
    if starts is None:
        return index
    is_padding = torch.arange(index.keys.shape[1], device=index.keys.device) < starts[:, None]
    return index._replace(keys=index.keys.masked_fill(is_padding[..., None], 0))


def _lists(layer: nn.Module, index: IndexTensors, **bounds: Tensor | None) -> Tensor:
    branch = layer.indexer
    return choose(index.queries, index.keys, index.weights, layer.select, finish=branch.finish, **bounds)


def _lists_of_step(layer: nn.Module, index: IndexTensors, kv: LayerCache, *, is_replayed: bool) -> Tensor:
    """Return the lists of a cache step; with ``is_replayed``, they fit any lengths of its sequences."""
    view, new, stop = kv.step_view, index.keys[..., None, :], kv.capacity
    if not is_replayed:
        stop = min(stop, kv.history + index.keys.shape[-2])
    starts, is_dense = view.starts if kv.info.padded or is_replayed else None, view.cu_seqlens_q is None
    if is_dense and reads_stored(index.queries, view, layer.select):
        index = index._replace(keys=StoredKeys.of(kv.store_index(new), stop))
    else:
        index = index._replace(keys=kv.index_keys(new, stop)[..., 0, :])
    if is_dense:
        return _lists(layer, index, lengths=view.lengths, starts=starts)
    return _lists_of_packed_step(layer, index, view, starts)


def _lists_of_packed_step(
    layer: nn.Module, index: IndexTensors, view: KVView, starts: Tensor | None
) -> Tensor:
    """Return the lists of a packed step, from index keys ``[b, t, dI]``; the host reads offsets and lengths.

    Sequences with equally many new tokens, such as all that decode, choose together.
    """
    offsets, lengths = view.cu_seqlens_q.tolist(), view.lengths.tolist()
    rows_of: dict[int, list[int]] = {}
    for row, (first, end) in enumerate(pairwise(offsets)):
        rows_of.setdefault(end - first, []).append(row)
    select, device = layer.select, index.keys.device
    width = min(select.entries, -(-index.keys.shape[1] // select.block_size))
    shape = (index.queries.shape[0], select.lists, width)
    lists = torch.full(shape, -1, dtype=torch.int32, device=device)
    for count, rows in rows_of.items():
        if count == 0:
            continue
        at = view.cu_seqlens_q[rows][:, None] + torch.arange(count, device=device)
        keys = index.keys[rows, : max(lengths[row] for row in rows)]
        part = IndexTensors(index.queries[at], keys, None if index.weights is None else index.weights[at])
        own_starts = None if starts is None else starts[rows]
        found = _lists(layer, part, lengths=view.lengths[rows], starts=own_starts)
        lists[at, :, : found.shape[-1]] = found
    return lists
