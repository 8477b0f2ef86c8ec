"""A quantity to compute from the scores of a call instead of its output, and its validation."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..internal.checks import are_checks_on, bind, came, is_strided, refuse_tensor
from .call import Call

WIDE = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


class Statistic(NamedTuple):
    """A quantity to compute from the scores of a call: its largest scores, or probabilities P.

    P is ``exp(score - lse)`` for visible pairs, and 0 for hidden pairs and rows whose LSE is -inf.

    Attributes:
        kind: one of these names:

            - ``"maxima"``: the largest score of each query, ``[b, h, s]``, or packed ``[h, s]``;
            - ``"products"``: the same without softcap, ALiBi and score function; backends do not see it;
            - ``"rows"``: P of some queries, ``[b, h, r, t]``, or packed ``[h, r, width]``;
            - ``"mass"``: P summed over all queries or over ``rows``, ``[b, h, t]``, or packed ``[h, t]``;
            - ``"heads"``: the mean of P over heads, at the keys ``at``, in the shape of ``at``.
        lse: ``[b, h, s]``, or packed ``[h, s]``; None for maxima.
        rows: ``[r]`` or ``[b, r]``, numbers of queries. Other numbers than those of queries, such as -1,
            stand for no query.
        at: ``[b, s, n]``, or packed ``[s, n]``, numbers of keys as masks count them. Numbers of hidden keys
            and -1 have the mean 0.
        width: the number of columns of ``"rows"``; column ``j`` is for key ``j`` as masks count it.
    """

    kind: str
    lse: Tensor | None = None
    rows: Tensor | None = None
    at: Tensor | None = None
    width: int = 0

    def result(self, q: Tensor, k: Tensor) -> Tensor:
        """Allocate the result for queries q and keys k, in fp32, or in fp64 if q is fp64."""
        *batch, s, h, _ = q.shape
        shapes = {"maxima": (h, s), "mass": (h, k.shape[-3])}
        if self.kind == "heads":
            shape = self.at.shape
        elif self.kind == "rows":
            shape = (*batch, h, self.rows.shape[-1], self.width)
        else:
            shape = (*batch, *shapes[self.kind])
        return q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def first_column(k: Tensor) -> Tensor:
    """Return the first channel of keys, which stands for values in a call that computes a statistic."""
    return k[..., :1] if k.dim() else k


def checked_statistic(call: Call, statistic: Statistic) -> Statistic:
    """Validate a statistic of a validated call, and return it with its width.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and what was expected.
    """
    q, packed = call.q, call.q.dim() == 3
    sizes = dict(zip("shd" if packed else "bshd", q.shape, strict=True))
    lse, rows, at = statistic.lse, statistic.rows, statistic.at
    if statistic.kind not in ("maxima", "products"):
        _check("lse", lse, WIDE, "hs" if packed else "bhs", sizes, q.device)
    if rows is not None:
        per_sequence = not packed and is_strided(rows) and rows.dim() == 2
        _check("rows", rows, INTEGERS, "br" if per_sequence else "r", sizes, q.device)
        _check_values("rows", rows, sizes["s"])
    if at is not None:
        _check("at", at, INTEGERS, "sn" if packed else "bsn", sizes, q.device)
        _check_values("at", at, call.k.shape[-3] if call.kv is None else _capacity(call))
    return statistic._replace(width=_width(call) if statistic.kind == "rows" else 0)


def _check(
    name: str,
    x: object,
    dtypes: tuple[torch.dtype, ...],
    dims: str,
    sizes: dict[str, int],
    device: torch.device,
) -> None:
    if not is_strided(x):
        refuse_tensor(name, x)
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {came(x)}")
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {x.device}")
    bind((name, x, dims), known=sizes)


def _check_values(name: str, x: Tensor, count: int) -> None:
    """With ``ATTNLIB_CHECK=1``, raise ValueError unless all numbers are from -1 to ``count - 1``."""
    if are_checks_on(x) and x.numel() and not (int(x.min()) >= -1 and int(x.max()) < count):
        raise ValueError(
            f"{name}: expected numbers from 0 to {count - 1}, or -1 for none, got {x.min()} to {x.max()}"
        )


def _capacity(call: Call) -> int:
    return call.kv.table.shape[1] * call.kv.page_size


def _width(call: Call) -> int:
    """Return the number of columns of rows of P, which is the number of keys of a sequence.

    For packed sequences it is ``max_seqlen_k``, or the longest length, which is read from the device.
    """
    if call.packing is None:  # over a cache, the call on its gathered keys has a width
        return 0 if call.k is None else call.k.shape[1]
    given, offsets = call.packing.max_seqlen_k, call.packing.cu_seqlens_k
    if given is not None:
        return given
    return max(0, int(offsets.diff().max())) if len(offsets) > 1 else 0
