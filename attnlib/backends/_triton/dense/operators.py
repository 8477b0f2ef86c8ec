"""Dense and packed attention in Triton: the torch operators, forward and backward (FlashAttention)."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....call.cache import Run
from ....call.call import Call
from ....fp8 import Descales
from ....internal.watched import are_watched
from ...autograd import Operators
from ...operators import Arguments, count_learnt, flat, option_grads, outputs, readable, result_dtype
from ..functions.programs import captured
from ..launching.layouts import Key, contiguous, key_of, layout
from ..launching.replay import Replay, blank
from . import hopper as variants
from .quantize import quantize, quantized_key


class Dense:
    """The operators for attention without a cache, registered under ``name``.

    ``hopper`` allows the dedicated Hopper kernels.
    """

    def __init__(self, name: str, *, hopper: bool):
        self.hopper = hopper
        self.operators = Operators(name, self._forward, self._backward, quantize)

    def attention(self, call: Call) -> tuple[Tensor, Tensor]:
        """Run a dense or packed call: return its attention and the LSE."""
        a = flat(call)
        # Classify the tiles of a mask function only once, for both the forward and the backward.
        if a.mask_program is not None and not are_watched(a.q, a.k, a.v):
            a = self._with_tiles(readable(a))
        return self.operators(a, grad=call.spec.grad)

    def variant(self, call: Call) -> str:
        """Return the name of a call's kernels, or two names if the forward and backward kernels differ."""
        a = flat(call)
        key = quantized_key(self._key(a)) if a.to_fp8 else self._key(a)
        forward = variants.forward(key).variant
        if not call.spec.grad:
            return forward
        dout = contiguous((*a.q.shape[:-1], a.v.shape[-1]), a.q.dtype)
        backward = variants.backward(variants.in_order(self._key(a)), dout, None).variant
        return forward if forward == backward else f"{forward} forward, {backward} backward"

    def prepare(self, call: Call) -> Run | None:
        """Return a function that repeats a call on tensors of the same layouts, or None if impossible.

        Besides q, k and v, only their descales may change between calls.
        """
        # Calls in fp32 are not cached: torch's setting for the precision of products may change between
        # calls.
        if call.spec.strided or call.spec.dtype == torch.float32 or not (call.q.numel() and call.v.numel()):
            return None
        given = flat(call)
        # The cached call must not keep this call's tensors alive.
        a = given._replace(q=None, k=None, v=None, **dict.fromkeys(Descales._fields))
        run = self._quantizing(given, a) if given.to_fp8 else self._replay(given, a)
        if not call.spec.grad:
            return run
        backward = (lambda *_: None) if given.to_fp8 else _BackwardReplay(self._key(given), given, a)
        return self.operators.replay(run, backward, a, lse=call.lse)

    def _replay(self, given: Arguments, a: Arguments) -> Run:
        """Return a function that repeats the forward of ``given`` on new q, k, v and descales.

        ``a`` has the arguments that do not change between calls.
        """
        q, (*batch, s, h, _), plan = given.q, given.q.shape, variants.forward(self._key(given))
        blank_out = blank((*batch, s, h, given.v.shape[-1]), result_dtype(q.dtype), q.device)
        blank_lse, device = blank((*batch, h, s), torch.float32, q.device), q.device
        on = Replay(
            plan.launches,
            a._asdict() | {"lists": None},
            *"qkv",
            "out",
            "lse",
            "counter",
            "transposed",
            *Descales._fields,
        ).on

        def run(q: Tensor, k: Tensor, v: Tensor, descales: Descales | None = None) -> tuple[Tensor, Tensor]:
            out, lse = torch.empty_like(blank_out), torch.empty_like(blank_lse)
            counter, transposed = (
                plan.counter(device),
                v.new_empty(plan.transposed) if plan.transposed else None,
            )
            others = [
                0 if x is None else x.data_ptr() for x in (counter, transposed, *(descales or (None,) * 3))
            ]
            if on((q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), *others)):
                return out, lse
            return self._forward(
                *a._replace(q=q, k=k, v=v, **({} if descales is None else descales._asdict()))
            )

        return run

    def _quantizing(self, given: Arguments, a: Arguments) -> Run:
        """Return a function that repeats a call: round q, k and v to e4m3, and replay the forward on them."""
        a = a._replace(to_fp8=False)
        replay = self._replay(given._replace(to_fp8=False, **quantize(given)._asdict()), a)

        def run(q: Tensor, k: Tensor, v: Tensor, descales: None = None) -> tuple[Tensor, Tensor]:
            x = quantize(a._replace(q=q, k=k, v=v))
            out, lse = replay(x.q, x.k, x.v, x.descales)
            return out.to(q.dtype), lse

        return run

    def _key(self, a: Arguments) -> Key:
        same_start = a.selected is not None and a.k.data_ptr() == a.v.data_ptr()
        return key_of(a, a.q, a.k, a.v)._replace(hopper=self.hopper, same_start=same_start)

    def _with_tiles(self, a: Arguments) -> Arguments:
        """Classify the tiles of a mask function; return the arguments with the result as ``mask_tiles``."""
        if a.mask_program is None or a.mask_tiles is not None or a.selected is not None:
            return a
        launch, shape = variants.states(self._key(a))
        tiles = a.q.new_empty(shape, dtype=torch.int8 if a.mask_tree is None else torch.int32)
        launch.on(a._asdict() | captured(a) | {"states": tiles, "lengths": None})
        return a._replace(mask_tiles=tiles)

    def _forward(self, *arguments):
        a = self._with_tiles(readable(Arguments(*arguments)))
        out, lse = outputs(a.q, a.v)
        plan = variants.forward(self._key(a))
        made = {
            "out": out,
            "lse": lse,
            "counter": plan.counter(a.q.device),
            "transposed": a.v.new_empty(plan.transposed),
        }
        made |= _lists(a, plan.lists) | captured(a)
        for launch in plan.launches:
            launch.on(a._asdict() | made)
        return out, lse

    def _backward(self, dout, dlse, out, lse, *arguments):
        a, lse = self._with_tiles(readable(Arguments(*arguments))), lse.contiguous()
        dcaptured = lse.new_zeros(count_learnt(a))
        dq, dk, dv, dslopes, delta = self._gradients(self._key(a), a, dout, dlse, out, lse, dcaptured)
        return dq, dk, dv, *option_grads(a, dslopes, lse, delta), dcaptured

    def _gradients(
        self,
        key: Key,
        a: Arguments,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dcaptured: Tensor,
    ) -> tuple:
        """Return dq, dk and dv, the gradients of ALiBi slopes for each sequence (or None), and delta."""
        if not dout.is_contiguous() or dout.data_ptr() & 15:
            dout = dout.clone(memory_format=torch.contiguous_format)
        plan = variants.backward(variants.in_order(key), layout(dout), layout(dlse))
        dq, dk, dv = (x.new_empty(x.shape) for x in (a.q, a.k, a.v))
        # Some programs write no partial gradient of a slope, so all partial gradients start as zero.
        dslopes = None if plan.shares is None else lse.new_zeros((*lse.shape[:-1], plan.shares))
        lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
        tensors = a._asdict() | {
            "out": out, "lse": lse, "dout": dout, "dlse": dlse, "dslopes": dslopes, "lse2": lse2,
            "delta": delta, "dq": dq, "dk": dk, "dv": dv,
            "dq_sums": lse.new_zeros(plan.sums) if plan.sums else None,
        }  # fmt: skip
        tensors |= _lists(a, plan.lists) | captured(a, dcaptured)
        plan.on(tensors)
        if dslopes is not None:
            cu = a.cu_seqlens_q
            dslopes = dslopes.sum(-1) if cu is None else _by_sequence(dslopes, cu, plan.share_rows)
        return dq, dk, dv, dslopes, delta


