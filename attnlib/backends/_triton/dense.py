"""Dense and packed attention by Triton kernels: one FlashAttention core, forward and backward."""

import torch
from torch import Tensor

from ...call import Call
from ...prepared import Run
from ..autograd import Operators
from ..operators import Arguments, flat, option_grads, outputs, readable
from . import plans


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    return OPERATORS(flat(call), grad=call.spec.grad)


def prepare(call: Call) -> Run | None:
    """What runs a call without optional tensors again, on tensors of the same layouts."""
    if call.spec.strided or call.spec.dtype == torch.float32:  # whose products torch's settings decide
        return None
    given = flat(call)
    a = given._replace(q=None, k=None, v=None)  # what is prepared keeps no tensor of a call
    (b, s, h, _), e = call.q.shape, call.v.shape[-1]
    key = plans.key_of(given, given.q, given.k, given.v)
    launch = plans.forward(key)
    launch_on = launch.bound(a._asdict(), "q", "k", "v", "out", "lse")

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if launch.blocks and not plans.aligned(q, k, v):
            return _forward(*a._replace(q=q, k=k, v=v))
        out, lse = q.new_empty((b, s, h, e)), q.new_empty((b, h, s), dtype=torch.float32)
        launch_on(q, k, v, out, lse)
        return out, lse

    def backward(dout, dlse, out, lse, *arguments):
        x = Arguments(*arguments)
        known = key if plans.aligned(x.q, x.k, x.v) else plans.key_of(x, x.q, x.k, x.v)
        dq, dk, dv, _, _ = _gradients(known, x, dout, dlse, out, lse)
        return dq, dk, dv

    return OPERATORS.repeated(run, backward, a) if call.spec.grad else run


def _forward(*arguments):
    a = readable(Arguments(*arguments))
    out, lse = outputs(a.q, a.v)
    plans.forward(plans.key_of(a, a.q, a.k, a.v)).on(a._asdict() | {"out": out, "lse": lse})
    return out, lse


def _backward(dout, dlse, out, lse, *arguments):
    a, lse = readable(Arguments(*arguments)), lse.contiguous()
    dq, dk, dv, dslopes, delta = _gradients(plans.key_of(a, a.q, a.k, a.v), a, dout, dlse, out, lse)
    return dq, dk, dv, *option_grads(a, dslopes, lse, delta)


def _gradients(key: plans.Key, a: Arguments, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> tuple:
    """The gradients of q, k and v, that of the slopes of each sequence or None, and delta."""
    if not dout.is_contiguous() or dout.data_ptr() & 15:
        dout = dout.clone(memory_format=torch.contiguous_format)
    plan = plans.backward(key, plans.layout(dout), plans.layout(dlse))
    dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
    dslopes = None if plan.shares is None else lse.new_zeros((*lse.shape[:-1], plan.shares))  # some programs write none
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    tensors = a._asdict() | {
        "out": out, "lse": lse, "dout": dout, "dlse": dlse, "dslopes": dslopes, "lse2": lse2, "delta": delta,
        "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
    for launch in (plan.prepare, plan.keys, plan.queries):
        launch.on(tensors)
    if dslopes is not None:
        cu = a.cu_seqlens_q
        dslopes = dslopes.sum(-1) if cu is None else _by_sequence(dslopes, cu, plan.queries.arguments["BLOCK_M"])
    return dq, dk, dv, dslopes, delta


def _by_sequence(shares: Tensor, cu_q: Tensor, block: int) -> Tensor:
    """What programs ``[h, blocks]`` found of the slopes' gradient, added up for each packed sequence, ``[b, h]``."""
    # Sequence n owns programs from cu[n] // block + n on. A product with ones has a fixed order of sums. What is not
    # finite is counted apart, since 0 times it is NaN.
    firsts = cu_q // block + torch.arange(len(cu_q), device=cu_q.device, dtype=torch.int32)
    at = torch.arange(shares.shape[-1], device=firsts.device)[:, None]
    owned = ((at >= firsts[:-1]) & (at < firsts[1:])).double()
    finite = shares.isfinite()
    sums = shares.masked_fill(~finite, 0).double() @ owned
    return sums.masked_fill((~finite).double() @ owned > 0, torch.nan).T.to(shares.dtype)


OPERATORS = Operators("triton", _forward, _backward)
