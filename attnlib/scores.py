"""How a visible pair's score comes from q·k: by options, and by a function of indices."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from .internal.checks import NO_SIZES, check_dims, is_strided, refuse_tensor, varies
from .internal.signatures import kind, leading_to
from .tracing.evaluation import evaluated
from .tracing.program import SCORED, Program, constant
from .tracing.trace import FIRST_QUERY, FirstQuery, traced

FP32 = torch.finfo(torch.float32)


@leading_to("make one by score_mod(function, *tensors)")
@dataclass(frozen=True, slots=True, eq=False)
class ScoreFunction:
    """What a function of indices makes of scores; :func:`score_mod` makes it.

    ``program`` is what the function does, ``tensors`` what it reads, in whose floats a gradient flows, and
    ``names`` what it calls them. The function itself is not kept, so that scores can be copied and pickled.
    ``dims`` are the letters of each tensor's dimensions, if its maker documents them; "1" for one that has a
    single index, "T" for ``t`` or more.
    """

    program: Program
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    dims: tuple[str, ...] = ()

    def reading(self, tensors: Sequence[Tensor]) -> "ScoreFunction":
        """The same function of other tensors, of the same dtypes and ranks."""
        return replace(self, tensors=tuple(tensors))

    def of_part(self) -> "ScoreFunction":
        """Return the same function for a part of a call, whose sizes need not be those of its tensors."""
        return replace(self, dims=())

    def check(self, sizes: Mapping[str, int], least: Mapping[str, int] = NO_SIZES) -> None:
        """Compare its tensors with the sizes of a call; see ``checks.check_dims``."""
        check_dims("score: expected a bias", self.tensors, self.dims, sizes, least)

    def definition(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, first: Tensor) -> Tensor:
        """The new score of query ``i`` of head ``h`` in sequence ``b`` and key ``j``, for tensors that
        broadcast.

        It has the shape of the scores even if the function does not read them. ``first`` is the storage index
        of the first query of each sequence.
        """
        inputs = dict(zip(SCORED, (score, b, h, i, j, first), strict=True))
        changed = evaluated(self.program, inputs, self.tensors, score.dtype)
        return torch.broadcast_tensors(changed, score)[0]


@kind
def score_mod(function: Callable, *arguments: Tensor | FirstQuery) -> ScoreFunction:
    """Scores by a function of indices: ``function(score, b, h, i, j, *arguments)`` gives the new one.

    It runs after scale, softcap and ALiBi and before the mask, in fp32, or in fp64 if q is. A gradient flows
    through it, into float tensors among the arguments too. For the rest see :func:`attnlib.mask_mod`.

    Raises:
        TraceError: what the function does cannot run in a kernel; the message names the line.

    >>> bias = torch.zeros(8, 257)
    >>> near = score_mod(
    ...     lambda score, b, h, i, j, bias: score + bias[h, (i - j).clamp(-128, 128) + 128], bias
    ... )
    """
    program = traced("score", function, arguments)
    of_tensors = tuple(isinstance(x, Tensor) for x in arguments)
    tensors = tuple(x for x in arguments if isinstance(x, Tensor))
    return ScoreFunction(program, tensors, _names_of(function, of_tensors))


@constant
def _names_of(function: Callable, of_tensors: tuple[bool, ...]) -> tuple[str, ...]:
    """The names that a function has for its tensors; numbered where it takes ``*tensors``."""
    names = list(signature(function).parameters)[len(SCORED) - 1 :]
    known = tuple(name for name, is_tensor in zip(names, of_tensors, strict=False) if is_tensor)
    count = sum(of_tensors)
    return known if len(known) == count else tuple(f"t{n}" for n in range(count))


class Score(NamedTuple):
    """The options that make a visible pair's score from q·k, as in :func:`attnlib.attention`."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    function: ScoreFunction | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The names of what there is beside the scale."""
        if self.softcap is self.alibi_slopes is self.sinks is self.function is None:
            return ()
        return tuple(name for name, x in self._asdict().items() if x is not None and name != "scale")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its own tensors, by name, that are there."""
        named = {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None}

    @property
    def dims(self) -> dict[str, str]:
        """The dimensions of its tensors: slopes may be of each sequence."""
        per_sequence = is_strided(self.alibi_slopes) and self.alibi_slopes.dim() == 2
        return {"alibi_slopes": "bh" if per_sequence else "h", "sinks": "h"}

    @property
    def is_alike(self) -> bool:
        """Whether a score depends on q·k alone, and not on which query, key or sequence it is of."""
        return self.alibi_slopes is self.function is None

    def filled(self, head_dim: int) -> "Score":
        """With a scale, where none is given: of heads of so many channels.

        Raises:
            ValueError, TypeError: naming the option, what was expected and what came.
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
    # As fp32, a greater number would be inf and a smaller one 0, and their products NaN. (Not isfinite, which
    # torch.compile cannot trace on a float that varies.)
    if not FP32.tiny <= value <= FP32.max:
        raise ValueError(f"{name}: expected a finite fp32 number above 0, got {value}")
    return 1.0 * value  # an int may be too large for torch


# ---- ready-made


@kind
def bias_tensor(bias: Tensor) -> ScoreFunction:
    """Add ``bias`` ``[b, h, s, t]`` to the scores; its dimensions may be 1, and its rows are the call's
    queries.

    Calls raise ValueError for a bias of other sizes than theirs. Packed calls take a larger one, and compare
    it with ``max_seqlen_q`` and ``max_seqlen_k``, if these are given. Calls over a cache take any ``t`` of
    ``s`` or more. Lengths that are known on the device alone are compared with ``ATTNLIB_CHECK=1`` only.
    """
    batch, heads, rows, columns = which = [varies(size) for size in _sizes("bias", bias, 4)]

    def add(score, b, h, i, j, first, bias):
        at = b if batch else 0, h if heads else 0, i - first[b] if rows else 0, j if columns else 0
        return score + bias[at]

    dims = "".join(dim if several else "1" for dim, several in zip("bhst", which, strict=True))
    return replace(score_mod(add, FIRST_QUERY, bias), dims=(dims,))


@kind
def distance_bias(bias: Tensor) -> ScoreFunction:
    """Add ``bias[h, i - j]``, ``[h, n]``, to the scores; keys ``n`` or more before the query have that of ``n
    - 1``.

    Calls raise ValueError for a bias of other heads than theirs.
    """
    last = _sizes("bias", bias, 2)[1] - 1
    near = score_mod(lambda score, b, h, i, j, bias: score + bias[h, (i - j).clamp(0, last)], bias)
    return replace(near, dims=("hn",))


@kind
def t5_bias(
    bias: Tensor, *, max_distance: int = 128, bidirectional: bool = False, heads_last: bool = False
) -> ScoreFunction:
    """Add T5's relative bias ``[h, buckets]`` to the scores (Raffel et al., 2019, 1910.10683).

    Half of the buckets are of one distance each, the others of distances that grow up to ``max_distance``;
    ``bidirectional``, half of all are of keys behind the query. With ``heads_last`` the bias is ``[buckets,
    h]``, as T5's checkpoints keep it (``relative_attention_bias.weight``). Calls raise ValueError for a bias
    of other heads than theirs; where there are as many heads as buckets, no shape tells one order from the
    other.

    Raises:
        ValueError: there are fewer than 2 buckets a side, or not as many on both.
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
