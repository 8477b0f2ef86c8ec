"""An attention call as one value, and the function that validates every call once."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..fp8 import E4M3, Descales, check_compute_dtype, check_descales
from ..internal.checks import INT32, bind, came, is_strided, refuse_tensor
from ..kv import KVView
from ..masks.band import AnyMask, Mask
from ..masks.function import GRAIN, MaskFunction
from ..scores import Score
from .functions import Functions, check_functions, functions_of
from .selection import check_selection, selection_of
from .spec import AttentionSpec, describe
from .trees import over_tree


class Packing(NamedTuple):
    """The offsets of packed sequences, int32 ``[b + 1]``, and upper bounds on their lengths."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def read(self, *, queries: int, keys: int) -> tuple[list[int], list[int]]:
        """Read the offsets to the host, and check them for this many packed ``queries`` and ``keys``.

        Raises:
            ValueError: offsets do not start at 0, decrease, or exceed the number of tokens, or a sequence is
                longer than ``max_seqlen``.
        """
        rows = _read_offsets("cu_seqlens_q", self.cu_seqlens_q, queries, "max_seqlen_q", self.max_seqlen_q)
        return rows, _read_offsets("cu_seqlens_k", self.cu_seqlens_k, keys, "max_seqlen_k", self.max_seqlen_k)


class Dropout(NamedTuple):
    """Dropout of attention probabilities with rate ``p``; an int64 ``[1]`` seed decides what is dropped."""

    p: float = 0.0
    seed: Tensor | None = None

    def seeded(self, device: torch.device) -> "Dropout":
        """Return the dropout with a seed: draw one if it is missing and ``p`` is above 0.

        Raises:
            ValueError, TypeError: ``p`` is not a number in [0, 1), or the seed is not int64 ``[1]``.
        """
        p, seed = self.p, self.seed
        if seed is None and p == 0:
            return self
        if isinstance(p, bool) or not isinstance(p, int | float):
            raise TypeError(f"dropout_p: expected a Python number, got {type(p).__name__}")
        if not 0 <= p < 1:
            raise ValueError(f"dropout_p: expected a probability in [0, 1), got {p}")
        if seed is None:
            return Dropout(p, torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device))
        if not is_strided(seed) or seed.dtype != torch.int64 or seed.shape != (1,):
            raise TypeError(f"dropout_seed: expected an int64 tensor [1], got {came(seed)}")
        return self


class Origin(NamedTuple):
    """The position of a chunk (a part of a larger call), so that it computes the same as the whole call.

    Each field is an int, or an int32 tensor ``[b]`` with a number for each sequence. It is added to the
    indices of queries, keys, heads or sequences that masks, ALiBi, functions and dropout get.
    """

    query: int | Tensor = 0
    key: int | Tensor = 0
    head: int | Tensor = 0
    sequence: int | Tensor = 0

    def table(self, sequences: int, device: torch.device) -> Tensor | None:
        """Return the four offsets as int32 ``[sequences, 4]`` for kernels, or None if all are 0."""
        if all(type(x) is int and x == 0 for x in self):
            return None
        # We use torch.full, because a CUDA graph cannot capture a copy from the host.
        filled = {"size": (sequences,), "dtype": torch.int32, "device": device}
        return torch.stack(
            [x if isinstance(x, Tensor) else torch.full(fill_value=x, **filled) for x in self], 1
        )


