"""Low-rank queries: keep the directions of the query projection that matter most to scores."""

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
    """A low-rank query projection: ``down`` maps inputs to k channels, and ``rows`` maps these to queries.

    ``down`` is ``[k, m]`` and ``rows`` ``[h, d, k + 1]``. The last column of ``rows`` is an offset that is
    added to the query of every token, like a bias.
    """

    rows: Tensor
    down: Tensor

    def of_inputs(self) -> Tensor:
        """Multiply both query projections into one, ``[h, d, m + 1]``; the last column is the bias."""
        return torch.cat((self.rows[..., :-1] @ self.down, self.rows[..., -1:]), -1)

    def scaled(self, calibration: Calibration) -> "QueryProjection":
        """Scale the channels to an average mean square near 1, without changing the queries.

        The scale is a power of two, so nothing is rounded.
        """
        size = calibration.energy(pad(self.down, (0, 1))[:, None]).mean().sqrt()
        scale = size.log2().round().exp2() if size else size + 1.0
        rows = torch.cat((self.rows[..., :-1] * scale, self.rows[..., -1:]), -1)
        return QueryProjection(rows, self.down / scale)


@dataclass(frozen=True, slots=True, eq=False)
class QueryCost:
    """The cost of query errors: an error e of a query that reads KV head i costs ``e^T metric[i] e``.

    ``metric`` is ``[g, d, d]``. The cost is the mean square error of scores: the mean of ``(e^T R k)^2`` over
    keys k, weighted by the attention they get, and over rope rotations R up to a maximum distance.
    """

    heads: Heads
    metric: Tensor
    calibration: Calibration

    @classmethod
    def of(cls, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int) -> "QueryCost":
        """Return the cost of errors in a calibration's queries, which all have equal weight.

        ``seen`` holds the inputs from which keys are computed.
        """
        keys = Distances.of(heads, reach).rotated(heads.k @ seen.moment @ heads.k.mT)
        gains = amplitudes(heads)
        return cls(heads, gains[:, None] * keys * gains, calibration)

    def beside(self, queries: QueryProjection, constant: Constant) -> Constant:
        """Return ``constant``, scaled so that the norm changes the channels of low-rank queries least."""
        y = self.calibration.inputs()
        if y is None or constant.is_bias:
            return constant
        return constant.steadied(
            y[:, :-1] @ queries.down.T, y @ constant.row, y.new_full((len(y),), 1 / len(y))
        )

    def missed(self, queries: QueryProjection, constant: Constant | None = None) -> float:
        """Return the root mean square error that low-rank queries cause in scores, relative to the scores.

        With a ``constant`` channel that is not a bias, the norm multiplies the channels of each token by a
        different factor. The error is then measured on a sample of inputs, and is NaN without a sample.
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
        # Looping over heads saves memory.
        for index, (old, new) in enumerate(zip(self.heads.q, queries.rows, strict=True)):
            error = y @ old.T - passed @ new.T
            lost += (error.T @ error / len(y) * self.metric[index // self.heads.group]).sum()
        return lost

    def _mean(self, rows: Tensor) -> Tensor:
        moments = (rows @ self.calibration.moment @ rows.mT).unflatten(0, (len(self.metric), -1)).sum(1)
        return torch.einsum("gij,gji->", self.metric, moments)


def low_rank(cost: QueryCost, rank: int, *, has_offset: bool) -> QueryProjection:
    """Return the query projection through ``rank`` channels whose errors have the smallest cost.

    Let W be the square root of the metric times the query projection, C the second moment of the inputs, and
    U the first ``rank`` left singular vectors of ``W C^(1/2)``. The best approximation is ``U U^T W``, and
    its error is the sum of the remaining squared singular values. With ``has_offset``, the mean query needs
    no channel: C is then the covariance, and biases are kept.

    At the highest rank that :func:`check_query_rank` allows, the queries do not change.
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
    """Return the unchanged query projection in low-rank form: its channels are the inputs themselves."""
    eye = torch.eye(heads.q.shape[-1] - 1, dtype=heads.q.dtype, device=heads.q.device)
    return QueryProjection(heads.q, eye)


def check_query_rank(q_rank: int | None, *, heads: int, head_dim: int, width: int, reserved: int = 0) -> None:
    """Raise an error if ``q_rank`` is less than 1 or exceeds the rank of the full query projection.

    Both limits rise by ``reserved``, the number of channels that do not hold queries, such as a constant.

    Raises:
        TypeError: ``q_rank`` is not an int.
        ValueError: ``q_rank`` is out of range.
    """
    if q_rank is None:
        return
    check_count("q_rank", q_rank, least=1 + reserved)
    most = min(heads * head_dim, width) + reserved
    if q_rank > most:
        raise ValueError(f"q_rank: expected at most {most}, the rank of all queries, got {q_rank}")
