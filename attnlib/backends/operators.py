"""The arguments and results of the backends' torch operators.

torch's dispatcher takes arguments as one flat list. Their order is defined only here; all other code uses the
field names.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from ..call.call import Call, Score
from ..call.functions import Functions
from ..call.selection import selection_of
from ..call.statistic import Statistic
from ..fp8 import E4M3, Fp8Inputs, quantized
from ..internal.watched import is_transforming
from ..masks.band import Mask
from ..tracing.program import Program

TYPES = MappingProxyType(
    {Tensor: "Tensor", list[Tensor]: "Tensor[]", int: "SymInt", float: "float", bool: "bool", str: "str"}
)


class Arguments(NamedTuple):
    """The arguments of a forward operator in the order of its schema; tensors come first.

    ``captured`` holds the tensors that the mask and score functions read, with those of the mask function
    first. ``mask_tiles`` classifies tiles as hidden, partial or full, or bounds the tokens of a tree, if that
    is already known. ``selected`` has lists of blocks of ``block_size`` keys; it is None, and the size 0, if
    the mask selects none. ``mask_tree`` describes the tree of a mask that hides nothing else, as
    :meth:`~attnlib.masks.function.TreeTensors.written` writes it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_starts: Tensor | None
    key_ends: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout_seed: Tensor | None
    origin: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    mask_tiles: Tensor | None
    selected: Tensor | None
    captured: list[Tensor] | None
    left: int | None
    right: int | None
    prefix: int
    block_size: int
    scale: float
    softcap: float | None
    dropout_p: float
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    mask_program: str | None
    score_program: str | None
    mask_tree: str | None
    to_fp8: bool  # True if the forward first rounds q, k and v to e4m3
    learns: bool  # True if ALiBi slopes, or a tensor that the score function reads, need a gradient


class CachedArguments(NamedTuple):
    """The arguments of an operator that computes attention over a KV cache.

    In a latent cache, values are read from ``k``, so ``v`` and ``v_scale`` are None.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    k_rope: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    table: Tensor
    starts: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor | None
    schedule: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    origin: Tensor | None
    q_descale: Tensor | None
    selected: Tensor | None
    captured: list[Tensor] | None
    left: int | None
    right: int | None
    prefix: int
    block_size: int
    scale: float
    softcap: float | None
    split_size: int
    mask_program: str | None
    score_program: str | None

    @property
    def value_plane(self) -> Tensor:
        """The tensor that values are read from, which is ``k`` in a latent cache."""
        return self.k if self.v is None else self.v


AnyArguments = Arguments | CachedArguments


class WriteArguments(NamedTuple):
    """The arguments of an operator that writes tokens to a cache.

    The tensors of the cache come first: two planes (which store the tokens) and their scales. They are
    written in place. In a latent cache, ``k`` stores the latents, and ``v`` the rotary keys.
    """

    k: Tensor
    v: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    new_k: Tensor
    new_v: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    slots: Tensor
    interleaved: bool
    latent: bool


def flat(call: Call) -> Arguments:
    """Return a validated call on tensors as operator arguments; the channels of q, k, v are contiguous."""
    q, k, v, mask, score = call.q, call.k, call.v, call.mask.band, call.score
    packing, dropout = call.packing, call.dropout
    if call.spec.strided:
        q, k, v = (
            x.contiguous() if name in call.spec.strided else x
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
    cu_q, cu_k, max_q, max_k = (None,) * 4 if packing is None else packing
    origin = call.origin.table(call.sequences, q.device)
    q_descale, k_descale, v_descale = (None,) * 3 if call.descales is None else call.descales
    captured, *programs = _flat_functions(call)
    whole = call.functions is not None and packing is None and origin is None
    tiles, tree = (call.functions.mask_tiles if whole else None), None
    if tiles is None and origin is None and call.functions is not None and call.functions.tree is not None:
        tree = call.functions.tree.written()
    selected, block_size = selection_of(call.mask) or (None, 0)
    band = mask.left, mask.right, mask.prefix, block_size
    numbers = *band, score.scale, score.softcap, dropout.p, max_q, max_k
    return Arguments(
        q, k, v, score.alibi_slopes, score.sinks, call.key_starts, call.key_ends, cu_q, cu_k, dropout.seed,
        origin, q_descale, k_descale, v_descale, tiles, selected, captured, *numbers, *programs, tree,
        call.compute_dtype == E4M3, _learns(call),
    )  # fmt: skip


def flat_over_view(call: Call, schedule: Tensor | None = None) -> CachedArguments:
    """Return a validated call over a view of a cache as operator arguments."""
    kv, mask, score = call.kv, call.mask.band, call.score
    captured, *programs = _flat_functions(call)
    q = call.q.contiguous() if call.spec.strided else call.q
    v, v_scale = (None, None) if kv.layout.is_latent else (kv.v, kv.v_scale)
    q_descale = None if call.descales is None else call.descales.q_descale
    selected, block_size = selection_of(call.mask) or (None, 0)
    band = mask.left, mask.right, mask.prefix, block_size
    return CachedArguments(
        q, kv.k, v, kv.k_rope, kv.k_scale, v_scale, kv.table, kv.starts, kv.lengths, kv.cu_seqlens_q,
        schedule, score.alibi_slopes, score.sinks, call.origin.table(call.sequences, q.device), q_descale,
        selected, captured, *band, score.scale, score.softcap, kv.split_size, *programs,
    )  # fmt: skip


def _flat_functions(call: Call) -> tuple[list[Tensor] | None, str | None, str | None]:
    """Return the tensors that the mask and score functions capture, and the source of both functions."""
    if (functions := call.functions) is None:
        return None, None, None
    programs = (None if x is None else x.text for x in (functions.mask, functions.score))
    return [*functions.mask_tensors, *functions.score_tensors] or None, *programs


def _learns(call: Call) -> bool:
    """True if the ALiBi slopes, or a tensor that the score function reads, need a gradient.

    Also True under a transform (such as vmap), which hides whether a gradient is needed.
    """
    tensors = () if call.functions is None else call.functions.score_tensors
    tensors = [x for x in (call.score.alibi_slopes, *tensors) if x is not None]
    return bool(tensors) and (is_transforming() or (call.spec.grad and any(x.requires_grad for x in tensors)))


def _typed(fields: type[NamedTuple], written: int = 0) -> str:
    """Return fields in the syntax of torch's schemas; the first ``written`` ones are modified in place."""
    letters = [f"({chr(ord('a') + n)}!)" if n < written else "" for n in range(len(fields._fields))]
    typed = zip(get_type_hints(fields).items(), letters, strict=True)
    return ", ".join(f"{_type(hint, letter)} {name}" for (name, hint), letter in typed)