class Call(NamedTuple):
    """The arguments of one attention call; over a cache, ``kv`` is set and ``k`` and ``v`` are None.

    A call has a ``spec`` once :func:`checked` has validated it. Then its shapes and dtypes agree, and its
    scale and dropout seed are set.
    """

    q: Tensor
    mask: AnyMask
    score: Score = Score()
    k: Tensor | None = None
    v: Tensor | None = None
    kv: KVView | None = None
    key_starts: Tensor | None = None
    key_ends: Tensor | None = None
    packing: Packing | None = None
    dropout: Dropout = Dropout()
    origin: Origin = Origin()
    descales: Descales | None = None
    lse: bool = False
    compute_dtype: torch.dtype | None = None
    spec: AttentionSpec | None = None

    @property
    def kind(self) -> str:
        """The kind of the call: ``dense``, ``varlen`` (packed sequences) or ``cached``."""
        return "cached" if self.kv is not None else "dense" if self.packing is None else "varlen"

    @property
    def optional(self) -> dict[str, Tensor]:
        """The optional tensor arguments of the call that are not None, by name."""
        packing, seed, descales, functions = self.packing, self.dropout.seed, self.descales, self.functions
        found = self.score.tensors if functions is None else self.score.tensors | functions.named
        if (selection := selection_of(self.mask)) is not None:
            found = found | {"indices": selection.indices}
        if packing is descales is self.key_starts is self.key_ends is seed is None:
            return found
        found |= {"key_starts": self.key_starts, "key_ends": self.key_ends, "dropout_seed": seed}
        if packing is not None:
            found |= {"cu_seqlens_q": packing.cu_seqlens_q, "cu_seqlens_k": packing.cu_seqlens_k}
        if descales is not None:
            found |= descales._asdict()
        return {name: x for name, x in found.items() if x is not None}

    @property
    def functions(self) -> Functions | None:
        """The mask and score functions of the call, or None."""
        return functions_of(self.mask, self.score.function)

    def check_functions(self, sizes: Mapping[str, int]) -> None:
        """Validate the tensors that functions read against ``sizes``, as :func:`check_functions` does."""
        x, packed = self.packing, None
        if x is not None:
            packed = {"s": (x.cu_seqlens_q, x.max_seqlen_q), "t": (x.cu_seqlens_k, x.max_seqlen_k)}
        check_functions(self.mask, self.score.function, sizes, packed, self.kv)

    @property
    def sees_all_before(self) -> bool:
        """True if every query sees all earlier keys, and scores depend on q and k only.

        Then the keys before the queries can be split anywhere, and the partial results merged.
        """
        is_alike = self.score.is_alike and self.descales is None  # descales may differ between sequences
        return isinstance(self.mask, Mask) and self.mask.sees_all_before and is_alike

    @property
    def sequences(self) -> int:
        """The number of sequences, each of which attends only to itself."""
        if self.kv is not None:
            return self.kv.lengths.shape[0]
        return self.q.shape[0] if self.packing is None else self.packing.cu_seqlens_q.shape[0] - 1


NO_ORIGIN = Call._field_defaults["origin"]


