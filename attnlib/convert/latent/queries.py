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
    """The queries of all heads from k channels: ``down`` ``[k, m]`` maps inputs to channels, ``rows`` to q.

    ``rows`` is ``[h, d, k + 1]``. Its last column is an offset that all tokens share, and reads no channel.
    """

    rows: Tensor
    down: Tensor

    def of_inputs(self) -> Tensor:
        """Return the queries as rows over the inputs and a final one: ``[h, d, m + 1]``."""
        return torch.cat((self.rows[..., :-1] @ self.down, self.rows[..., -1:]), -1)

    def scaled(self, calibration: Calibration) -> "QueryProjection":
        """Scale the channels to an average mean square near 1, without changing the queries.

        The scale is a power of two, which loses no bit.
        """
        size = calibration.energy(pad(self.down, (0, 1))[:, None]).mean().sqrt()
        scale = size.log2().round().exp2() if size else size + 1.0
        rows = torch.cat((self.rows[..., :-1] * scale, self.rows[..., -1:]), -1)
        return QueryProjection(rows, self.down / scale)


@dataclass(frozen=True, slots=True, eq=False)
class QueryCost:
    """The cost of query errors: an error e of a query that reads KV head i costs ``e^T metric[i] e``.

    ``metric`` is ``[g, d, d]``. The cost is the mean square error of scores, ``(e^T R k)^2`` over keys k and
    rope rotations R. Keys are weighted by the attention they get, and distances go up to a reach.
    """

    heads: Heads
    metric: Tensor
    calibration: Calibration

    @classmethod
    def of(cls, heads: Heads, calibration: Calibration, seen: Attended, *, reach: int) -> "QueryCost":
        """Return the cost for the queries of a calibration, with equal weight for all tokens.

        ``seen`` are the inputs that keys are made from.
        """
        keys = Distances.of(heads, reach).rotated(heads.k @ seen.moment @ heads.k.mT)
        gains = amplitudes(heads)
        return cls(heads, gains[:, None] * keys * gains, calibration)

    def beside(self, queries: QueryProjection, constant: Constant) -> Constant:
        """Return the constant with the best size beside these query channels."""
        y = self.calibration.inputs()
        if y is None or constant.is_bias:
            return constant
        return constant.steadied(
            y[:, :-1] @ queries.down.T, y @ constant.row, y.new_full((len(y),), 1 / len(y))
        )

    def missed(self, queries: QueryProjection, constant: Constant | None = None) -> float:
        """Return the error of scores, as a fraction of their root mean square.

        With a ``constant`` that is not a bias, the norm multiplies the channels of each token by a different
        factor. The error is then measured on known inputs, and is NaN if there are none.
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
        # Head by head, to save memory.
        for index, (old, new) in enumerate(zip(self.heads.q, queries.rows, strict=True)):
            error = y @ old.T - passed @ new.T
            lost += (error.T @ error / len(y) * self.metric[index // self.heads.group]).sum()
        return lost

    def _mean(self, rows: Tensor) -> Tensor:
        moments = (rows @ self.calibration.moment @ rows.mT).unflatten(0, (len(self.metric), -1)).sum(1)
        return torch.einsum("gij,gji->", self.metric, moments)


def low_rank(cost: QueryCost, rank: int, *, has_offset: bool) -> QueryProjection:
    """Return the queries from ``rank`` channels that cost least.

    Let W be the root of the metric times the query projection, C the moment of the inputs, and U the first
    singular vectors of ``W C^(1/2)``. The best approximation is ``U U^T W``, and its error is the tail of the
    spectrum. With ``has_offset``, the part that all tokens share needs no channel; C is then the covariance,
    and biases are kept.

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
    """Return all queries unchanged, with the inputs as their channels."""
    eye = torch.eye(heads.q.shape[-1] - 1, dtype=heads.q.dtype, device=heads.q.device)
    return QueryProjection(heads.q, eye)


def check_query_rank(q_rank: int | None, *, heads: int, head_dim: int, width: int, reserved: int = 0) -> None:
    """Raise if ``q_rank`` is less than 1, or more than these queries of inputs of this ``width`` can use.

    Raises:
        TypeError: ``q_rank`` is not an int.
        ValueError: ``q_rank`` is out of range; ``reserved`` of its channels serve another purpose.
    """
    if q_rank is None:
        return
    check_count("q_rank", q_rank, least=1 + reserved)
    most = min(heads * head_dim, width) + reserved
    if q_rank > most:
        raise ValueError(f"q_rank: expected at most {most}, the rank of all queries, got {q_rank}")