def _type(hint: type, written: str = "") -> str:
    return f"{TYPES[hint]}{written}" if hint in TYPES else f"{TYPES[get_args(hint)[0]]}{written}?"


TENSORS = Arguments._fields.index("captured")  # the number of fields that are single tensors; they come first
BY_POSITION = Arguments._fields[3:TENSORS]  # kernels assume that these tensors are contiguous
FORWARD = f"({_typed(Arguments)}) -> (Tensor, Tensor)"
BACKWARD = (
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_typed(Arguments)})"
    f" -> ({', '.join(['Tensor'] * 6)})"
)
CACHED = f"({_typed(CachedArguments)}) -> (Tensor, Tensor)"
STATISTIC = f"({_typed(Arguments)}, {_typed(Statistic)}) -> Tensor"
WRITE = f"({_typed(WriteArguments, written=4)}) -> ()"


def functions_of(a: AnyArguments) -> Functions | None:
    """Return the mask and score functions of the arguments, or None if there are none."""
    if a.mask_program is a.score_program is None:
        return None
    mask, score = (None if text is None else Program(text) for text in (a.mask_program, a.score_program))
    mask_count = 0 if mask is None else len(mask.parsed.captured)
    captured = tuple(a.captured or ())
    return Functions(mask, score, captured[:mask_count], captured[mask_count:])


def mask_and_score(a: AnyArguments) -> tuple[Mask, Score]:
    """Return the band of the mask, and the options that turn a product of q and k into a score."""
    return Mask(a.left, a.right, a.prefix), Score(a.scale, a.softcap, a.alibi_slopes, a.sinks)


def quantize(a: Arguments) -> Fp8Inputs:
    """Round q, k and v of a call to e4m3, with torch's functions."""
    offsets, bounds = (a.cu_seqlens_q, a.cu_seqlens_k), (a.key_starts, a.key_ends)
    return quantized((a.q, a.k, a.v), offsets, bounds)


