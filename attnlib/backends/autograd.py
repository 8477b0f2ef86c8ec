"""A backend's forward and backward operators as one differentiable call, also where torch maps or traces
them.

Each operator has a gradient of its own, so that exported, traced and mapped calls keep it. Where nobody
follows operators, a call runs what is behind them: torch takes 150 us to differentiate an operator from
Python, 20 us for a Function (one core of an EPYC, 2026-11).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..call.cache import Run
from ..call.call import Call, PieceGradients
from ..call.spec import NO_BACKWARD
from ..internal.watched import are_batched, are_watched, have_tangents, is_forward_mode, is_transforming
from .flops import backward_flops, cached_flops, forward_flops
from .operators import (
    BACKWARD,
    CACHED,
    FORWARD,
    TENSORS,
    Arguments,
    apart,
    fake_attention,
    fake_backward,
    flat,
)
from .registration import Operator, register

Gradients = Callable[..., tuple[Tensor, ...]]  # takes a backward's dout and what follows it
WITH_GRADIENTS = 5  # arguments, q, k, v, slopes and sinks


class Operators:
    """The operators ``name_forward`` and ``name_backward`` of a backend, and what they run."""

    def __init__(self, name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Gradients):
        self.name = name
        self.forward = forward
        self.backward = backward
        self._library = register(
            Operator(
                f"{name}_forward{FORWARD}",
                forward,
                fake_attention,
                forward_flops,
                self.gradients,
                _keep,
                _vmap,
            ),
            Operator(
                f"{name}_backward{BACKWARD}", backward, fake_backward, backward_flops, _no_second, None, _vmap
            ),
        )

    def __call__(self, arguments: Arguments, *, grad: bool) -> tuple[Tensor, Tensor]:
        """Output and LSE; ``grad`` says whether a gradient is asked for.

        Raises:
            NotImplementedError: a tensor carries a forward-mode derivative.
        """
        tensors = (*arguments[:TENSORS], *(arguments.captured or ()))
        if is_forward_mode(*tensors) and have_tangents(*tensors):  # which operators would drop
            raise NotImplementedError(
                "attention has no forward-mode derivative; differentiate in reverse mode"
            )
        if are_watched(arguments.q, arguments.k, arguments.v):
            if (
                arguments.captured and is_transforming()
            ):  # vmap sees what is mapped in no list: q is mapped as they are
                zeros = [torch.zeros_like(x.flatten()[0]) for x in arguments.captured]
                arguments = arguments._replace(q=sum(zeros, arguments.q))
            return self._operator("forward")(*arguments)
        return self.differentiable(arguments) if grad else self.forward(*arguments)

    def differentiable(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Output and LSE with their gradients, around the dispatcher, where nobody follows it."""
        rest = arguments[WITH_GRADIENTS:TENSORS], arguments[TENSORS + 1 :]
        return _Attention.apply(self, rest, *arguments[:WITH_GRADIENTS], *(arguments.captured or ()))

    def repeated(
        self, run: Run, backward: Callable[..., tuple[Tensor, ...] | None], a: Arguments, *, lse: bool
    ) -> Run:
        """What runs a call again on other q, k and v, by ``run``; it has no other tensors, so there are no
        descales.

        ``backward`` takes dout and what was saved, and gives the gradients of these three, or None where it
        cannot. Without ``lse`` the output alone is followed, and no LSE returned.
        """
        again = Again(run, partial(self._repeated_gradients, backward, a[3:]), lse)
        apply = partial(
            super(torch.autograd.Function, _Repeated).apply, again
        )  # transforms, which it asks for, watch
        return lambda q, k, v, descales=None: apply(q, k, v) if lse else (apply(q, k, v), None)

    def gradients(
        self, ctx: FunctionCtx, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each argument of the forward operator, None where there is none to give."""
        out, lse, *tensors = ctx.saved_tensors
        a = Arguments(*tensors[:TENSORS], tensors[TENSORS:] or None, *ctx.numbers)
        dout = torch.zeros_like(out) if dout is None else dout
        run = self._operator("backward") if _is_followed(dout, dlse, out, a.q) else self.backward
        # It gives those of the first arguments, q, k, v, slopes and sinks, and of captured tensors.
        *first, captured = run(dout, dlse, out, lse, *a)
        given = [None if x is None else grad for x, grad in zip(a, first, strict=False)]
        parts = None
        if a.captured is not None:
            pairs = zip(a.captured, apart(captured, a), strict=True)
            parts = [grad if grad is None else grad.to(x.dtype) for x, grad in pairs]
        return *given, *(None,) * (TENSORS - len(given)), parts, *(None,) * (len(a) - TENSORS - 1)

    def of_piece(self, call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
        """The gradients of a piece of a call, whose output and LSE at its queries these are."""
        a = flat(call)
        dq, dk, dv, dslopes, _, captured = self.backward(dout, None, out, lse, *a)
        of_mask = 0 if call.functions is None else len(call.functions.mask_tensors)
        return PieceGradients(dq, dk, dv, dslopes, apart(captured, a)[of_mask:])

    def _repeated_gradients(self, backward, rest, dout, dlse, out, lse, q, k, v):
        dout = torch.zeros_like(out) if dout is None else dout
        if _is_followed(dout, dlse, out, q):
            run = self._operator("backward")
        elif dlse is None and (found := backward(dout, out, lse, q, k, v)) is not None:
            return found
        else:
            run = self.backward
        dq, dk, dv, *_ = run(dout, dlse, out, lse, q, k, v, *rest)
        return dq, dk, dv

    def _operator(self, direction: str) -> Callable:
        return getattr(torch.ops.attnlib, f"{self.name}_{direction}").default


def _is_followed(dout: Tensor, dlse: Tensor | None, out: Tensor, q: Tensor) -> bool:
    """Whether a backward must go through the dispatcher; with create_graph=True it refuses to be
    differentiated.
    """
    return are_watched(dout, out, q) or torch.is_grad_enabled() or are_batched(dout, dlse)


class _Attention(torch.autograd.Function):
    """What the forward operator runs, differentiable without the operator.

    torch looks at every argument of a Function, so that those without a gradient come as one.
    """

    @staticmethod
    def forward(ctx, operators, rest, *given):
        tensors, numbers = rest
        inputs = (*given[:WITH_GRADIENTS], *tensors, list(given[WITH_GRADIENTS:]) or None, *numbers)
        output = operators.forward(*inputs)
        _keep(ctx, inputs, output)
        ctx.operators = operators
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        given = ctx.operators.gradients(ctx, dout, dlse)
        return None, None, *given[:WITH_GRADIENTS], *(given[TENSORS] or ())


class Again(NamedTuple):
    """How a call runs again: its forward, its gradients, and whether its LSE is asked for."""

    run: Run
    gradients: Gradients
    lse: bool


class _Repeated(torch.autograd.Function):
    """A call that came before. torch takes its time for each argument, each result and all that is saved."""

    @staticmethod
    def forward(ctx, again: Again, q, k, v):
        out, lse = again.run(q, k, v)
        ctx.save_for_backward(
            out, lse, q, k, v
        )  # as the first call has, which a checkpoint may hold it against
        ctx.gradients = again.gradients
        if not again.lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return None, *ctx.gradients(dout, dlse, *ctx.saved_tensors)


def register_cached(name: str, run: Callable[..., tuple[Tensor, Tensor]]) -> torch.library.Library | None:
    """Make ``name_cached`` known, whose backward raises, where torch would drop it with a warning; keep the
    result.
    """
    return register(Operator(f"{name}_cached{CACHED}", run, fake_attention, cached_flops, _no_backward))


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:TENSORS], *(inputs[TENSORS] or ()))
    ctx.numbers = inputs[TENSORS + 1 :]
    ctx.set_materialize_grads(False)


def _no_backward(ctx, *grads):
    raise RuntimeError(NO_BACKWARD)


def _no_second(ctx, *grads):
    raise RuntimeError("attention has no second derivative; call backward() without create_graph=True")


def _vmap(operator: Callable, info, in_dims: tuple, *inputs) -> tuple[tuple[Tensor, ...], tuple]:
    """An operator under vmap.

    Where all tensors are mapped, and there are no optional ones, what is mapped joins the batch; else it is a
    loop.
    """
    n, pairs = info.batch_size, list(zip(inputs, in_dims, strict=True))
    leading = len(inputs) - len(Arguments._fields) + 3  # before q, k and v, a backward has four others
    alike = all((x is None) == (dim is None) for x, dim in pairs[:leading])
    if alike and all(x is None for x in inputs[leading : leading + TENSORS - 2]):
        joined = [x if x is None else x.movedim(dim, 0).flatten(0, 1) for x, dim in pairs[:leading]]
        results = [x.unflatten(0, (n, x.shape[0] // n)) for x in operator(*joined, *inputs[leading:])]
    else:
        each = [operator(*(_selected(x, dim, i) for x, dim in pairs)) for i in range(n)]
        results = [torch.stack(x) for x in zip(*each, strict=True)]
    return tuple(results), (0,) * len(results)


def _selected(x: object, dim: object, i: int) -> object:
    """What of an argument the ``i``-th call takes."""
    if isinstance(x, list):
        return [_selected(*each, i) for each in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, i)
