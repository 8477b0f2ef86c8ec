"""Convert padding masks, position ids, nested tensors and shared prefixes to attnlib's arguments."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .internal.checks import INT32, are_checks_on, is_recorded, is_strided, refuse_tensor
from .internal.padding import are_holed, edges_of
from .internal.signatures import kind, leading_to


@kind
def bounds_of(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``key_starts`` and ``key_ends``, int32 ``[b]``, of a padding mask ``[b, t]`` (0 means padding).

    The bounds are the index of the first token and the index after the last, or 0 and 0 for an empty row.
    They are computed on the mask's device. Bounds cannot express padding between two tokens of a row, so a
    mask with such holes raises an error. This check reads the mask on the host. It is skipped
    under torch.compile and in a CUDA graph, where everything between the bounds counts as a token.

    Raises:
        TypeError: ``attention_mask`` is not a tensor.
        ValueError: ``attention_mask`` is not ``[b, t]``, or has padding between two tokens of a row.

    >>> bounds_of(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]))
    (tensor([1, 0, 0], dtype=torch.int32), tensor([3, 4, 0], dtype=torch.int32))
    """
    if not is_strided(attention_mask):
        refuse_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask: expected [b, t], got {tuple(attention_mask.shape)}")
    there = attention_mask != 0
    if type(there) is Tensor and not (is_recorded(there) or there.is_meta):
        holed = are_holed(there).nonzero().flatten().tolist()
        if holed:
            raise ValueError(
                f"attention_mask: expected tokens side by side in each row, got holes in row {holed[0]}; use "
                "mask=attnlib.masks.mask_tensor(attention_mask[:, None, None] != 0)"
            )
    return edges_of(there)


@kind
def from_position_ids(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return ``cu_seqlens`` int32 ``[n + 1]`` and the longest sequence length of ``position_ids`` ``[b, s]``.

    A new sequence begins at the start of each row, and at each position that is not one more than the
    position before it. A shape ``[s]`` means one row. Flatten x ``[b, s, m]`` with ``x.flatten(0, 1)`` to
    match the offsets. The longest length is read from the device, so the host waits for it.

    Raises:
        TypeError: ``position_ids`` is not an integer tensor.
        ValueError: ``position_ids`` is not ``[b, s]`` or ``[s]``.

    >>> from_position_ids(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]))
    (tensor([ 0,  3,  5,  7, 10], dtype=torch.int32), 3)
    """
    if not is_strided(position_ids):
        refuse_tensor("position_ids", position_ids)
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids: expected integers, got {position_ids.dtype}")
    if position_ids.dim() not in (1, 2):
        raise ValueError(f"position_ids: expected [b, s] or [s], got {tuple(position_ids.shape)}")
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[..., 1:] = position_ids.diff(dim=-1) != 1
    starts = begins.flatten().nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_tensor([position_ids.numel()]))).int()
    return cu_seqlens, int(cu_seqlens.diff().max()) if len(starts) else 0


@kind
def last_rows(cu_seqlens: Tensor) -> Tensor:
    """Return the index of the last row of each packed sequence, from ``cu_seqlens`` ``[n + 1]``.

    The result is int64 ``[n]``. For packed x ``[t, m]``, ``x[last_rows(cu_seqlens)]`` is ``[n, m]``. To
    sample the next token of each sequence, only these rows have to go through the output projection. In a
    packed cache step, the offsets are ``kv.cu_seqlens`` of any layer.

    The result is computed on the device of the offsets, and the host does not wait for it. An empty sequence
    has no last row and raises an error. On a GPU this is checked only with ``ATTNLIB_CHECK=1``, and within
    torch.compile it is never checked. Unchecked, the entry of an empty sequence is the last row of the
    sequence before it, or -1 if there is none.

    Raises:
        TypeError: ``cu_seqlens`` is not a tensor of int32 or int64.
        ValueError: ``cu_seqlens`` is not ``[n + 1]``, or a sequence is empty.

    >>> last_rows(torch.tensor([0, 5, 8, 20], dtype=torch.int32))
    tensor([ 4,  7, 19])
    """
    if not is_strided(cu_seqlens):
        refuse_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64 offsets, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected offsets [n + 1], got {tuple(cu_seqlens.shape)}")
    is_on_host = type(cu_seqlens) is Tensor and cu_seqlens.is_cpu and not is_recorded(cu_seqlens)
    if is_on_host or are_checks_on(cu_seqlens):
        _check_none_is_empty(cu_seqlens.tolist())
    return cu_seqlens[1:].long() - 1


@kind
def from_jagged(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the packed rows, the ``cu_seqlens`` and the longest length of a jagged NestedTensor.

    ``x`` is ``[b, j, ...]``, the rows are ``[t, ...]`` and ``cu_seqlens`` is int32 ``[b + 1]``. The longest
    length is read from the device. Gradients flow back into ``x``.

    Raises:
        TypeError: ``x`` is not a jagged NestedTensor.
        ValueError: ``x`` is not ragged in its second dimension, or has holes.

    >>> rows = [torch.ones(2, 4), torch.ones(3, 4)]
    >>> x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    >>> rows, cu_seqlens, longest = from_jagged(x)
    >>> rows.shape, cu_seqlens, longest
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32), 3)
    """
    if not isinstance(x, Tensor) or not x.is_nested or x.layout is not torch.jagged:
        kind = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: expected a NestedTensor of layout torch.jagged, got {kind}")
    if isinstance(x.shape[1], int) or x.lengths() is not None:
        raise ValueError(
            f"x: expected [b, j, ...], ragged in its second dimension and without holes, got {x.shape}"
        )
    offsets = x.offsets()
    return x.values(), offsets.int(), int(offsets.diff().max()) if len(offsets) > 1 else 0