def readable(a: AnyArguments) -> AnyArguments:
    """Make the optional tensors of a call contiguous, as kernels assume, and return the arguments."""
    scattered = {
        name: x for name in BY_POSITION if (x := getattr(a, name, None)) is not None and not x.is_contiguous()
    }
    return a._replace(**{name: x.contiguous() for name, x in scattered.items()}) if scattered else a


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate an output ``[..., s, h, e]`` and an LSE ``[..., h, s]`` in fp32, or in fp64 if q is fp64."""
    *batch, s, h, _ = q.shape
    out = q.new_empty((*batch, s, h, v.shape[-1]), dtype=result_dtype(q.dtype))
    return out, q.new_empty((*batch, h, s), dtype=wide(q))


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the output for queries of dtype ``dtype``: bf16 for fp8, otherwise the same."""
    return torch.bfloat16 if dtype == E4M3 else dtype


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and LSE for queries ``x``: fp64 if the queries are, otherwise fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fake_attention(q: Tensor, k: Tensor, v: Tensor | None, *rest: object) -> tuple[Tensor, Tensor]:
    """Return the shapes and dtypes of an attention operator's results, as tensors without values."""
    return outputs(q, k if v is None else v)


def fake_statistic(*given: object) -> Tensor:
    """Return a tensor without values in the shape and dtype of a statistic operator's result."""
    a, statistic = statistic_of(given)
    return statistic.result(a.q, a.k)


def flat_statistic(call: Call, statistic: Statistic) -> tuple:
    """Return a validated call and a statistic as the arguments of an operator."""
    return *flat(call), *statistic


def statistic_of(given: Sequence[object]) -> tuple[Arguments, Statistic]:
    """Return the call and the statistic whose arguments an operator got."""
    count = len(Arguments._fields)
    return Arguments(*given[:count]), Statistic(*given[count:])


def fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *given: object
) -> tuple[Tensor, ...]:
    """Return the shapes and dtypes of a backward operator's results, as tensors without values.

    The results are dq, dk, dv, dslopes and dsinks, each empty if its argument is None, and one flat tensor
    with the gradients of all captured tensors.
    """
    captured = lse.new_empty(count_learnt(Arguments(*given)))
    return *(lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in given[:5]), captured


def learnt(a: Arguments) -> list[bool]:
    """Return a bool for each captured tensor: True if the backward computes its gradient.

    It does so if ``a.learns`` is set, the score function reads the tensor, and the tensor is floating-point.
    """
    functions = functions_of(a)
    mask_count = 0 if functions is None else len(functions.mask_tensors)
    return [a.learns and n >= mask_count and x.is_floating_point() for n, x in enumerate(a.captured or ())]


def apart(grads: Tensor, a: Arguments) -> list[Tensor | None]:
    """Split the concatenated gradients of captured tensors; return None for a tensor that has no gradient."""
    known = list(zip(a.captured or (), learnt(a), strict=True))
    parts = iter(grads.split([x.numel() for x, has_grad in known if has_grad]))
    return [next(parts).view(x.shape) if has_grad else None for x, has_grad in known]


def count_learnt(a: Arguments) -> int:
    """Return the total number of elements of all captured tensors that have a gradient."""
    return sum(x.numel() for x, has_grad in zip(a.captured or (), learnt(a), strict=True) if has_grad)


def fake_write(*arguments: object) -> None:
    """Do nothing: a cache write has no results whose shapes and dtypes are needed."""


def option_grads(
    a: Arguments, dslopes: Tensor | None, lse: Tensor, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ALiBi slopes and of sinks; an option that is absent gets an empty tensor.

    ``dslopes`` ``[b, h]`` has the gradients of the slopes for each sequence. ``delta`` is
    ``rowsum(out * dout) - dlse`` in the shape of the LSE. Each may be None if it is not needed; slopes that
    need no gradient get zeros. A sink acts like a key whose value is zero, so its gradient is its probability
    times ``-delta``.
    """
    slope_grads, sink_grads = lse.new_empty(0), lse.new_empty(0)
    if a.alibi_slopes is not None and not a.learns:
        slope_grads = torch.zeros_like(a.alibi_slopes)
    elif a.alibi_slopes is not None:
        slope_grads = (dslopes.sum(0) if a.alibi_slopes.dim() == 1 else dslopes).to(a.alibi_slopes.dtype)
    if a.sinks is not None:
        dsinks = torch.where(lse.isinf(), 0, -torch.exp(a.sinks.to(lse.dtype)[:, None] - lse) * delta)
        sink_grads = dsinks.transpose(0, -2).flatten(1).sum(1).to(a.sinks.dtype)
    return slope_grads, sink_grads
