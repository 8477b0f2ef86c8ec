"""Queries of low rank: of what makes them from the inputs, that is kept which keys feel."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...internal.checks import check_count
from ..calibration import Calibration
from ..heads.distances import Distances
from ..heads.factors import RIDGE, roots_of
from ..heads.parts import amplitudes
from ..weights import Heads
from .attended import Attended
from .cost import relative
from .norm import Constant


@dataclass(frozen=True, slots=True, eq=False)
class QueryProjection:
    """Queries of all heads from k channels: ``rows`` ``[h, d, k + 1]``, of what ``down`` ``[k, m]`` makes of
    inputs.

    The last column of rows is the same for all tokens, and is no channel.
    """

    rows: Tensor
    down: Tensor

    def of_inputs(self) -> Tensor:
        """Rows of the inputs with a one behind them: ``[h, d, m + 1]``."""
        return torch.cat((self.rows[..., :-1] @ self.down, self.rows[..., -1:]), -1)

    def scaled(self, calibration: Calibration) -> "QueryProjection":
        """The same with channels whose mean square is 1 on the mean, up to a power of two, which loses no
        bit.
        """
        size = calibration.energy(pad(self.down, (0, 1))[:, None]).mean().sqrt()
        by = size.log2().round().exp2() if size else size + 1.0
        return QueryProjection(torch.cat((self.rows[..., :-1] * by, self.rows[..., -1:]), -1), self.down / by)


@dataclass(frozen=True, slots=True, eq=False)
class QueryCost:
    """An error e of a query that reads KV head i costs ``e^T metric[i] e``, with ``metric`` ``[g, d, d]``.

    That is what scores miss, ``(e^T R k)^2`` on the mean over keys k and turns R: keys of tokens as they are
    attended to, and distances up to a reach.
    """

    heads: Heads
    metric: Tensor
    calibration: Calibration

    @classmethod
    def of(cls, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int) -> "QueryCost":
        """``seen`` are the inputs that keys are made of; queries are those of a calibration, all tokens
        alike.
        """
        keys = Distances.of(heads, reach).turned(heads.k @ seen.moment @ heads.k.mT)
        gains = amplitudes(heads)
        return cls(heads, gains[:, None] * keys * gains, calibration)

    def beside(self, queries: QueryProjection, constant: Constant) -> Constant:
        """The constant of the size that is best beside these channels."""
        y = self.calibration.inputs()
        if y is None or constant.is_bias:
            return constant
        return constant.steadied(
            y[:, :-1] @ queries.down.T, y @ constant.row, y.new_full((len(y),), 1 / len(y))
        )

    def missed(self, queries: QueryProjection, constant: Constant | None = None) -> float:
        """What scores miss of their root mean square.

        Beside a ``constant`` that is no bias a norm multiplies the channels of each token by a factor of its
        own: that is measured on inputs that are known, and NaN where none are.
        """
        if constant is None or constant.is_bias:
            lost = self._mean(self.heads.q - queries.of_inputs()).clamp(min=0)
        elif (y := self.calibration.inputs()) is not None:
            lost = self._missed_of(queries, constant, y)
        else:
            return math.nan
        return relative(lost, self._mean(self.heads.q)) ** 0.5

    def _missed_of(self, queries: QueryProjection, constant: Constant, y: Tensor) -> Tensor:
        channels = y[:, :-1] @ queries.down.T
        passed = pad(channels * constant.factors(channels, y @ constant.row)[:, None], (0, 1), value=1.0)
        lost = y.new_zeros(())
        for index, (old, new) in enumerate(
            zip(self.heads.q, queries.rows, strict=True)
        ):  # one head's at a time
            error = y @ old.T - passed @ new.T
            lost += (error.T @ error / len(y) * self.metric[index // self.heads.group]).sum()
        return lost

    def _mean(self, rows: Tensor) -> Tensor:
        moments = (rows @ self.calibration.moment @ rows.mT).unflatten(0, (len(self.metric), -1)).sum(1)
        return torch.einsum("gij,gji->", self.metric, moments)


def low_rank(cost: QueryCost, rank: int, *, has_offset: bool) -> QueryProjection:
    """The queries from ``rank`` channels that cost least, of all that there are.

    With W the root of the metric times what makes queries from inputs, C the moment of the inputs and U the
    first singular vectors of ``W C^(1/2)``, the best is ``U U^T W``, and misses the tail of the spectrum.
    With ``has_offset`` what is the same for all tokens needs no channel; then C is the covariance, and biases
    are kept.

    At the most that :func:`check_query_rank` allows they are the same queries.
    """
    q, moment = cost.heads.q, cost.calibration.moment
    if rank == q.shape[-1] - 1:
        return whole_queries(cost.heads)
    mean = moment[:-1, -1] * has_offset
    spread = moment[:-1, :-1] - mean[:, None] * mean
    roots, inverses = (root.repeat_interleave(cost.heads.group, 0) for root in roots_of(cost.metric))
    weighed = (roots @ q[..., :-1]).flatten(0, 1)
    inner = weighed @ spread @ weighed.T + RIDGE * moment[:-1, :-1].diagonal().mean() * weighed @ weighed.T
    basis = torch.linalg.eigh(inner).eigenvectors[:, -rank:].flip(-1)
    down, up = basis.T @ weighed, inverses @ basis.unflatten(0, q.shape[:2])
    offset = q[..., -1] + (q[..., :-1] - up @ down) @ mean
    return QueryProjection(torch.cat((up, offset[..., None]), -1), down)


def whole_queries(heads: Heads) -> QueryProjection:
    """All queries as they are, whose channels are those of the inputs."""
    width = heads.q.shape[-1] - 1
    return QueryProjection(heads.q, torch.eye(width, dtype=heads.q.dtype, device=heads.q.device))


def check_query_rank(q_rank: int | None, *, heads: int, head_dim: int, width: int, reserved: int = 0) -> None:
    """Refuse no channels, and more than queries of so many heads can need, of inputs of this ``width``.

    Raises:
        TypeError: ``q_rank`` is no int.
        ValueError: it is out of range; ``reserved`` channels of it are for something else.
    """
    if q_rank is None:
        return
    check_count("q_rank", q_rank, least=1 + reserved)
    most = min(heads * head_dim, width) + reserved
    if q_rank > most:
        raise ValueError(f"q_rank: expected at most {most}, the rank of all queries, got {q_rank}")
