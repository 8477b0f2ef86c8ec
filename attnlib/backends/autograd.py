"""Differentiable forward and backward operators of a backend, which also work under vmap and tracing.

Each operator registers its own gradient, so exported, traced and vmapped calls keep it. If no mode, transform
or profiler observes operators, a call bypasses torch's dispatcher to save time: torch takes 150 us to
differentiate an operator from Python, but 20 us for an autograd.Function (one core of an EPYC, 2026-11).
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
from ..fp8 import Fp8Inputs, per_token
from ..internal.watched import are_batched, are_watched, have_tangents, is_forward_mode, is_transforming
from .flops import backward_flops, cached_flops, forward_flops, statistic_flops
from .operators import (
    BACKWARD,
    CACHED,
    FORWARD,
    STATISTIC,
    TENSORS,
    Arguments,
    apart,
    fake_attention,
    fake_backward,
    fake_statistic,
    flat,
)
from .registration import Operator, register

Gradients = Callable[..., tuple[Tensor, ...]]  # takes dout and the other arguments of a backward
WITH_GRADIENTS = 5  # only the first 5 arguments have gradients: q, k, v, ALiBi slopes and sinks


class Operators:
    """The operators ``{name}_forward`` and ``{name}_backward`` of a backend, and the functions they run.

    ``quantize`` rounds the inputs of a call to e4m3.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Gradients,
        quantize: Callable[[Arguments], Fp8Inputs],
    ):
        self.name = name
        self.forward = partial(_run, forward, quantize)
        self.backward = partial(_run_backward, backward, quantize)
        self._library = register(
            Operator(
                f"{name}_forward{FORWARD}",
                self.forward,
                fake_attention,
                forward_flops,
                self.gradients,
                _keep,
                _vmap,
            ),
            Operator(
                f"{name}_backward{BACKWARD}",
                self.backward,
                fake_backward,
                backward_flops,
                _no_second_derivative,
                None,
                _vmap,
            ),
        )

    def __call__(self, arguments: Arguments, *, grad: bool) -> tuple[Tensor, Tensor]:
        """Return the output and LSE, differentiable if ``grad`` is set.

        Raises:
            NotImplementedError: a tensor carries a forward-mode derivative.
        """
        tensors = (*arguments[:TENSORS], *(arguments.captured or ()))
        if is_forward_mode(*tensors) and have_tangents(*tensors):  # operators would drop the tangents
            raise NotImplementedError(
                "attention has no forward-mode derivative; differentiate in reverse mode"
            )
        if are_watched(arguments.q, arguments.k, arguments.v):
            # vmap does not see the captured tensors, which are in a list. Adding a zero made from each of
            # them makes q batched if one of them is.
            if arguments.captured and is_transforming():
                zeros = [torch.zeros_like(x.flatten()[0]) for x in arguments.captured]
                arguments = arguments._replace(q=sum(zeros, arguments.q))
            return self._operator("forward")(*arguments)
        return self.differentiable(arguments) if grad else self.forward(*arguments)

    def differentiable(self, arguments: Arguments) -> tuple[Tensor, Tensor]:
        """Return the output and LSE, differentiable, without going through torch's dispatcher.

        Valid only if no mode, transform or profiler observes operators.
        """
        rest = arguments[WITH_GRADIENTS:TENSORS], arguments[TENSORS + 1 :]
        return _Attention.apply(self, rest, *arguments[:WITH_GRADIENTS], *(arguments.captured or ()))

    def replay(
        self, run: Run, backward: Callable[..., tuple[Tensor, ...] | None], a: Arguments, *, lse: bool
    ) -> Run:
        """Return a differentiable function that repeats a call on new q, k and v through ``run``.

        The call has no other tensors, and hence no descales. ``backward`` takes dout, the output, the LSE, q,
        k and v, and returns dq, dk and dv, or None if it cannot run. Unless ``lse`` is set, the function
        returns None for the LSE.
        """
        cached = CachedCall(run, partial(self._replay_gradients, backward, a[3:]), lse)
        # Function.apply would first check for functorch transforms, under which no call is cached.
        apply = partial(super(torch.autograd.Function, _Replay).apply, cached)
        return lambda q, k, v, descales=None: apply(q, k, v) if lse else (apply(q, k, v), None)

    def gradients(
        self, ctx: FunctionCtx, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient of each argument of the forward operator; None if an argument has none."""
        out, lse, *tensors = ctx.saved_tensors
        a = Arguments(*tensors[:TENSORS], tensors[TENSORS:] or None, *ctx.numbers)
        dout = torch.zeros_like(out) if dout is None else dout
        run = self._operator("backward") if _is_followed(dout, dlse, out, a.q) else self.backward
        # The results are dq, dk, dv, dslopes, dsinks, and the gradients of all captured tensors in one
        # tensor.
        *first, captured = run(dout, dlse, out, lse, *a)
        given = [None if x is None else grad for x, grad in zip(a, first, strict=False)]
        parts = None
        if a.captured is not None:
            pairs = zip(a.captured, apart(captured, a), strict=True)
            parts = [grad if grad is None else grad.to(x.dtype) for x, grad in pairs]
        return *given, *(None,) * (TENSORS - len(given)), parts, *(None,) * (len(a) - TENSORS - 1)

    def chunk_gradients(self, call: Call, dout: Tensor, out: Tensor, lse: Tensor) -> PieceGradients:
        """Return what ``call``, a chunk of a larger call, contributes to the gradients of that larger call.

        ``dout``, ``out`` and ``lse`` belong to the larger call, and have only the queries of the chunk.
        """
        a = flat(call)
        dq, dk, dv, dslopes, _, captured = self.backward(dout, None, out, lse, *a)
        mask_count = 0 if call.functions is None else len(call.functions.mask_tensors)
        return PieceGradients(dq, dk, dv, dslopes, apart(captured, a)[mask_count:])

    def _replay_gradients(self, backward, rest, dout, dlse, out, lse, q, k, v):
        dout = torch.zeros_like(out) if dout is None else dout
        if _is_followed(dout, dlse, out, q):
            run = self._operator("backward")
        elif dlse is None and (grads := backward(dout, out, lse, q, k, v)) is not None:
            return grads
        else:
            run = self.backward
        return run(dout, dlse, out, lse, q, k, v, *rest)[:3]

    def _operator(self, direction: str) -> Callable:
        return getattr(torch.ops.attnlib, f"{self.name}_{direction}").default


def _run(
    forward: Callable[..., tuple[Tensor, Tensor]], quantize: Callable[[Arguments], Fp8Inputs], *arguments
) -> tuple[Tensor, Tensor]:
    """Run a forward, on q, k and v rounded to e4m3 if the call asks for it."""
    a = Arguments(*arguments)
    if not a.to_fp8:
        return forward(*arguments)
    out, lse = forward(*a._replace(to_fp8=False, **quantize(a)._asdict()))
    return out.to(a.q.dtype), lse


def _run_backward(
    backward: Gradients, quantize: Callable[[Arguments], Fp8Inputs], dout, dlse, out, lse, *arguments
) -> tuple[Tensor, ...]:
    """Run a backward; if the forward rounded q, k and v to e4m3, on these numbers in 16 bits.

    Rounding is treated as having the derivative 1 (a straight-through estimator).
    """
    a = Arguments(*arguments)
    if a.to_fp8:
        x, offsets = quantize(a), (a.cu_seqlens_q, a.cu_seqlens_k, a.cu_seqlens_k)
        wide = [
            (x8.float() * per_token(scale, x8.shape[-3], cu)).to(a.q.dtype)
            for x8, scale, cu in zip(x[:3], x.descales, offsets, strict=True)
        ]
        a = a._replace(to_fp8=False, q=wide[0], k=wide[1], v=wide[2])
    return backward(dout, dlse, out, lse, *a)


def _is_followed(dout: Tensor, dlse: Tensor | None, out: Tensor, q: Tensor) -> bool:
    """True if a backward must go through torch's dispatcher, as an operator.

    With ``create_graph=True`` it must: the operator raises an error if its result is differentiated again.
    """
    return are_watched(dout, out, q) or torch.is_grad_enabled() or are_batched(dout, dlse)


class _Attention(torch.autograd.Function):
    """Attention as an autograd.Function, which is faster to differentiate than an operator.

    torch inspects every argument of a Function, so the arguments that have no gradient are packed into one.
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


class CachedCall(NamedTuple):
    """A cached call: its forward, its gradients, and whether it returns an LSE."""

    run: Run
    gradients: Gradients
    lse: bool


class _Replay(torch.autograd.Function):
    """A cached call as an autograd.Function, with few arguments because torch takes time for each."""

    @staticmethod
    def forward(ctx, cached: CachedCall, q, k, v):
        out, lse = cached.run(q, k, v)
        # Save the same tensors as the first call does, since torch's checkpointing may compare the two.
        ctx.save_for_backward(out, lse, q, k, v)
        ctx.gradients = cached.gradients
        if not cached.lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return None, *ctx.gradients(dout, dlse, *ctx.saved_tensors)


def register_cached(name: str, run: Callable[..., tuple[Tensor, Tensor]]) -> torch.library.Library | None:
    """Register ``{name}_cached``, an operator without a gradient; keep the library that is returned.

    Its registered backward only raises an error. Without it, torch would drop the gradient with a warning.
    """
    return register(Operator(f"{name}_cached{CACHED}", run, fake_attention, cached_flops, _no_backward))


def register_statistic(name: str, run: Callable[..., Tensor]) -> torch.library.Library | None:
    """Register ``{name}_statistic``, an operator without a gradient; keep the library that is returned."""
    operator = Operator(
        f"{name}_statistic{STATISTIC}", run, fake_statistic, statistic_flops, vmap=_one_by_one
    )
    return register(operator)


def _keep(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:TENSORS], *(inputs[TENSORS] or ()))
    ctx.numbers = inputs[TENSORS + 1 :]
    ctx.set_materialize_grads(False)


