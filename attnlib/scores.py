"""Attention scores: the options that modify q·k, and score functions made by :func:`score_mod`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from .internal.checks import NO_SIZES, check_dims, is_strided, refuse_tensor, varies
from .internal.signatures import kind, leading_to
from .tracing.depths import with_alibi
from .tracing.evaluation import evaluated
from .tracing.program import SCORED, Program, constant
from .tracing.score_options import ScoreOptions, options_in
from .tracing.trace import QUERY_OFFSET, FirstQuery, captured_of, traced

FP32 = torch.finfo(torch.float32)


@leading_to("make one by score_mod(function, *tensors)")
@dataclass(frozen=True, slots=True, eq=False)
class ScoreFunction:
    """A function that modifies attention scores by their indices; :func:`score_mod` makes one.

    ``program`` is the traced function, ``tensors`` are the tensors that it reads, and ``names`` their
    parameter names. Gradients flow into the floating-point tensors. The Python function is not stored, so a
    ScoreFunction can be copied and pickled. ``dims`` names the dimensions of each tensor by letters, if their
    sizes are to be validated: "1" is a dimension of size 1, and "T" one of size ``t`` or more.
    ``contained`` has the softcap and ALiBi that :func:`score_mod` found in the program, or is None; it does
    not apply to a copy with another program. ``computed`` keeps slopes that calls have computed, by heads and
    device; copies and pickles begin without any.
    """

    program: Program
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    dims: tuple[str, ...] = ()
    contained: ScoreOptions | None = field(default=None, repr=False)
    computed: dict[tuple[object, ...], Tensor | None] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> list[object]:
        return [getattr(self, x.name) for x in fields(self)[:-1]]

    def __setstate__(self, state: list[object]) -> None:
        for x, value in zip(fields(self), (*state, {}), strict=True):
            object.__setattr__(self, x.name, value)

    def reading(self, tensors: Sequence[Tensor]) -> "ScoreFunction":
        """Return the same function bound to other tensors of the same dtypes and dimension counts."""
        return replace(self, tensors=tuple(tensors))

    def of_part(self) -> "ScoreFunction":
        """Return the same function without validation of tensor sizes, for a chunk of a larger call."""
        return replace(self, dims=())

    def check(self, sizes: Mapping[str, int], least: Mapping[str, int] = NO_SIZES) -> None:
        """Validate the tensors against the sizes of a call; see ``checks.check_dims``."""
        check_dims("score: expected a bias", self.tensors, self.dims, sizes, least)

    def definition(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """Return the new scores for tensors of indices that broadcast: sequence, head, query and key.

        The result has the shape of ``score`` even if the function does not read it. ``first`` is the storage
        index of each sequence's first query.
        """
        inputs = dict(zip(SCORED, (score, b, h, i, j, first), strict=True))
        changed = evaluated(self.program, inputs, self.tensors, score.dtype)
        return torch.broadcast_tensors(changed, score)[0]


@kind
def score_mod(function: Callable, *arguments: Tensor | FirstQuery) -> ScoreFunction:
    """Make a score function: ``function(score, b, h, i, j, *arguments)`` returns the new score.

    The function is applied after scale, softcap and ALiBi and before the mask. It computes in fp32, or in
    fp64 for fp64 inputs. Gradients flow through it, also into floating-point tensors among the arguments. See
    :func:`attnlib.mask_mod` for what a function may do.

    If a function begins with ``c * tanh(score / c)``, or with ALiBi whose slopes ``[h]`` or ``[b, h]`` are an
    argument or are computed from ``h``, these become the call's ``softcap`` and ``alibi_slopes``, for which
    kernels are faster. The rest stays a function. ALiBi without ``abs``, such as
    ``score + slopes[h] * (j - i)``, becomes an option if the band of the mask hides all keys after the query.

    Raises:
        TraceError: the function cannot run in a kernel; the message names the line.

    >>> bias = torch.zeros(8, 257)
    >>> def near(s, b, h, i, j, bias):
    ...     return s + bias[h, (i - j).clamp(-128, 128) + 128]
    >>> near = score_mod(near, bias)
    """
    program = traced("score", function, arguments)
    of_tensors = tuple(isinstance(x, Tensor) for x in arguments)
    tensors = tuple(x for x in arguments if isinstance(x, Tensor))
    return ScoreFunction(program, tensors, _names_of(function, of_tensors), (), options_in(program))


@constant
def _names_of(function: Callable, of_tensors: tuple[bool, ...]) -> tuple[str, ...]:
    """Return a function's parameter names for its tensors; numbered names if it takes ``*tensors``."""
    names = list(signature(function).parameters)[len(SCORED) - 1 :]
    known = tuple(name for name, is_tensor in zip(names, of_tensors, strict=False) if is_tensor)
    count = sum(of_tensors)
    return known if len(known) == count else tuple(f"t{n}" for n in range(count))


