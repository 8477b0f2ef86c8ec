"""Which keys a query sees, where no band says it: a band and a function of indices, which both have to
agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..internal.checks import NO_SIZES, check_dims
from ..internal.signatures import leading_to
from ..tracing.evaluation import evaluated
from ..tracing.program import INDICES, Program, combined
from ..tracing.trace import FirstQuery, captured_of, traced

GRAIN = 64  # queries and keys of the tiles in which kernels look at a function
CHANGED = (-1,)  # in place of versions: those of no tensors
EVERYWHERE = Program("def mask(b, h, i, j, first): return True")
Tensors = Sequence[Tensor]


class RetainedKeys(NamedTuple):
    """What a cache must keep for a mask: the last ``window`` keys, the query's own included, None for all;
    and besides them the ``first`` ones."""

    window: int | None
    first: int = 0

    def within(self, other: "RetainedKeys") -> "RetainedKeys":
        """What is enough for the keys that two masks both show."""
        if None in (self.window, other.window):
            return other if self.window is None else self
        return RetainedKeys(min(self.window, other.window), max(self.first, other.first))


class Band(Protocol):
    """What a function asks of the band beside it, which is a :class:`attnlib.Mask`."""

    def visible(self, i: Tensor, j: Tensor) -> Tensor: ...
    def meet(self, other: "Band") -> "Band | None": ...
    def hull(self, other: "Band") -> "Band": ...
    def unbounded(self) -> "Band": ...
    def program(self) -> Program: ...
    @property
    def kept(self) -> RetainedKeys: ...
    @property
    def spelled(self) -> str: ...


@leading_to("make one by mask_mod(function, *tensors)")
@dataclass(frozen=True, slots=True, eq=False)
class MaskFunction:
    """The keys that a band and a function of indices both let a query see; :func:`attnlib.mask_mod` makes it.

    ``program`` is what the function does, ``tensors`` what it reads; the function itself is not kept, so that
    masks can be copied and pickled. Masks compose by ``&``, ``|`` and ``~``, bands and functions alike.
    ``tiles`` is what :meth:`block_mask` has found. ``far`` is what its author knows that a cache must keep,
    if less than its band says. ``sections``: if the function only keeps documents of a row apart, where these
    begin, and its end; int32. ``dims`` are as in :class:`ScoreFunction`, "" for a tensor whose dimensions
    nobody documents.
    """

    band: Band
    program: Program
    tensors: tuple[Tensor, ...]
    tiles: Tensor | None = field(default=None, repr=False)
    versions: tuple[int, ...] = field(default=(), repr=False)  # of the tensors, when tiles were found
    sizes: tuple[int, ...] = field(default=(), repr=False)  # queries and keys, then
    far: RetainedKeys | None = None
    sections: Tensor | None = field(default=None, repr=False)
    dims: tuple[str, ...] = field(default=(), repr=False)

    @property
    def spelled(self) -> str:
        """Its band as people write it, and that there is more."""
        return f"{self.band.spelled} & a function"

    @property
    def kept(self) -> RetainedKeys:
        """What a cache must keep for this mask."""
        return self.band.kept if self.far is None else self.far

    def visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """Whether query ``i`` of head ``h`` in sequence ``b`` sees key ``j``: the definition.

        Tensors broadcast. ``first`` is the storage index of the first query of each sequence.
        """
        return self.band.visible(i, j) & self.definition(b, h, i, j, first)

    def definition(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """True where the function lets query ``i`` see key ``j``; its floats are fp32 for calls of any
        dtype.
        """
        return evaluated(self.program, dict(zip(INDICES, (b, h, i, j, first), strict=True)), self.tensors)

    def reading(self, tensors: Tensors) -> "MaskFunction":
        """The same function of other tensors, of the same dtypes and ranks."""
        return replace(self, tensors=tuple(tensors), tiles=None, versions=(), sizes=(), sections=None)

    def of_part(self) -> "MaskFunction":
        """Return the same mask for a part of a call, whose sizes need not be those of its tensors."""
        return replace(self, dims=())

    def check(self, sizes: Mapping[str, int], least: Mapping[str, int] = NO_SIZES) -> None:
        """Compare its tensors with the sizes of a call; see ``checks.check_dims``."""
        check_dims("mask: expected a tensor", self.tensors, self.dims, sizes, least)

    def block_mask(
        self, b: int, h: int, s: int, t: int, *, device: torch.device | str | None = None
    ) -> "MaskFunction":
        """The same mask for dense calls of ``b`` sequences, ``h`` query heads, ``s`` queries and ``t`` keys.

        It knows which tiles the function hides or shows whole, which kernels else find out at each call:
        worth it where many layers share a mask. Dense calls of other sizes are refused, and any once a tensor
        that the function reads has changed in place; packed calls and those over caches find out for
        themselves. Without such tensors, name the ``device`` of these calls, which are refused on another
        one.
        """
        self.check({"b": b, "h": h, "s": s, "t": t}, {"T": t})
        device = self.tensors[0].device if self.tensors and device is None else device
        tiles = _tiles(self, self.planes(b, h), s, t, device)
        return replace(self, tiles=tiles, versions=self.versions_now(), sizes=(s, t))

    def versions_now(self) -> tuple[int, ...]:
        """How often each tensor that the function reads has changed in place; 0 for those that do not
        count.
        """
        return tuple(0 if x.is_inference() else x._version for x in self.tensors)

    def planes(self, b: int, h: int) -> tuple[int, int]:
        """How many sequences and heads of a dense call differ: one, where the function does not ask which it
        is.
        """
        read = self.program.read
        return b if "b" in read else 1, h if "h" in read else 1

    def as_function(self) -> "MaskFunction":
        """Itself; a band gives the function that it is."""
        return self

    def __and__(self, other: object) -> "Band | MaskFunction":
        if (other := _function(other)) is None:
            return NotImplemented
        if (band := self.band.meet(other.band)) is not None:
            both = _joined("logical_and", self, other, band)
            known = [x for x in (self, other) if x.program != EVERYWHERE]
            if len(known) == 1 and (known[0].tiles is not None or known[0].sections is not None):
                (one,) = known  # what is known of its function says nothing of the band
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
        return _joined("logical_or", _all_of(self), _all_of(other), self.band.hull(other.band))

    def __invert__(self) -> "Band | MaskFunction":
        own = _all_of(self)
        program = combined(
            "logical_not", (own.program, range(len(own.tensors))), captured=captured_of("mask", own.tensors)
        )
        return _simplest(own.band, program, own.tensors, own.dims)

    __rand__ = __and__
    __ror__ = __or__

    def __getstate__(self) -> dict[str, object]:
        """All of it; whether tiles are still those of the tensors, since a copy counts their changes anew."""
        state = {x.name: getattr(self, x.name) for x in fields(self)}
        return state | {"versions": self.versions == self.versions_now()}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, x in state.items():
            object.__setattr__(self, name, x)
        known = () if self.tiles is None else self.versions_now() if state["versions"] else CHANGED
        object.__setattr__(self, "versions", known)


def function_of(band: Band, function: Callable, arguments: Sequence[Tensor | FirstQuery]) -> MaskFunction:
    """The keys in a band that ``function(b, h, i, j, *arguments)`` lets a query see; see
    :func:`attnlib.mask_mod`.
    """
    program = traced("mask", function, arguments)
    return MaskFunction(band, program, tuple(x for x in arguments if isinstance(x, Tensor)))


@torch.no_grad()
def _tiles(
    mask: MaskFunction, planes: tuple[int, int], s: int, t: int, device: torch.device | str | None
) -> Tensor:
    """What the function says of tiles, int8 ``[b, h, rows of tiles, columns]``: 0 is hidden, 1 cut, and 2
    whole.

    A row of tiles at a time; pairs behind the last query or key do not count.
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
    """The same mask, with its band in its program too, and so with any band around it."""
    own = tuple(range(len(x.tensors)))
    program = combined(
        "logical_and", (x.band.program(), ()), (x.program, own), captured=captured_of("mask", x.tensors)
    )
    return MaskFunction(x.band.unbounded(), program, x.tensors, dims=x.dims)


def _joined(operation: str, x: MaskFunction, y: MaskFunction, band: Band) -> "Band | MaskFunction":
    """Join two functions within a band; a tensor that both read is read once if its documented dimensions
    agree.
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
    return _simplest(band, program, tensors, dims)


def _simplest(
    band: Band, program: Program, tensors: tuple[Tensor, ...], dims: tuple[str, ...]
) -> "Band | MaskFunction":
    """The band alone, where the program says nothing."""
    says_nothing = program.text.endswith("return True") and not tensors
    return band if says_nothing else MaskFunction(band, program, tensors, dims=dims)
