"""A backend's forward and backward operators as one differentiable step."""

import torch


class Attention(torch.autograd.Function):
    """The operators ``name_forward`` and ``name_backward`` as one differentiable step, the LSE included."""

    @staticmethod
    def forward(ctx, name, q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed, numbers):
        tensors = (q, k, v, slopes, sinks, starts, ends, cu_q, cu_k, seed)
        out, lse = getattr(torch.ops.attnlib, f"{name}_forward")(*tensors, *numbers)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.name, ctx.numbers = name, numbers
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        with torch.no_grad():
            grads = getattr(torch.ops.attnlib, f"{ctx.name}_backward")(dout, dlse, out, lse, *tensors, *ctx.numbers)
        if torch.is_grad_enabled():  # create_graph=True
            grads = _Refusal.apply(*grads, dout, dlse, *tensors[:5])
        dq, dk, dv, dslopes, dsinks = grads
        slopes, sinks = tensors[3:5]
        return (
            None,
            dq,
            dk,
            dv,
            None if slopes is None else dslopes,
            None if sinks is None else dsinks,
            *(None,) * 6,
        )


class _Refusal(torch.autograd.Function):
    """Hands gradients on, and raises when they are differentiated again.

    torch's own once_differentiable says nothing when the output's gradient is a constant.
    """

    @staticmethod
    def forward(ctx, dq, dk, dv, dslopes, dsinks, *depends_on):
        return tuple(x.view_as(x) for x in (dq, dk, dv, dslopes, dsinks))

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("attention has no second derivative; call backward() without create_graph=True")