class Score(NamedTuple):
    """The options that modify q·k; see :func:`attnlib.attention`."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    function: ScoreFunction | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that are set, without the scale."""
        if self.softcap is self.alibi_slopes is self.sinks is self.function is None:
            return ()
        return tuple(name for name, x in self._asdict().items() if x is not None and name != "scale")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor options that are set, by name."""
        named = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def without_sinks(self) -> "Score":
        """Return the options of a call whose LSE has the sinks already."""
        return self._replace(sinks=None)

    @property
    def dims(self) -> dict[str, str]:
        """The dimensions of the tensor options as letters; slopes may have one row for each sequence."""
        per_sequence = is_strided(self.alibi_slopes) and self.alibi_slopes.dim() == 2
        return {"alibi_slopes": "bh" if per_sequence else "h", "sinks": "h"}

    @property
    def is_alike(self) -> bool:
        """True if a score depends only on q·k, and not on the indices of its query, key or sequence."""
        return self.alibi_slopes is self.function is None

    def with_alibi_in_function(self, *, head: int, sequence: int) -> "Score":
        """Return equal options without slopes, whose function subtracts ALiBi's bias first.

        The slopes begin with those of this head and sequence.
        """
        if self.alibi_slopes is None:
            return self
        before = ScoreFunction(None, (), ()) if self.function is None else self.function
        tensors = (*before.tensors, self.alibi_slopes)
        captured = captured_of("score", tensors)
        program = with_alibi(before.program, captured, head=head, sequence=sequence)
        function = ScoreFunction(program, tensors, (*before.names, "alibi_slopes"), before.dims)
        return self._replace(alibi_slopes=None, function=function)

    @property
    def contained(self) -> ScoreOptions | None:
        """The options that the function contains; None if the call's own softcap or slopes prevent a move."""
        function = self.function
        found = function.contained if type(function) is ScoreFunction else None
        if found is None or found.program != function.program:
            return None
        is_late = found.cap is not None and self.softcap is not None
        return None if is_late or self.alibi_slopes is not None else found

    def with_contained(self, slopes: Tensor | None) -> "Score":
        """Return equal options, with softcap and ALiBi moved from the function to options of the call.

        ``slopes`` are the ALiBi slopes of the call's heads and sequences; without them, ALiBi stays in the
        function.
        """
        found, function = self.contained, self.function
        rest = found.rest if slopes is None else found.last
        function = None if rest is None else replace(function, program=rest, contained=None)
        softcap = self.softcap if found.cap is None else found.cap
        return Score(self.scale, softcap, slopes, self.sinks, function)

    def filled(self, head_dim: int) -> "Score":
        """Return the validated options, with a default scale for heads of dimension ``head_dim``.

        Raises:
            ValueError, TypeError: an option is invalid; the message names it.
        """
        scale = max(head_dim, 1) ** -0.5 if self.scale is None else _positive("scale", self.scale)
        softcap = None if self.softcap is None else _positive("softcap", self.softcap)
        if self.function is not None and type(self.function) is not ScoreFunction:
            raise TypeError(f"score: expected what score_mod() makes, got {type(self.function).__name__}")
        return Score(scale, softcap, self.alibi_slopes, self.sinks, self.function)


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name}: expected a Python number, got {type(value).__name__}; reading a tensor would wait for "
            "it"
        )
    # In fp32 a larger number would become inf and a smaller one 0, and their product NaN. torch.compile
    # cannot trace isfinite() on a symbolic float.
    if not FP32.tiny <= value <= FP32.max:
        raise ValueError(f"{name}: expected a finite fp32 number above 0, got {value}")
    return 1.0 * value  # converts an int to a float, since torch cannot take very large ints