class PieceGradients(NamedTuple):
    """The contribution of a chunk to the gradients of a larger call.

    ``captured`` has one entry for each tensor that a score function reads: its gradient, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor
    captured: Sequence[Tensor | None]


def checked(call: Call) -> Call:
    """Validate a call, and return it with a spec, a scale, a dropout seed and tensors of one dtype.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and what was expected.
        NotImplementedError: a tree is combined with dropout or a cache, or selected keys with a
            batch-invariant cache.
    """
    if call.kv is None:
        sizes = bound(call)
        q, k, v = _autocast(call.q, call.k, call.v)
    else:
        sizes = _bind_to_view(call)
        (q,), k, v = _autocast(call.q), None, None
    if call.compute_dtype is not None:
        check_compute_dtype(call.compute_dtype, q.dtype)
    _check_tensors(call, sizes)
    call = over_tree(call)
    score, dropout = call.score.filled(sizes["d"]), call.dropout.seeded(q.device)
    bounds = call.key_starts, call.key_ends
    # Calling the constructor twice takes a third of the time of _replace().
    rest = call.packing, dropout, call.origin, call.descales, call.lse, call.compute_dtype
    spec = describe(Call(q, call.mask, score, k, v, call.kv, *bounds, *rest), sizes)
    return Call(q, call.mask, score, k, v, call.kv, *bounds, *rest, spec)


def bound(call: Call) -> dict[str, int]:
    """Return the dimension sizes of a call on tensors, such as ``{"b": 2, "s": 9}``, or raise an error."""
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
            refuse_tensor(name, x)
    of_q, of_k, of_v = ("bshd", "btgd", "btge") if call.packing is None else ("shd", "tgd", "tge")
    if call.packing is not None and call.packing.cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q: expected an int32 tensor, got None")
    sizes = bind(("q", call.q, of_q), ("k", call.k, of_k), ("v", call.v, of_v))
    h, g = sizes["h"], sizes["g"]
    if g == 0 or h == 0 or h % g:
        raise ValueError(f"k: expected a number of KV heads g that divides h={h} query heads, got g={g}")
    return sizes


def _bind_to_view(call: Call) -> dict[str, int]:
    """Return the dimension sizes of a call over a cache, by letter."""
    q, kv, mask = call.q, call.kv, call.mask
    if not isinstance(q, Tensor) or q.is_nested or q.layout is not torch.strided:
        refuse_tensor("q", q)
    layout = kv.layout
    if not layout.has_keys:
        raise ValueError(
            "kv: expected a layer with keys, got one that stores index keys only; pass the view of the layer "
            "whose keys it reads"
        )
    known = {"b": kv.lengths.shape[0], "d": layout.dim + layout.rope_dim}
    sizes = bind(("q", q, "bshd" if kv.cu_seqlens_q is None else "shd"), known=known)
    if sizes["h"] == 0 or sizes["h"] % layout.heads:
        raise ValueError(
            f"q: expected a multiple of the cache's g={layout.heads} KV heads, got h={sizes['h']}"
        )
    if isinstance(mask, AnyMask):  # describe() refuses any other object
        layout.check_reach(mask)
    return sizes | {"g": layout.heads, "e": layout.value_dim}


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to autocast's dtype if it is enabled, except fp64 and integers (as in torch) and fp8."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype, stay = torch.get_autocast_dtype(device), (torch.float64, E4M3)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype not in stay else x for x in tensors)


def _check_tensors(call: Call, sizes: dict[str, int]) -> None:
    """Raise ValueError or TypeError if slopes, sinks, key bounds, offsets or descales do not fit the call."""
    score, packing = call.score, call.packing
    if call.origin is not NO_ORIGIN:
        _check_origin(call)
    if packing is not None:
        _check_packing(packing)
        sizes = {**sizes, "b": packing.cu_seqlens_q.shape[0] - 1}
    check_selection(call, sizes)
    if call.descales is not None or call.q.dtype == E4M3:
        check_descales(call.descales, call.q.dtype, sizes, over_view=call.kv is not None)
    if (functions := call.functions) is not None:
        functions.check()
        if call.origin is NO_ORIGIN:
            call.check_functions(sizes)
        if functions.mask_tiles is not None and call.kind == "dense":
            _check_tiles(call.mask, call.q.device, sizes)
    if not (optional := call.optional):
        return
    dims = score.dims | {"key_starts": "b", "key_ends": "b"}
    named = [(name, x, dims[name]) for name, x in optional.items() if name in dims]
    for name, x, _ in named:
        if not is_strided(x):
            refuse_tensor(name, x)
        if name in score.options and not x.is_floating_point():
            raise TypeError(f"{name}: expected a float dtype, got {x.dtype}")
        if name not in score.options and x.dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {x.dtype}; cast it with .int()")
    if named:
        bind(*named, known=sizes)


def _check_tiles(mask: MaskFunction, device: torch.device, sizes: dict[str, int]) -> None:
    b, h, s, t = (sizes[name] for name in "bhst")
    expected = (*mask.planes(b, h), -(-s // GRAIN), -(-t // GRAIN))
    if tuple(mask.tiles.shape) != expected or mask.sizes != (s, t) or mask.tiles.device != device:
        found = f"{tuple(mask.tiles.shape)} for {mask.sizes} queries and keys on {mask.tiles.device}"
        got = f"tiles {found}, not {expected} for {(s, t)} on {device}"
        # A function that reads no tensors does not tell block_mask() which device to use.
        is_lost = not mask.tensors and mask.tiles.device != device
        remedy = (
            f"device= is missing: block_mask(..., device={str(device)!r})" if is_lost else "see block_mask()"
        )
        raise ValueError(f"mask: expected a mask for b={b}, h={h}, s={s}, t={t}, got {got}; {remedy}")
    if not torch.compiler.is_compiling() and mask.versions != mask.versions_now():
        raise ValueError("mask: a tensor that it reads has changed since block_mask(); call that again")


def _check_origin(call: Call) -> None:
    for name, x in call.origin._asdict().items():
        if isinstance(x, Tensor):
            if x.dtype != torch.int32 or x.shape != (call.sequences,) or x.device != call.q.device:
                expected = f"int32 [b={call.sequences}] on {call.q.device} like q"
                raise ValueError(
                    f"origin: expected {name} as an int or {expected}, got {came(x)} on {x.device}"
                )
        elif isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"origin: expected {name} as an int or an int32 tensor, got {type(x).__name__}")
        elif not -INT32 <= x <= INT32:
            raise ValueError(f"origin: expected {name} within +-{INT32}, since indices are int32, got {x}")


def _check_packing(packing: Packing) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        x = getattr(packing, name)
        if not is_strided(x) or x.dtype != torch.int32:
            remedy = "; cast it with .int()" if is_strided(x) else ""
            raise TypeError(f"{name}: expected an int32 tensor, got {came(x)}{remedy}")
        if x.dim() != 1 or x.shape[0] < 1:
            raise ValueError(f"{name}: expected [b + 1] offsets, got {tuple(x.shape)}")
    if packing.cu_seqlens_q.shape != packing.cu_seqlens_k.shape:
        got = (tuple(packing.cu_seqlens_q.shape), tuple(packing.cu_seqlens_k.shape))
        raise ValueError(f"cu_seqlens_k: expected as many offsets as cu_seqlens_q, got {got[1]} and {got[0]}")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        limit = getattr(packing, name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(limit).__name__}")
        if limit is not None and not 0 <= limit <= INT32:
            raise ValueError(f"{name}: expected a length from 0 to {INT32}, got {limit}")


def _read_offsets(
    name: str, cu_seqlens: Tensor, tokens: int, limit_name: str, limit: int | None
) -> list[int]:
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name}: expected offsets that start at 0 and never decrease, got {offsets}")
    if offsets[-1] > tokens:
        raise ValueError(f"{name}: expected offsets up to {tokens} tokens, got {offsets[-1]}")
    if limit is not None and lengths and max(lengths) > limit:
        raise ValueError(f"{limit_name}: expected at least the longest sequence, {max(lengths)}, got {limit}")
    return offsets