class _BackwardReplay:
    """The cached backward of a call, which repeats the launches made for ``given`` on new q, k and v.

    ``a`` has the arguments that do not change between calls.
    """

    def __init__(self, key: Key, given: Arguments, a: Arguments):
        self._key, self._arguments = key, a._asdict() | {"dlse": None, "dslopes": None, "lists": None}
        q, k, v, (*batch, s, h, _) = given.q, given.k, given.v, given.q.shape
        self._out = contiguous((*batch, s, h, v.shape[-1]), q.dtype)
        lse = contiguous((*batch, h, s), torch.float32)
        self._blanks = [blank(x.shape, x.dtype, x.device) for x in (q, k, v)]
        self._strides = q.stride(), k.stride(), v.stride(), self._out.strides, lse.strides
        self._rows = -(-math.prod(lse.shape) // 4) * 4  # rounded up to 16 bytes
        # torch's deterministic setting changes the launches. For each value of the setting, this dict has the
        # launches and a function that allocates their buffer.
        self._planned: dict[bool, tuple[Replay, Callable[[], Tensor]]] = {}

    def __call__(
        self, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the gradients of q, k and v; None if the cached launches cannot run.

        The cached launches require the original strides. Saved-tensor hooks may return other strides.
        """
        if (q.stride(), k.stride(), v.stride(), out.stride(), lse.stride()) != self._strides:
            return None
        launches, make_room = self._planned.get(torch.are_deterministic_algorithms_enabled()) or self._plan()
        of_q, of_k, of_v = self._blanks
        dq, dk, dv, room = torch.empty_like(of_q), torch.empty_like(of_k), torch.empty_like(of_v), make_room()
        dout, rows, at = dout if dout.is_contiguous() else dout.contiguous(), self._rows, room.data_ptr()
        addresses = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dout.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), at, at + 4 * rows, at + 8 * rows,
        )  # fmt: skip
        return (dq, dk, dv) if launches.on(addresses) else None

    def _plan(self) -> tuple[Replay, Callable[[], Tensor]]:
        plan = variants.backward(variants.in_order(self._key), self._out, None)
        names = ("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "lse2", "delta", "dq_sums")
        launches = Replay(plan.launches, self._arguments, *names)
        room = blank((2 * self._rows + plan.sums,), torch.float32, self._key.device)
        found = launches, partial(torch.zeros_like if plan.sums else torch.empty_like, room)
        self._planned[torch.are_deterministic_algorithms_enabled()] = found
        return found


def _lists(a: Arguments, numbers: int) -> dict[str, Tensor | None]:
    """Return the classified tiles of a mask function, and a new buffer for lists of tiles or blocks."""
    lists = a.q.new_empty(numbers, dtype=torch.int32) if numbers else None
    of_caches = "block_ids", "lengths", "k_rope", "k_scale", "table", "split"
    return dict.fromkeys(of_caches) | {"states": a.mask_tiles, "lists": lists}


def _by_sequence(shares: Tensor, cu_q: Tensor, block: int) -> Tensor:
    """Sum the partial slope gradients ``[h, blocks]`` of packed sequences into ``[b, h]``."""
    # The programs of sequence n begin at cu[n] // block + n. To sum in a fixed order, we multiply by a matrix
    # of 0 and 1. Infinities and NaN are counted separately, since 0 times them is NaN.
    firsts = cu_q // block + torch.arange(len(cu_q), device=cu_q.device, dtype=torch.int32)
    at = torch.arange(shares.shape[-1], device=firsts.device)[:, None]
    owned = ((at >= firsts[:-1]) & (at < firsts[1:])).double()
    finite = shares.isfinite()
    sums = shares.masked_fill(~finite, 0).double() @ owned
    return sums.masked_fill((~finite).double() @ owned > 0, torch.nan).T.to(shares.dtype)
