"""The operators of the torch backend: forward, backward, cached attention and cache writes.

Lengths, offsets and page tables are copied to the host, since Python code loops over them.
"""

import torch
from torch import Tensor

from ..autograd import Operators, register_cached, register_statistic
from ..operators import (
    Arguments,
    CachedArguments,
    count_learnt,
    fake_write,
    option_grads,
    outputs,
    quantize,
    statistic_of,
)
from ..registration import Operator, register
from . import fused, pages, statistics, tiles
from .batches import Batch, batches, cached_batches


def _forward(*arguments):
    a = Arguments(*arguments)
    return _solved(a.q, a.v, list(batches(a)))


def cached(*arguments):
    """Return attention over a cache, and its LSE."""
    a = CachedArguments(*arguments)
    return _solved(a.q, a.value_plane, list(cached_batches(a)))


def _solved(q: Tensor, v: Tensor, every: list[Batch]) -> tuple[Tensor, Tensor]:
    """Return the output and LSE of a call, given its batches."""
    if torch.is_autocast_enabled(q.device.type):  # without this, autocast would sum in 16 bits
        with torch.autocast(q.device.type, enabled=False):
            return _solved(q, v, every)
    if every and not every[0].index:
        return _attend(every[0])
    out, lse = _nothing(q, v)
    for batch in every:
        out[batch.index], own_lse = _attend(batch)
        lse.mT[batch.index] = own_lse.mT
    return out, lse


def _attend(batch: Batch) -> tuple[Tensor, Tensor]:
    causal = fused.causality(batch)
    return tiles.forward(batch) if causal is None else fused.forward(batch, causal)


def statistic(*arguments):
    """Return a statistic of a call on tensors."""
    a, wanted = statistic_of(arguments)
    if torch.is_autocast_enabled(a.q.device.type):  # as in attention: autocast would sum in 16 bits
        with torch.autocast(a.q.device.type, enabled=False):
            return statistics.statistic(a, wanted)
    return statistics.statistic(a, wanted)


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and LSE of queries that belong to no sequence: zeros and -inf."""
    out, lse = outputs(q, v)
    return out.zero_(), lse.fill_(-torch.inf)


def _backward(dout, dlse, out, lse, *arguments):
    if torch.is_autocast_enabled(dout.device.type):  # as in the forward: autocast would sum in 16 bits
        with torch.autocast(dout.device.type, enabled=False):
            return _backward(dout, dlse, out, lse, *arguments)
    a, dout, delta = Arguments(*arguments), dout.contiguous(), None  # autograd may pass an expanded dout
    plan = [(batch, fused.causality(batch) if dlse is None else None) for batch in batches(a)]
    if not plan or any(causal is None for _, causal in plan):  # only fused attention needs no delta
        delta = (out.to(lse.dtype) * dout).sum(-1).mT - (0 if dlse is None else dlse)

    dcaptured = lse.new_zeros(count_learnt(a))

    def differentiate(batch: Batch, causal: bool | None) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
        """Return the gradients of the queries, keys, values and ALiBi slopes of a batch.

        The gradient of the slopes is 0 after fused attention, which never runs with slopes, and if no slope
        needs one.
        """
        if causal is None:
            given = batch.select(dout), batch.select_lse(lse), batch.select_lse(delta)
            return tiles.backward(batch, *given, dcaptured, learns=a.learns)
        return *fused.backward(
            batch, causal, batch.select(dout), batch.select(out), batch.select_lse(lse)
        ), 0.0

    if plan and not plan[0][0].index:
        dq, dk, dv, dslopes = differentiate(*plan[0])
        return dq, dk, dv, *option_grads(a, dslopes, lse, delta), dcaptured
    dq, dk, dv = (x.new_zeros(x.shape) for x in (a.q, a.k, a.v))
    dslopes = lse.new_zeros(sum(batch.q.shape[0] for batch, _ in plan), a.q.shape[-2])
    for batch, causal in plan:
        keys, sequences = batch.keys, slice(batch.sequence, batch.sequence + batch.q.shape[0])
        own_dk, own_dv = (x[keys.index][:, keys.start : keys.stop] for x in (dk, dv))
        dq[batch.index], own_dk[:], own_dv[:], dslopes[sequences] = differentiate(batch, causal)
    return dq, dk, dv, *option_grads(a, dslopes, lse, delta), dcaptured


def put_tokens(k, v, new_k, new_v, slots):
    """Write new tokens into the slots of a cache; slot -1 is skipped."""
    slots = slots.flatten()
    valid = None if slots.numel() == 0 or int(slots.min()) >= 0 else slots >= 0
    for plane, new in ((k, new_k), (v, new_v)):
        if plane is not None:
            pages.store(plane, new, slots, valid)


WRITE = "torch_write(Tensor(a!) k, Tensor(b!)? v, Tensor new_k, Tensor? new_v, Tensor slots) -> ()"
OPERATORS = Operators("torch", _forward, _backward, quantize)
_libraries = (
    register_cached("torch", cached),
    register_statistic("torch", statistic),
    register(Operator(WRITE, put_tokens, fake_write)),
)
