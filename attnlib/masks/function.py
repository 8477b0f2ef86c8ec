"""Masks that combine a band with a function of token indices; a key is visible only if both show it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..internal.checks import NO_SIZES, check_dims
from ..internal.signatures import leading_to
from ..tracing.depths import by_depth, counts_tokens
from ..tracing.evaluation import evaluated
from ..tracing.program import INDICES, Program, combined
from ..tracing.trace import FirstQuery, captured_of, traced

GRAIN = 64  # kernels find out per tile of 64 queries x 64 keys if a mask hides all, some or none of it
CHANGED = (-1,)  # versions of a copied mask whose tiles are out of date; they match no tensors
EVERYWHERE = Program("def mask(b, h, i, j, first): return True")
Tensors = Sequence[Tensor]


class RetainedKeys(NamedTuple):
    """The keys that a cache must retain for a mask: the last ``window`` keys, and the first ``first`` keys.

    The window includes the query's own key; if it is None, all keys are retained.
    """

    window: int | None
    first: int = 0

    def within(self, other: "RetainedKeys") -> "RetainedKeys":
        """Return the keys to retain for the intersection of two masks."""
        if None in (self.window, other.window):
            return other if self.window is None else self
        return RetainedKeys(min(self.window, other.window), max(self.first, other.first))


class TreeTensors(NamedTuple):
    """The tensors of a mask function that describe a tree of sequences, by number.

    Attributes:
        ends: the tensor with the first row after each token's subtree, ``[b, t]`` or ``[t]``.
        positions: the tensor with the depth of each token, in the same shape; None if depths are unknown.
        offsets: the tensor with the start of each packed sequence, once a packed call has added it.
        is_alone: True if the function hides nothing but what the tree and ``reach`` hide.
        reach: how many ancestors a query sees, by their depths; None for all.
    """

    ends: int
    positions: int | None
    offsets: int | None = None
    is_alone: bool = True
    reach: int | None = None

    def written(self) -> str:
        """Return the tree as text, which operators take; :meth:`read` reads it."""
        return " ".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> "TreeTensors":
        """Return the tree that :meth:`written` wrote."""
        known = {"None": None, "True": True, "False": False}
        return cls(*(known[x] if x in known else int(x) for x in text.split()))


class Selection(NamedTuple):
    """The lists of a mask from :func:`attnlib.masks.selected`: ``indices`` are numbers of blocks of keys.

    They are int32 ``[b, s, c, n]``, or packed ``[t, c, n]``. A block has ``block_size`` keys.
    """

    indices: Tensor
    block_size: int


class Band(Protocol):
    """The methods that a MaskFunction calls on its band; :class:`attnlib.Mask` implements them."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor: ...
    def meet(self, other: "Band") -> "Band | None": ...
    def hull(self, other: "Band") -> "Band": ...
    def unbounded(self) -> "Band": ...
    def beyond_causal(self) -> "Band": ...
    def program(self) -> Program: ...
    @property
    def kept(self) -> RetainedKeys: ...
    @property
    def spelled(self) -> str: ...