def _no_backward(ctx, *grads):
    raise RuntimeError(NO_BACKWARD)


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("attention has no second derivative; call backward() without create_graph=True")


def _vmap(operator: Callable, info, in_dims: tuple, *inputs) -> tuple[tuple[Tensor, ...], tuple]:
    """Run an operator under vmap: once if possible, otherwise once per index of the mapped dimension.

    One run suffices if all tensors are mapped and there are no optional tensors. The mapped dimension is then
    merged into the batch.
    """
    n, pairs = info.batch_size, list(zip(inputs, in_dims, strict=True))
    leading = len(inputs) - len(Arguments._fields) + 3  # up to v; a backward has four more before q
    all_mapped = all((x is None) == (dim is None) for x, dim in pairs[:leading])
    if all_mapped and all(x is None for x in inputs[leading : leading + TENSORS - 2]):
        joined = [x if x is None else x.movedim(dim, 0).flatten(0, 1) for x, dim in pairs[:leading]]
        results = [x.unflatten(0, (n, x.shape[0] // n)) for x in operator(*joined, *inputs[leading:])]
    else:
        each = [operator(*(_sliced(x, dim, i) for x, dim in pairs)) for i in range(n)]
        results = [torch.stack(x) for x in zip(*each, strict=True)]
    return tuple(results), (0,) * len(results)


def _one_by_one(operator: Callable, info, in_dims: tuple, *inputs) -> tuple[Tensor, int]:
    """Run an operator with one result under vmap, once per index of the mapped dimension."""
    pairs = list(zip(inputs, in_dims, strict=True))
    each = [operator(*(_sliced(x, dim, i) for x, dim in pairs)) for i in range(info.batch_size)]
    return torch.stack(each), 0


def _sliced(x: object, dim: object, i: int) -> object:
    """Return the part of an argument that belongs to index ``i`` of the dimension mapped by vmap."""
    if isinstance(x, list):
        return [_sliced(*each, i) for each in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, i)