# ---- ready-made score functions


@kind
def bias_tensor(bias: Tensor) -> ScoreFunction:
    """Return a score function that adds ``bias`` ``[b, h, s, t]``, in which any dimension may be 1.

    Row ``n`` of the bias belongs to query ``n`` of the call. A call with other sizes raises ValueError.
    Packed calls accept a larger bias, and compare it with ``max_seqlen_q`` and ``max_seqlen_k`` if given.
    Calls over a cache accept any ``t`` of at least ``s``. Lengths that are only on the GPU are validated with
    ``ATTNLIB_CHECK=1``.
    """
    batch, heads, rows, columns = which = [varies(size) for size in _sizes("bias", bias, 4)]

    def add(score, b, h, i, j, first, bias):
        at = b if batch else 0, h if heads else 0, i - first[b] if rows else 0, j if columns else 0
        return score + bias[at]

    dims = "".join(dim if several else "1" for dim, several in zip("bhst", which, strict=True))
    return replace(score_mod(add, QUERY_OFFSET, bias), dims=(dims,))


@kind
def distance_bias(bias: Tensor) -> ScoreFunction:
    """Return a score function that adds ``bias[h, i - j]`` of a bias ``[h, n]``.

    Distances of ``n`` or more use ``bias[h, n - 1]``. A call with another head count raises ValueError.
    """
    last = _sizes("bias", bias, 2)[1] - 1
    near = score_mod(lambda score, b, h, i, j, bias: score + bias[h, (i - j).clamp(0, last)], bias)
    return replace(near, dims=("hn",))


@kind
def t5_bias(
    bias: Tensor, *, max_distance: int = 128, bidirectional: bool = False, heads_last: bool = False
) -> ScoreFunction:
    """Return a score function for T5's relative bias ``[h, buckets]`` (Raffel et al., 2019, 1910.10683).

    Half of the buckets are for one distance each, and the others for growing ranges up to ``max_distance``.
    With ``bidirectional``, half of all buckets are for keys after the query. With ``heads_last`` the bias is
    ``[buckets, h]``, as in T5's checkpoints (``relative_attention_bias.weight``). A call with another head
    count raises ValueError; if there are as many heads as buckets, a wrong order goes unnoticed.

    Raises:
        ValueError: there are fewer than 2 buckets per direction, or an odd number for two directions.
    """
    count = _sizes("bias", bias, 2)[0 if heads_last else 1]
    sides = 2 if bidirectional else 1
    if count < 2 * sides or count % sides:
        dims = f"[{'buckets, h' if heads_last else 'h, buckets'}]"
        expected = "an even number of buckets, at least 4," if bidirectional else "at least 2 buckets"
        raise ValueError(
            f"bias: expected {expected} in {dims}, got {count}; heads_last= says which dimension has them"
        )
    buckets, exact = count // sides, count // sides // 2

    def add(score, b, h, i, j, bias):
        behind = torch.where(j > i, buckets, 0) if bidirectional else 0
        distance = (i - j).abs() if bidirectional else (i - j).clamp(0)
        far = torch.log(distance.clamp(1).float() / exact) * (
            (buckets - exact) / math.log(max_distance / exact)
        )
        bucket = torch.where(distance < exact, distance, (exact + far.int()).clamp(max=buckets - 1)) + behind
        return score + (bias[bucket, h] if heads_last else bias[h, bucket])

    return replace(score_mod(add, bias), dims=("nh" if heads_last else "hn",))


def _sizes(name: str, x: Tensor, dims: int) -> tuple[int, ...]:
    if not is_strided(x):
        refuse_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected floats, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got {tuple(x.shape)}")
    return tuple(x.shape)
