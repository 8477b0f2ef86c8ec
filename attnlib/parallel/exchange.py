"""Communication between ranks; gradients do not flow through it."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather: return the tensors x of all ranks in a group, stacked as ``[ranks, ...]``."""
    out = x.new_empty((group.size(), *x.shape))
    _all_gather(out.flatten(0, 1), x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter: sum x ``[ranks, ...]`` over all ranks, and return this rank's part of the sum."""
    own = x.new_empty(x.shape[1:])
    _reduce_scatter(own, x.contiguous().flatten(0, 1), group=group)
    return own


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: send part ``r`` of x ``[ranks, ...]`` to rank ``r``, and return the parts received."""
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class Passing:
    """A transfer in progress from every rank of a ring to the next one.

    Ranks can compute until they call :meth:`wait`. ``into`` has the tensors to receive into, if they exist.
    """

    def __init__(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup, into: Sequence[Tensor] | None = None
    ):
        ranks, rank, self._group = group.size(), group.rank(), group
        self._received = self._sent = [x.contiguous() for x in tensors]
        self._works: list[dist.Work] = []
        if ranks > 1:
            self._received = [torch.empty_like(x) for x in self._sent] if into is None else into
            to, source = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
            sends = [dist.P2POp(dist.isend, x, to, group) for x in self._sent]
            receives = [dist.P2POp(dist.irecv, x, source, group) for x in self._received]
            self._works = dist.batch_isend_irecv([*sends, *receives])

    def wait(self) -> Sequence[Tensor]:
        """Wait until the tensors of the previous rank have arrived, and return them."""
        for work in self._works:
            work.wait()
        return self._received

    def onwards(self, stream: torch.cuda.Stream) -> "Passing":
        """Return the next transfer, which passes on the tensors of this one as soon as they have arrived.

        ``stream`` waits for them; the current stream does not. The transfer also waits for the work queued on
        the current stream so far, so it can reuse memory that the current stream has freed.
        """
        received = [torch.empty_like(x) for x in self._received]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            return Passing(self.wait(), self._group, received)


def passed_on(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Pass tensors around a ring; yield each rank's number and its tensors once, starting with this rank.

    While the caller uses the tensors of one rank, the tensors of the next rank are already on their way. On
    GPUs, the tensors of the rank after it are too: a transfer that starts together with a computation often
    finds no free processor until that computation ends. Started a step earlier, it still has the whole next
    computation to finish.
    """
    ranks, coming = group.size(), deque[Passing]()
    ahead = torch.cuda.Stream(tensors[0].device) if tensors[0].is_cuda else None
    for step in range(ranks):
        rest = ranks - 1 - step  # ranks whose tensors have not arrived yet
        if rest and not coming:
            coming.append(Passing(tensors, group))
        if rest > 1 and ahead is not None:
            coming.append(coming[-1].onwards(ahead))
        yield (group.rank() - step) % ranks, tensors
        if rest:
            tensors = coming.popleft().wait()
