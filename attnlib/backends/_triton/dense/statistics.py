"""Largest scores and probabilities of dense and packed calls in Triton: the torch operator."""

from torch import Tensor

from ....call.call import Call
from ....call.statistic import Statistic
from ...autograd import register_statistic


class Statistics:
    """The operator that computes quantities from the scores of a call, registered under ``name``."""

    def __init__(self, name: str):
        self._library = register_statistic(name, self._run)

    def statistic(self, call: Call, wanted: Statistic) -> Tensor:
        """Return a statistic of a dense or packed call."""
        raise NotImplementedError

    def _run(self, *arguments):
        raise NotImplementedError
