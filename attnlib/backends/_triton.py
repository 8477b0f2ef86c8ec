"""The Triton backend: one FlashAttention core for dense and packed calls on a GPU, forward and backward."""

import torch
from torch import Tensor

from ..kernels.launch import WIDEST, WIDEST_BACKWARD, WIDEST_VALUE
from ..repeats import Run
from ..spec import AttentionSpec
from ..terms import Terms
from . import _plans
from ._autograd import Operators
from ._flops import backward_flops, forward_flops
from ._launch import against_interpreter, on_device
from ._schema import BACKWARD, FORWARD, fake_backward, outputs, register, sinks_grad, slopes_grad


def unsupported(spec: AttentionSpec) -> list[str]:
    """Why this backend cannot run ``spec``."""
    reasons = [] if spec.device == "cuda" else against_interpreter(spec.dtype, spec.device)
    if spec.device == "cuda" and spec.arch < 80:
        reasons.append(f"needs sm_80 or newer, got sm_{spec.arch}")
    if spec.dtype == torch.float64:
        reasons.append("computes in fp32, got fp64")
    if spec.kind == "cached" and spec.grad:
        return [*reasons, "cached attention has no backward; wrap the call in torch.no_grad()"]
    if spec.device == "cuda" and spec.arch < 89 and spec.layout and spec.layout.store == torch.float8_e4m3fn:
        reasons.append(f"reads fp8 caches from sm_89 on, got sm_{spec.arch}; store int8")
    widest = WIDEST_BACKWARD if spec.grad else WIDEST
    if spec.head_dim > widest or spec.value_dim > widest:
        what = "a backward" if spec.grad else "tiles"
        reasons.append(f"has {what} for heads of up to {widest}, got {max(spec.head_dim, spec.value_dim)}")
    elif spec.value_dim > WIDEST_VALUE:
        reasons.append(f"has tiles for values of up to {WIDEST_VALUE} channels, got {spec.value_dim}")
    return reasons


def slow(spec: AttentionSpec) -> list[str]:
    """Why this backend would copy K or V."""
    return [f"{name}: the last dimension is not contiguous, so it is copied once" for name in spec.strided]


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> tuple[Tensor, Tensor]:
    """Dense or packed attention and its LSE."""
    if spec.strided:
        q, k, v = (x.contiguous() if name in spec.strided else x for name, x in (("q", q), ("k", k), ("v", v)))
    return OPERATORS(q, k, v, *terms[2:9], *_numbers(spec, terms), grad=spec.grad)


def repeated(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, terms: Terms) -> Run | None:
    """What runs a call without tensor terms again, on tensors of the same layouts."""
    if spec.strided or spec.dtype == torch.float32:  # whose products torch's settings decide
        return None
    numbers = _numbers(spec, terms)
    extras = (*_plans.NO_TERMS, *numbers)
    launch = _plans.forward(_plans.call(q, k, v, _plans.NO_TERMS, numbers))
    (b, s, h, _), e = q.shape, v.shape[-1]

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if q.device.index != torch._C._cuda_getDevice() or (launch.tma and not _plans.aligned(q, k, v)):
            return _forward(q, k, v, *extras)
        out, lse = q.new_empty((b, s, h, e)), q.new_empty((b, h, s), dtype=torch.float32)
        launch(q, k, v, out, lse, *_plans.NO_TERMS)
        return out, lse

    return run


def _numbers(spec: AttentionSpec, terms: Terms) -> tuple:
    """Those of the operators' schema."""
    mask = spec.mask
    return (mask.left, mask.right, mask.prefix, terms.scale, terms.softcap, *terms[9:])


def _forward(q, k, v, *extras):
    terms = extras[:7]
    if terms != _plans.NO_TERMS:
        terms = _positional(terms)
    out, lse = outputs(q, v)
    launch = _plans.forward(_plans.call(q, k, v, terms, extras[7:]))
    with on_device(q):
        launch(q, k, v, out, lse, *terms)
    return out, lse


def _backward(dout, dlse, out, lse, q, k, v, *extras):
    terms, lse = _positional(extras[:7]), lse.contiguous()
    if not dout.is_contiguous() or dout.data_ptr() & 15:
        dout = dout.clone(memory_format=torch.contiguous_format)
    plan = _plans.backward(_plans.call(q, k, v, terms, extras[7:]), _plans.layout(dout), _plans.layout(dlse))
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    slopes, sinks, *others = terms
    shares = None if slopes is None else lse.new_zeros(plan.shares)  # some programs write none
    with on_device(q):
        plan.prepare(q, out, dout, lse, dlse, lse2, delta)
        plan.keys(q, k, v, dout, lse2, delta, dk, dv, slopes, *others)
        plan.queries(q, k, v, dout, lse2, delta, dq, shares, slopes, *others)
    dslopes = lse if slopes is None else _by_sequence(shares, slopes, terms[4], plan.block)
    return dq, dk, dv, slopes_grad(slopes, dslopes), sinks_grad(sinks, lse, delta)


def _positional(terms: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The terms as kernels read them, by position alone; keys are offset as queries where nothing else is said."""
    slopes, sinks, starts, ends, cu_q, cu_k, seed = (None if x is None else x.contiguous() for x in terms)
    return slopes, sinks, starts, ends, cu_q, cu_q if cu_k is None else cu_k, seed


def _by_sequence(shares: Tensor, slopes: Tensor, cu_q: Tensor | None, block: int) -> Tensor:
    """What all programs found of the slopes' gradient, added up for each sequence and head, ``[b, h]``."""
    if cu_q is None or slopes.dim() == 1:
        return shares.sum(-1)
    # Packed sequence n owns programs from cu[n] // block + n on. A product with ones has a fixed order of sums.
    firsts = cu_q // block + torch.arange(len(cu_q), device=cu_q.device, dtype=torch.int32)
    at = torch.arange(shares.shape[-1], device=firsts.device)[:, None]
    owned = (at >= firsts[:-1]) & (at < firsts[1:])
    return (shares[0].double() @ owned.double()).T.to(shares.dtype)


def _fake_forward(q, k, v, *extras):
    return outputs(q, v)


OPERATORS = Operators("triton", _forward)
_library = register(
    (
        (f"triton_forward{FORWARD}", _forward, _fake_forward, forward_flops),
        (f"triton_backward{BACKWARD}", _backward, fake_backward, backward_flops),
    )
)
if _library is not None:
    OPERATORS.register(_library)
