"""Calls on DTensors: each rank runs an ordinary call on its own sequences and heads.

We do not register a sharding strategy with torch's operators: mask and score functions and dropout must know
which heads and sequences of the whole call a rank has, and a strategy cannot pass this information to them.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..call.call import Call, Dropout, bound
from ..call.selection import check_selection, selection_of
from ..fp8 import Descales
from ..masks.function import MaskFunction
from ..scores import ScoreFunction

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

REMEDY = (
    "redistribute it to Shard(0) of sequences, Shard(-2) of heads, or Replicate(); "
    "attnlib.parallel.context_attention shares the tokens of a sequence"
)
DENSE, PACKED = ("bshd", "btgd", "btge"), ("shd", "tgd", "tge")  # dimensions of q, k and v


def _letters(call: Call) -> tuple[str, ...]:
    """Return a letter for each dimension of q, k and v, such as ``bshd`` for a dense q."""
    return DENSE if call.packing is None else PACKED


def is_dtensor(x: object) -> bool:
    """True for a DTensor. Imports torch's DTensor module only if the class name matches."""
    if type(x).__name__ != "DTensor":
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


class MeshPlacement(NamedTuple):
    """The way a call is sharded over a device mesh.

    ``shared`` has a letter for each mesh dimension: ``"b"`` if it shards sequences, ``"h"`` for heads, and
    ``""`` if tensors are replicated. ``sizes`` has the dimension sizes of the whole call.
    """

    mesh: "torch.distributed.device_mesh.DeviceMesh"
    shared: tuple[str, ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, call: Call) -> "MeshPlacement":
        """Read the sharding of a call on DTensors.

        Raises:
            TypeError: only some of q, k and v are DTensors, or their meshes differ.
            NotImplementedError: a tensor is sharded over other dimensions than sequences or heads.
            ValueError: the heads do not divide evenly among the ranks.
        """
        qkv = {"q": call.q, "k": call.k, "v": call.v}
        mesh = next(x.device_mesh for x in qkv.values() if is_dtensor(x))
        for name, x in qkv.items():
            if not is_dtensor(x) or x.device_mesh != mesh:
                got = f"one on {x.device_mesh}" if is_dtensor(x) else type(x).__name__
                raise TypeError(
                    f"{name}: expected a DTensor on {mesh}, as q, k and v are together, got {got}"
                )
        sizes = bound(call)
        letters = dict(zip(qkv, _letters(call), strict=True))
        kinds = [[_kind(name, x, letters[name], at) for name, x in qkv.items()] for at in range(mesh.ndim)]
        sharing = cls(mesh, tuple(next(filter(None, kind), "") for kind in kinds), sizes)
        h, g, n = sizes["h"], sizes["g"], sharing.shards("h")
        if h % n or (g % n and n % g):
            raise ValueError(
                f"k: expected KV heads that {n} ranks divide, or that divide them, with h={h} query heads, "
                f"got g={g}; redistribute q, k and v to Replicate()"
            )
        return sharing

    def __str__(self) -> str:
        parts = {"b": "sequences", "h": "heads", "": "nothing"}
        return f"whose ranks share {' and '.join(parts[shared] for shared in self.shared)}"

    def shards(self, letter: str) -> int:
        """Return the number of ranks over which the dimension with this letter is sharded."""
        return math.prod([self.mesh.size(at) for at, shared in enumerate(self.shared) if shared == letter])

    def span(self, letter: str) -> tuple[int, int]:
        """Return the start and size of this rank's shard of a dimension, by DTensor's rule."""
        start, size = 0, self.sizes[letter]
        for at, shared in enumerate(self.shared):
            if shared == letter:
                chunk = -(-size // self.mesh.size(at))
                skipped = min(chunk * self.mesh.get_local_rank(at), size)
                start, size = start + skipped, min(chunk, size - skipped)
        return start, size

    def placements(self, letters: str) -> list["Placement"]:
        """Return the DTensor placements of a tensor, whose dimensions are named by ``letters``."""
        from torch.distributed.tensor import Replicate, Shard

        whole_keys = "g" in letters and self.sizes["g"] % self.shards("h") != 0
        there = {"b": letters.find("b"), "h": -1 if whole_keys else max(letters.find("h"), letters.find("g"))}
        dims = [there.get(shared, -1) for shared in self.shared]
        return [Replicate() if dim < 0 else Shard(dim) for dim in dims]

    def local(self, x: Tensor, letters: str = "") -> Tensor:
        """Return this rank's shard of a tensor, differentiably.

        A tensor that is not a DTensor must be the same on all ranks.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not is_dtensor(x):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        wanted = self.placements(letters)
        pairs = zip(wanted, self.shared, strict=True)
        # Every rank contributes to the gradient of a replicated tensor.
        grads = [Partial() if p.is_replicate() and shared else p for p, shared in pairs]
        part = x.redistribute(placements=wanted).to_local(grad_placements=grads)
        if "g" in letters and self.sizes["g"] % self.shards("h"):
            start, size = self.span("h")
            per_head = self.sizes["h"] // self.sizes["g"]
            return part.narrow(letters.index("g"), start // per_head, -(-size // per_head))
        return part

    def empty(self, x: Tensor, letters: str = "") -> Tensor:
        """Return an uninitialised tensor with the shape that :meth:`local` returns, without communication."""
        sizes = {letter: self.span(letter)[1] for letter in "bh" if letter in self.sizes}
        sizes["g"] = -(-sizes["h"] * self.sizes["g"] // self.sizes["h"])
        shape = [
            sizes.get(letter, size) for letter, size in zip(letters or " " * x.dim(), x.shape, strict=True)
        ]
        return torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    def whole(self, x: Tensor | None, letters: str) -> "DTensor | None":
        """Return the DTensor that has ``x`` as its shard on this rank."""
        from torch.distributed.tensor import DTensor

        if x is None:
            return None
        shape = torch.Size([self.sizes[letter] for letter in letters])
        stride = torch.empty(shape, device="meta").stride()
        placements = self.placements(letters)
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=shape, stride=stride)


class LocalCall(NamedTuple):
    """The part of a sharded call that this rank runs, and the placement of its results."""

    call: Call
    sharing: MeshPlacement

    def whole(self, out: Tensor, lse: Tensor | None) -> tuple["DTensor", "DTensor | None"]:
        """Return the output and LSE of the whole call as DTensors."""
        names = ("bshe", "bhs") if self.call.packing is None else ("she", "hs")
        return self.sharing.whole(out, names[0]), self.sharing.whole(lse, names[1])


def local_call(
    call: Call, part: Callable[[MeshPlacement, Tensor, str], Tensor] = MeshPlacement.local
) -> LocalCall | None:
    """Return this rank's part of a call on DTensors, None for other calls; ``part`` shards each tensor.

    Raises:
        TypeError: the call is over a cache. The errors of :meth:`MeshPlacement.of` are raised too.
    """
    if not any(map(is_dtensor, (call.q, call.k, call.v))):
        return None
    if call.kv is not None:
        raise TypeError("q: expected a local tensor over a cache, got a DTensor; pass q.to_local()")
    sharing = MeshPlacement.of(call)

    def of(x: Tensor | None, letters: str = "") -> Tensor | None:
        return None if x is None else part(sharing, x, letters)

    q, k, v = map(of, (call.q, call.k, call.v), _letters(call))
    call.check_functions(sharing.sizes | {"b": call.sequences})
    check_selection(call, sharing.sizes)
    score, mask, dims = call.score, call.mask, call.score.dims
    score = score._replace(**{name: of(x, dims[name]) for name, x in score.tensors.items()})
    if type(score.function) is ScoreFunction:
        score = score._replace(function=score.function.reading([*map(of, score.function.tensors)]))
    if type(mask) is MaskFunction:
        mask = mask.reading([*map(of, mask.tensors)])
    if (selection := selection_of(mask)) is not None:
        sizes, lists = sharing.sizes, selection.indices
        letter = {sizes["h"]: "h", sizes["g"]: "g", 1: "1"}[lists.shape[-2]]
        mask = mask.with_lists(of(lists, _letters(call)[0][:-2] + letter + "n"))
    packing, descales = call.packing, call.descales
    if packing is not None:
        packing = packing._replace(
            cu_seqlens_q=of(packing.cu_seqlens_q), cu_seqlens_k=of(packing.cu_seqlens_k)
        )
    if descales is not None:
        descales = Descales(*map(of, descales, ("bh", "bg", "bg")))
    bounds = of(call.key_starts, "b"), of(call.key_ends, "b")
    dropout, origin = call.dropout, call.origin
    if dropout.p or call.functions is not None:  # dropout and functions get the indices of the whole call
        origin = origin._replace(head=origin.head + sharing.span("h")[0])
        origin = origin if packing else origin._replace(sequence=origin.sequence + sharing.span("b")[0])
        dropout = dropout._replace(seed=of(_seed(dropout, q.device, sharing)))
    rest = packing, dropout, origin, descales, call.lse, call.compute_dtype
    return LocalCall(Call(q, mask, score, k, v, None, *bounds, *rest), sharing)


def _seed(dropout: Dropout, device: torch.device, sharing: MeshPlacement) -> Tensor | None:
    """Return the dropout seed; if none is given, the first rank draws one for all ranks."""
    from torch.distributed.tensor import DTensor, Replicate

    seed = dropout.seeded(device).seed
    if seed is None or dropout.seed is not None:
        return seed
    return DTensor.from_local(seed, sharing.mesh, [Replicate()] * sharing.mesh.ndim, run_check=True)


def _kind(name: str, x: "DTensor", letters: str, at: int) -> str:
    """Return "b" or "h" if mesh dimension ``at`` shards sequences or heads, else an empty string."""
    from torch.distributed.tensor import Shard

    placement = x.placements[at]
    if placement.is_replicate() or placement.is_partial():
        return ""
    letter = letters[placement.dim % len(letters)].replace("g", "h") if type(placement) is Shard else None
    if letter not in ("b", "h"):
        raise NotImplementedError(
            f"{name}: expected no {placement!r} on dimension {at} of the mesh; {REMEDY}"
        )
    return letter