@leading_to("make one by mask_mod(function, *tensors)")
@dataclass(frozen=True, slots=True, eq=False)
class MaskFunction:
    """A mask made of a band and a function of token indices; a key is visible only if both show it.

    Create one with :func:`attnlib.mask_mod`. ``&``, ``|`` and ``~`` combine bands and mask functions.

    Attributes:
        program: the traced function. The Python function is not stored, so masks can be copied and pickled.
        tensors: the tensors that the program reads.
        tiles: the kind of each tile (hidden, partial or full), if :meth:`block_mask` has computed it.
        far: the keys that a cache must retain, if fewer suffice than the band shows; otherwise None.
        sections: int32 offsets at which the documents of a row start, and the end of the last one, if the
            function only separates documents; otherwise None.
        dims: the letters of each tensor's dimensions, as in ``checks.check_dims``; "" if undocumented.
        tree: the tensors that describe a tree, if the mask was made from :func:`attnlib.masks.until`.
        selection: the lists of keys from :func:`attnlib.masks.selected`, which hide all other keys.
    """

    band: Band
    program: Program
    tensors: tuple[Tensor, ...]
    tiles: Tensor | None = field(default=None, repr=False)
    # Version counters of ``tensors`` when the tiles were computed: they count changes in place.
    versions: tuple[int, ...] = field(default=(), repr=False)
    sizes: tuple[int, ...] = field(default=(), repr=False)  # number of queries and keys that the tiles cover
    far: RetainedKeys | None = None
    sections: Tensor | None = field(default=None, repr=False)
    dims: tuple[Sequence[str], ...] = field(default=(), repr=False)
    tree: TreeTensors | None = field(default=None, repr=False)
    selection: Selection | None = field(default=None, repr=False)

    @property
    def spelled(self) -> str:
        """A short description for messages: the band, and a note that a function or lists restrict it."""
        parts = [self.band.spelled]
        if self.selection is None or self.program != EVERYWHERE:
            parts.append("a function" if self.tree is None else "a tree")
        parts += [] if self.selection is None else [f"selected(block_size={self.selection.block_size})"]
        return " & ".join(parts)

    @property
    def kept(self) -> RetainedKeys:
        """The keys that a cache must retain for this mask."""
        return self.band.kept if self.far is None else self.far

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """Return a bool tensor: True where query ``i`` of head ``h`` in sequence ``b`` sees key ``j``.

        This is the definition of the mask. The arguments are integer tensors that broadcast; ``first`` is the
        storage index of the first query of each sequence.

        Raises:
            NotImplementedError: the mask holds lists, which are numbered by KV heads or by query heads.
        """
        if self.selection is not None:
            raise NotImplementedError(
                "mask: expected no lists of masks.selected(), whose heads are known only in a call; use "
                "mask.with_lists(None).visible(...)"
            )
        return self.band.visible(i, j) & self.definition(b, h, i, j, first)

    def definition(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """Return a bool tensor: True where the function alone shows key ``j`` to query ``i``.

        The band is ignored here. Floats are computed in fp32, whatever the dtype of q, k and v.
        """
        return evaluated(self.program, dict(zip(INDICES, (b, h, i, j, first), strict=True)), self.tensors)

    def reading(self, tensors: Tensors) -> "MaskFunction":
        """Return the mask with other tensors of the same dtypes and dimension counts, and without tiles."""
        return replace(self, tensors=tuple(tensors), tiles=None, versions=(), sizes=(), sections=None)

    def with_lists(self, indices: Tensor | None) -> "MaskFunction":
        """Return the mask with other lists of selected keys, or with None, without any."""
        selection = None if indices is None else self.selection._replace(indices=indices)
        return replace(self, selection=selection)

    def of_part(self) -> "MaskFunction":
        """Return the mask for a call on a part of the heads or tokens; tensor sizes are no longer checked."""
        return replace(self, dims=())

    def check(self, sizes: Mapping[str, int], least: Mapping[str, int] = NO_SIZES) -> None:
        """Raise ValueError if a tensor of the mask does not fit a call; see ``checks.check_dims``."""
        check_dims("mask: expected a tensor", self.tensors, self.dims, sizes, least)

    def block_mask(
        self, b: int, h: int, s: int, t: int, *, device: torch.device | str | None = None
    ) -> "MaskFunction":
        """Return the same mask with its tiles precomputed, which saves time if many layers share a mask.

        The tiles are for dense calls with ``b`` sequences, ``h`` query heads, ``s`` queries and ``t`` keys.
        Without them, kernels find out at every call which tiles the function hides or shows entirely.

        Dense calls raise an error if their sizes differ, or if a tensor that the function reads has changed
        in place. Packed and cached calls still compute the tiles themselves. If the function reads no tensor,
        pass the ``device`` of the calls; calls on another device raise an error.
        """
        self.check({"b": b, "h": h, "s": s, "t": t}, {"T": t})
        device = self.tensors[0].device if self.tensors and device is None else device
        tiles = _tiles(self, self.planes(b, h), s, t, device)
        return replace(self, tiles=tiles, versions=self.versions_now(), sizes=(s, t))

    def versions_now(self) -> tuple[int, ...]:
        """Return how often each tensor has changed in place; 0 for inference tensors, which have no count."""
        return tuple(0 if x.is_inference() else x._version for x in self.tensors)

    def planes(self, b: int, h: int) -> tuple[int, int]:
        """Return how many sequences and heads need their own tiles: 1 if all of them have the same mask."""
        read = self.program.read
        return b if "b" in read else 1, h if "h" in read else 1

    def as_function(self) -> "MaskFunction":
        """Return the mask itself, as it is a MaskFunction already; Mask has the same method."""
        return self

    def __and__(self, other: object) -> "Band | MaskFunction":
        if (other := _function(other)) is None:
            return NotImplemented
        if (selection := _selection_of_both(self, other)) is not None:
            rest = self.with_lists(None) & other.with_lists(None)
            return replace(rest.as_function(), selection=selection)
        if self.tree is not None or other.tree is not None:
            both = _within_tree(self, other) if other.tree is None else _within_tree(other, self)
        elif (band := self.band.meet(other.band)) is not None:
            both = _joined("logical_and", self, other, band)
            known = [x for x in (self, other) if x.program != EVERYWHERE]
            if len(known) == 1 and (known[0].tiles is not None or known[0].sections is not None):
                (one,) = known  # tiles and sections do not depend on the band, so they stay valid
                both = replace(
                    both, tiles=one.tiles, versions=one.versions, sizes=one.sizes, sections=one.sections
                )
        else:
            both = _joined("logical_and", _all_of(self), other, other.band)
        kept = self.kept.within(other.kept)
        return both if kept == both.kept else replace(both, far=kept)

    def __or__(self, other: object) -> "Band | MaskFunction":
        if (other := _function(other)) is None:
            return NotImplemented
        _refuse_to_combine("|", self, other)
        return _joined("logical_or", _all_of(self), _all_of(other), self.band.hull(other.band))

    def __invert__(self) -> "Band | MaskFunction":
        _refuse_to_combine("~", self)
        own = _all_of(self)
        program = combined(
            "logical_not", (own.program, range(len(own.tensors))), captured=captured_of("mask", own.tensors)
        )
        return simplest(own.band, program, own.tensors, own.dims)

    __rand__ = __and__
    __ror__ = __or__

    def __getstate__(self) -> dict[str, object]:
        """Return all fields for a copy or pickle, with a flag instead of ``versions``.

        The flag is True if the tiles still match the tensors. Versions would be wrong in a copy, since copied
        tensors count their changes from 0.
        """
        state = {x.name: getattr(self, x.name) for x in fields(self)}
        return state | {"versions": self.versions == self.versions_now()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, x in state.items():
            object.__setattr__(self, name, x)
        known = () if self.tiles is None else self.versions_now() if state["versions"] else CHANGED
        object.__setattr__(self, "versions", known)


def function_of(band: Band, function: Callable, arguments: Sequence[Tensor | FirstQuery]) -> MaskFunction:
    """Trace ``function(b, h, i, j, *arguments)`` and combine it with a band; see :func:`attnlib.mask_mod`."""
    program = traced("mask", function, arguments)
    return MaskFunction(band, program, tuple(x for x in arguments if isinstance(x, Tensor)))


@torch.no_grad()
def _tiles(
    mask: MaskFunction, planes: tuple[int, int], s: int, t: int, device: torch.device | str | None
) -> Tensor:
    """Return how much of each tile the function shows, as int8 ``[b, h, tile rows, tile columns]``.

    A tile is 0 if the function hides all of its query-key pairs, 2 if it shows all of them, and 1 otherwise.
    Pairs beyond the last query or key do not count. The function is evaluated one row of tiles at a time.
    """
    b, h = planes
    columns = -(-t // GRAIN)
    found = torch.empty(b, h, -(-s // GRAIN), columns, dtype=torch.int8, device=device)
    at = torch.arange(b, device=device)[:, None, None, None], torch.arange(h, device=device)[:, None, None]
    j, first = torch.arange(t, device=device), torch.tensor(t - s, device=device)
    for row in range(found.shape[2]):
        i = torch.arange(t - s + row * GRAIN, min(t - s + (row + 1) * GRAIN, t), device=device)[:, None]
        seen = mask.definition(*at, i, j, first).expand(b, h, len(i), t)
        counts = (
            torch.nn.functional.pad(seen.sum(2), (0, columns * GRAIN - t)).view(b, h, columns, GRAIN).sum(-1)
        )
        pairs = len(i) * (t - torch.arange(columns, device=device) * GRAIN).clamp(max=GRAIN)
        found[:, :, row] = (counts > 0).to(torch.int8) + (counts == pairs).to(torch.int8)
    return found


def _function(x: object) -> MaskFunction | None:
    return x.as_function() if hasattr(x, "as_function") else None


def _all_of(x: MaskFunction) -> MaskFunction:
    """Return the same mask with its band moved into the program."""
    own = tuple(range(len(x.tensors)))
    program = combined(
        "logical_and", (x.band.program(), ()), (x.program, own), captured=captured_of("mask", x.tensors)
    )
    return MaskFunction(x.band.unbounded(), program, x.tensors, dims=x.dims)


def _joined(operation: str, x: MaskFunction, y: MaskFunction, band: Band) -> "Band | MaskFunction":
    """Combine the functions of two masks by a logical operation, and return a mask with the given band.

    A tensor that both functions read is passed once if both document the same dimensions for it.
    """
    of_x, of_y = (zip_longest(one.tensors, one.dims, fillvalue="") for one in (x, y))
    read, at_y = [*of_x], []
    for tensor, letters in of_y:
        known = [n for n, (other, its) in enumerate(read) if other is tensor and its == letters]
        at_y.append(known[0] if known else len(read))
        read += [] if known else [(tensor, letters)]
    tensors, dims = tuple(tensor for tensor, _ in read), tuple(letters for _, letters in read)
    captured = captured_of("mask", tensors)
    program = combined(operation, (x.program, range(len(x.tensors))), (y.program, at_y), captured=captured)
    return simplest(band, program, tensors, dims)


def _within_tree(x: MaskFunction, other: MaskFunction) -> MaskFunction:
    """Return the mask ``x`` of a tree, restricted by another mask whose distances are depths in the tree.

    Raises:
        ValueError: the other mask has a tree of its own, or counts distances and the tree has no positions.
    """
    tree, theirs = x.tree, other.tree
    if theirs is not None:
        if _tensors_of_tree(x) != _tensors_of_tree(other):
            raise ValueError("mask: expected one tree, got masks made from two calls of masks.until()")
        is_alone, reaches = tree.is_alone and theirs.is_alone, {tree.reach, theirs.reach} - {None}
        both = _joined("logical_and", x, other, x.band)
        return replace(both, tree=tree._replace(is_alone=is_alone, reach=min(reaches, default=None)))
    rest = other.band.beyond_causal()
    own = _all_of(replace(other, band=rest))
    if own.program == EVERYWHERE:
        return x
    if counts_tokens(own.program):
        if tree.positions is None:
            counts = other.band.spelled if other.program == EVERYWHERE else other.spelled
            raise ValueError(positions_missing(counts))
        tensors = (*own.tensors, x.tensors[tree.positions])
        program = by_depth(own.program, captured_of("mask", tensors), len(own.tensors))
        dims = (*own.dims, *("",) * (len(own.tensors) - len(own.dims)), x.dims[tree.positions])
        own = MaskFunction(own.band, program, tensors, dims=dims)
    reach = rest.lone_reach if other.program == EVERYWHERE else None
    is_alone, reaches = tree.is_alone and reach is not None, {tree.reach, reach} - {None}
    both = _joined("logical_and", x, own, x.band)
    return replace(both, tree=tree._replace(is_alone=is_alone, reach=min(reaches, default=None)))


def _tensors_of_tree(x: MaskFunction) -> list[int]:
    return [id(x.tensors[n]) for n in (x.tree.ends, x.tree.positions) if n is not None]


def positions_missing(counts: str) -> str:
    """Return the error message for ``counts``, which needs distances in a tree whose depths are unknown."""
    return (
        f"positions: expected the depths of the tree's tokens, since {counts} counts distances in depths, "
        "got None; pass masks.until(ends, positions=tree.positions)"
    )


def _selection_of_both(x: MaskFunction, y: MaskFunction) -> Selection | None:
    """Return the lists of two masks, of which only one may have any.

    Raises:
        NotImplementedError: both masks have lists.
    """
    found = {id(z.selection): z.selection for z in (x, y) if z.selection is not None}
    if len(found) > 1:
        raise NotImplementedError(
            "mask: expected lists of one masks.selected(), got those of two calls; keep the entries that "
            "both have in one list"
        )
    return next(iter(found.values()), None)


def _refuse_to_combine(operation: str, *both: MaskFunction) -> None:
    if any(x.selection is not None for x in both):
        raise NotImplementedError(
            f"mask: expected & to combine masks.selected() with another mask, got {operation}; add blocks to "
            "its lists, or merge_states of two calls that share no key"
        )
    if any(x.tree is not None for x in both):
        raise NotImplementedError(
            f"mask: expected & to combine a tree with another mask, got {operation}; its distances would be "
            "rows or depths; write one mask_mod() for both"
        )


def simplest(
    band: Band, program: Program, tensors: tuple[Tensor, ...], dims: tuple[Sequence[str], ...]
) -> "Band | MaskFunction":
    """Return a MaskFunction, or only its band if the program always returns True and reads no tensors."""
    says_nothing = program.text.endswith("return True") and not tensors
    return band if says_nothing else MaskFunction(band, program, tensors, dims=dims)