@kind
def to_jagged(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return packed rows ``[t, ...]`` as a jagged NestedTensor ``[b, j, ...]``; it is differentiable.

    Raises:
        TypeError: an argument is not a strided tensor.
    """
    for name, given in (("x", x), ("cu_seqlens", cu_seqlens)):
        if not is_strided(given):
            refuse_tensor(name, given)
    return torch.nested.nested_tensor_from_jagged(x, cu_seqlens.long())


@leading_to("packing.tree(sequences) makes it")
class Tree(NamedTuple):
    """Sequences merged by their common prefixes, in depth-first order; :func:`tree` makes one.

    Attributes:
        tokens: int64 ``[t]``, the token of each row.
        positions: int64 ``[t]``, the position that each token has in its sequences, its depth in the tree.
        ends: int32 ``[t]``, the first row after each token's subtree, for :func:`attnlib.masks.until`.
        rows: for each sequence, int64 ``[len]`` with the rows of its tokens.
    """

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    rows: list[Tensor]


@kind
def tree(sequences: Sequence[Tensor | Sequence[int]]) -> Tree:
    """Merge sequences of tokens by their common prefixes into a :class:`Tree`, to train on each token once.

    Each of the ``sequences`` is a tensor ``[len]`` or a list of integers. Two tokens are one row if they and
    all tokens before them are equal. Branches are in the order in which the sequences first take them.
    Sequences that do not begin with the same token become several trees. Sequences may be equal, empty, or
    prefixes of others.

    Call a model with ``tokens[None]``, ``positions[None]`` and ``masks.until(ends[None], positions[None])``.
    Then ``logits[0, rows[n]]`` are the logits of sequence ``n``, and their gradients are summed where
    sequences share rows. The host reads the tokens; the results are on the device of the sequences.

    Raises:
        TypeError: the sequences are not tensors or lists of integers.
        ValueError: a sequence is not ``[len]``, devices differ, or there are more tokens than fit int32.

    >>> merged = tree([[5, 6, 7], [5, 6, 8, 9], [5, 4]])
    >>> merged.tokens, merged.positions
    (tensor([5, 6, 7, 8, 9, 4]), tensor([0, 1, 2, 2, 3, 1]))
    >>> merged.ends, merged.rows[1]
    (tensor([6, 5, 3, 5, 5, 6], dtype=torch.int32), tensor([0, 1, 3, 4]))
    """
    if isinstance(sequences, Tensor | str) or not isinstance(sequences, Sequence):
        raise TypeError(f"sequences: expected a list of sequences, got {type(sequences).__name__}")
    given = [_sequence(f"sequences[{n}]", x) for n, x in enumerate(sequences)]
    devices = {x.device for x in given}
    if len(devices) > 1:
        raise ValueError(f"sequences: expected tensors on one device, got {', '.join(map(str, devices))}")
    device = devices.pop() if devices else torch.device("cpu")
    lengths = [len(x) for x in given]
    own = list(torch.cat([torch.empty(0, dtype=torch.int64, device=device), *given]).cpu().split(lengths))
    rows, total = _rows_of_tree(own)
    if total > INT32:
        raise ValueError(f"sequences: expected at most {INT32} tokens in all branches, got {total}")
    at = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *rows])
    depths = torch.cat([at[:0], *(torch.arange(n, device="cpu") for n in lengths)])
    lasts = torch.cat([at[:0], *((x[-1:] + 1).expand(len(x)) for x in rows)])
    tokens, positions, ends = (torch.zeros(total, dtype=torch.int64, device="cpu") for _ in range(3))
    tokens[at], positions[at] = torch.cat([at[:0], *own]), depths
    ends.scatter_reduce_(0, at, lasts, "amax")
    results = (x.to(device) for x in (tokens, positions, ends.int()))
    return Tree(*results, list(at.to(device).split(lengths)))


def _sequence(name: str, x: Tensor | Sequence[int]) -> Tensor:
    """Return a sequence as int64 ``[len]``."""
    if not isinstance(x, Tensor):
        if isinstance(x, str) or not isinstance(x, Sequence):
            raise TypeError(f"{name}: expected a tensor or a list of integers, got {type(x).__name__}")
        wrong = [y for y in x if isinstance(y, bool) or not isinstance(y, int)]
        if wrong:
            raise TypeError(f"{name}: expected integers, got {wrong[0]!r}")
        return torch.tensor(x, dtype=torch.int64, device="cpu")
    if not is_strided(x):
        refuse_tensor(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name}: expected [len], got {tuple(x.shape)}")
    return x.long()


def _rows_of_tree(sequences: list[Tensor]) -> tuple[list[Tensor], int]:
    """Return the row of each token of each sequence in the tree of all sequences, and the number of rows."""
    known: list[int] = []  # the sequences so far, sorted by their tokens
    # For each sequence: how many tokens it shares, and the sequence that owns the last of these.
    shared, owners = [], []
    for n, x in enumerate(sequences):
        low, high, best = 0, len(known), (0, -1)
        while low < high:  # both neighbours in the sorted list are compared, one of which shares the most
            middle = (low + high) // 2
            other = sequences[known[middle]]
            common = _common(x, other)
            best = max(best, (common, known[middle]))
            is_after = common < len(x) and (common == len(other) or bool(x[common] > other[common]))
            low, high = (middle + 1, high) if is_after else (low, middle)
        known.insert(low, n)
        common, owner = best
        while common and shared[owner] >= common:  # these tokens belong to a sequence before the owner
            owner = owners[owner]
        shared.append(common)
        owners.append(owner)
    return _numbered(shared, owners, [len(x) for x in sequences])


def _numbered(shared: list[int], owners: list[int], lengths: list[int]) -> tuple[list[Tensor], int]:
    """Return the rows of each sequence, given how many tokens it shares with the sequence that owns them."""
    branches: list[list[tuple[int, int]]] = [[] for _ in shared]
    roots = []
    for n, (common, owner) in enumerate(zip(shared, owners, strict=True)):
        (branches[owner] if common else roots).append((-common, n))
    starts, total, stack = [0] * len(shared), 0, [n for _, n in reversed(roots)]
    while stack:  # the tokens of a branch come first, then the branches that leave it, the deepest first
        n = stack.pop()
        starts[n] = total
        total += lengths[n] - shared[n]
        stack += [n for _, n in sorted(branches[n], reverse=True)]
    rows: list[Tensor] = []
    for n, (common, owner) in enumerate(zip(shared, owners, strict=True)):
        own = torch.arange(starts[n], starts[n] + lengths[n] - common, device="cpu")
        rows.append(torch.cat((rows[owner][:common], own)) if common else own)
    return rows, total


def _common(x: Tensor, other: Tensor) -> int:
    """Return the number of tokens that two sequences have in common at their start."""
    size = min(len(x), len(other))
    differs = x[:size] != other[:size]
    return int(differs.int().argmax()) if size and bool(differs.any()) else size


def _check_none_is_empty(offsets: Sequence[int]) -> None:
    for number, (start, end) in enumerate(pairwise(offsets)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens: expected at least one row in each sequence, got {end - start} in sequence "
                f"{number}; leave empty sequences out"
            )
