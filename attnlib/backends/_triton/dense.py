"""Dense and packed attention by Triton kernels: one FlashAttention core, forward and backward."""

import torch
from torch import Tensor

from ...call import Call
from ...prepared import Run
from ..autograd import Operators
from ..flops import backward_flops, forward_flops
from ..operators import (
    BACKWARD,
    FORWARD,
    Arguments,
    fake_backward,
    fake_forward,
    flat,
    outputs,
    sinks_grad,
    slopes_grad,
)
from ..registration import register
from . import plans
from .launch import on_device


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    return OPERATORS(flat(call), grad=call.spec.grad)


def prepare(call: Call) -> Run | None:
    """What runs a call without optional tensors again, on tensors of the same layouts."""
    if call.spec.strided or call.spec.dtype == torch.float32:  # whose products torch's settings decide
        return None
    arguments = flat(call)
    launch = plans.forward(plans.key_of(arguments))
    (b, s, h, _), e = call.q.shape, call.v.shape[-1]

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if q.device.index != torch._C._cuda_getDevice() or (launch.tma and not plans.aligned(q, k, v)):
            return _forward(*arguments._replace(q=q, k=k, v=v))
        out, lse = q.new_empty((b, s, h, e)), q.new_empty((b, h, s), dtype=torch.float32)
        launch(q, k, v, out, lse, *NO_OPTIONS)
        return out, lse

    return run


def _forward(*arguments):
    a = _readable(Arguments(*arguments))
    out, lse = outputs(a.q, a.v)
    launch = plans.forward(plans.key_of(a))
    with on_device(a.q):
        launch(a.q, a.k, a.v, out, lse, *_options(a))
    return out, lse


def _backward(dout, dlse, out, lse, *arguments):
    a, lse = _readable(Arguments(*arguments)), lse.contiguous()
    if not dout.is_contiguous() or dout.data_ptr() & 15:
        dout = dout.clone(memory_format=torch.contiguous_format)
    plan = plans.backward(plans.key_of(a), plans.layout(dout), plans.layout(dlse))
    dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    slopes, sinks, *others = _options(a)
    shares = None if slopes is None else lse.new_zeros(plan.shares)  # some programs write none
    with on_device(a.q):
        plan.prepare(out, dout, lse, dlse, lse2, delta)
        plan.keys(a.q, a.k, a.v, dout, lse2, delta, dk, dv, slopes, *others)
        plan.queries(a.q, a.k, a.v, dout, lse2, delta, dq, shares, slopes, *others)
    dslopes = lse if slopes is None else _by_sequence(shares, slopes, a.cu_seqlens_q, plan.block)
    return dq, dk, dv, slopes_grad(slopes, dslopes), sinks_grad(sinks, lse, delta)


def _options(a: Arguments) -> tuple[Tensor | None, ...]:
    """The optional tensors in the order of the kernels' parameters."""
    return a.alibi_slopes, a.sinks, a.key_starts, a.key_ends, a.cu_seqlens_q, a.cu_seqlens_k, a.dropout_seed, a.origin


NO_OPTIONS = (None,) * 8


def _readable(a: Arguments) -> Arguments:
    """The arguments with optional tensors as kernels read them, by position alone, and offsets of keys."""
    if all(x is None for x in _options(a)):
        return a
    slopes, sinks, starts, ends, cu_q, cu_k, seed, _ = (x if x is None else x.contiguous() for x in _options(a))
    return a._replace(
        alibi_slopes=slopes,
        sinks=sinks,
        key_starts=starts,
        key_ends=ends,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_q if cu_k is None else cu_k,
        dropout_seed=seed,
    )


def _by_sequence(shares: Tensor, slopes: Tensor, cu_q: Tensor | None, block: int) -> Tensor:
    """What all programs found of the slopes' gradient, added up for each sequence and head, ``[b, h]``."""
    if cu_q is None or slopes.dim() == 1:
        return shares.sum(-1)
    # Packed sequence n owns programs from cu[n] // block + n on. A product with ones has a fixed order of sums. What is
    # not finite is counted apart, since 0 times it is NaN.
    firsts = cu_q // block + torch.arange(len(cu_q), device=cu_q.device, dtype=torch.int32)
    at = torch.arange(shares.shape[-1], device=firsts.device)[:, None]
    owned = (at >= firsts[:-1]) & (at < firsts[1:])
    finite, owned = shares[0].isfinite(), owned.double()
    sums = shares[0].masked_fill(~finite, 0).double() @ owned
    return sums.masked_fill((~finite).double() @ owned > 0, torch.nan).T.to(shares.dtype)


OPERATORS = Operators("triton", _forward, _backward)
_library = register(
    (
        (f"triton_forward{FORWARD}", _forward, fake_forward, forward_flops),
        (f"triton_backward{BACKWARD}", _backward, fake_backward, backward_flops),
    )
)
if _library is not None:
    OPERATORS.register(_library)
