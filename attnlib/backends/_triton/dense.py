"""Dense and packed attention by Triton kernels: one FlashAttention core, forward and backward."""

import torch
from torch import Tensor

from ...call import Call
from ...fp8 import Descales
from ...prepared import Run
from ..autograd import Operators
from ..operators import Arguments, flat, option_grads, outputs, readable, result_dtype
from . import plans, variants


class Dense:
    """Attention without a cache, as operators of this name; ``hopper`` says whether Hopper's own kernels may run."""

    def __init__(self, name: str, *, hopper: bool):
        self.hopper = hopper
        self.operators = Operators(name, self._forward, self._backward)

    def attention(self, call: Call) -> tuple[Tensor, Tensor]:
        """Dense or packed attention and its LSE."""
        return self.operators(flat(call), grad=call.spec.grad)

    def variant(self, call: Call) -> str:
        """Which kernels run a call."""
        a = flat(call)
        forward = variants.forward(self._key(a)).variant
        if not call.spec.grad:
            return forward
        dout = plans.contiguous((*a.q.shape[:-1], a.v.shape[-1]), a.q.dtype)
        backward = variants.backward(variants.in_order(self._key(a)), dout, None).variant
        return forward if forward == backward else f"{forward} forward, {backward} backward"

    def prepare(self, call: Call) -> Run | None:
        """What runs a call again, on tensors of the same layouts, without optional ones but descales."""
        if call.spec.strided or call.spec.dtype == torch.float32:  # whose products torch's settings decide
            return None
        given = flat(call)
        named = () if call.descales is None else Descales._fields
        a = given._replace(q=None, k=None, v=None, **dict.fromkeys(named))  # what is prepared keeps no tensor of a call
        (b, s, h, _), e, device = call.q.shape, call.v.shape[-1], call.q.device
        key = self._key(given)
        plan = variants.forward(key)
        launch = plan.launch.bound(a._asdict(), "q", "k", "v", "out", "lse", "counter", *named)
        dtype = result_dtype(call.q.dtype)

        def run(q: Tensor, k: Tensor, v: Tensor, descales: Descales | None = None) -> tuple[Tensor, Tensor]:
            if plan.launch.blocks and not plans.aligned(q, k, v):
                return self._forward(*a._replace(q=q, k=k, v=v, **({} if descales is None else descales._asdict())))
            out, lse = q.new_empty((b, s, h, e), dtype=dtype), q.new_empty((b, h, s), dtype=torch.float32)
            launch(q, k, v, out, lse, plan.counter(device), *(descales or ()))
            return out, lse

        def backward(dout, dlse, out, lse, *arguments):
            x = Arguments(*arguments)
            known = key if plans.aligned(x.q, x.k, x.v) else self._key(x)
            dq, dk, dv, _, _ = self._gradients(known, x, dout, dlse, out, lse)
            return dq, dk, dv

        return self.operators.repeated(run, backward, a) if call.spec.grad else run

    def _key(self, a: Arguments) -> plans.Key:
        return plans.key_of(a, a.q, a.k, a.v)._replace(hopper=self.hopper)

    def _forward(self, *arguments):
        a = readable(Arguments(*arguments))
        out, lse = outputs(a.q, a.v)
        plan = variants.forward(self._key(a))
        plan.launch.on(a._asdict() | {"out": out, "lse": lse, "counter": plan.counter(a.q.device)})
        return out, lse

    def _backward(self, dout, dlse, out, lse, *arguments):
        a, lse = readable(Arguments(*arguments)), lse.contiguous()
        dq, dk, dv, dslopes, delta = self._gradients(self._key(a), a, dout, dlse, out, lse)
        return dq, dk, dv, *option_grads(a, dslopes, lse, delta)

    def _gradients(
        self, key: plans.Key, a: Arguments, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple:
        """The gradients of q, k and v, that of the slopes of each sequence or None, and delta."""
        if not dout.is_contiguous() or dout.data_ptr() & 15:
            dout = dout.clone(memory_format=torch.contiguous_format)
        plan = variants.backward(variants.in_order(key), plans.layout(dout), plans.layout(dlse))
        dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
        # Some programs write none.
        dslopes = None if plan.shares is None else lse.new_zeros((*lse.shape[:-1], plan.shares))
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        tensors = a._asdict() | {
            "out": out, "lse": lse, "dout": dout, "dlse": dlse, "dslopes": dslopes, "lse2": lse2, "delta": delta,
            "dq": dq, "dk": dk, "dv": dv, "dq_sums": lse.new_zeros(plan.sums) if plan.sums else None,
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
