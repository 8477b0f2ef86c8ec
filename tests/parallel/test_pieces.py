"""Pieces of a call, merged, are the call; and what they find of gradients adds up to its own, on every
backend.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_sequences import PACK, Case, cases, learning, packs, tensors, whole
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, attention, merge_states, sliding, varlen_attention
from attnlib.call.call import Call, Dropout, Packing, Score
from attnlib.dispatch.run import attend, gradients
from attnlib.parallel.pieces import pieces_of, whole_of
from attnlib.parallel.sharding import TokenRange

TOKENS = 48


def call_of(case: Case, options: dict, q: Tensor, *, packed: bool) -> Call:
    score = Score(*(options.get("score" if name == "function" else name) for name in Score._fields))
    dropout = Dropout(options.get("dropout_p", 0.0), options.get("dropout_seed"))
    cu = torch.tensor(PACK, dtype=torch.int32, device=q.device)
    packing = Packing(cu, cu) if packed else None
    return whole_of(
        Call(
            q, case.mask, score, key_starts=options.get("key_starts"), key_ends=options.get("key_ends"),
            packing=packing, dropout=dropout,
        )
    )  # fmt: skip


def together(cuts: list[int], case: Case, backend: str, *, packed: bool) -> list[Tensor]:
    """The output, and the gradients of q, k and v, by pieces that begin and end at these tokens."""
    qkv, dout = tensors(case, packed=packed)
    qkv = [x.detach() for x in qkv]
    return pieced(cuts, qkv, dout, call_of(case, learning(case)[0], qkv[0], packed=packed), backend)


def pieced(cuts: list[int], qkv: list[Tensor], dout: Tensor, call: Call, backend: str) -> list[Tensor]:
    """The same of a call of a whole sequence, or pack."""
    q, k, v = qkv
    tokens = q.shape[-3]
    dim = q.dim() - 3
    ranges = [TokenRange(a, b) for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    state = torch.zeros_like(dout), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32).mT.contiguous()
    pieces = []
    for held in ranges:
        keys_and_values = [x.narrow(dim, held.start, held.size) for x in (k, v)]
        for own in ranges:
            rows = slice(own.start, own.end)
            for piece in pieces_of(call, q[..., rows, :, :], *keys_and_values, [own], [held]):
                pieces.append((rows, held, piece))
                with torch.no_grad():
                    known = state[0][..., rows, :, :], state[1][..., rows]
                    merged = merge_states(*known, *attend(piece.call, backend))
                state[0][..., rows, :, :], state[1][..., rows] = merged
    out, lse = state
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for rows, held, piece in pieces:
        of = (x.contiguous() for x in (dout[..., rows, :, :], out[..., rows, :, :], lse[..., rows]))
        found = gradients(piece.call, backend, *of)
        keys = slice(held.start + piece.keys.start, held.start + piece.keys.stop)
        dq[..., rows, :, :] += found.q
        dk[..., keys, :, :] += found.k
        dv[..., keys, :, :] += found.v
    return [out, dq, dk, dv]


EVERY = [(case, False) for case in cases() if "sinks" not in case.options] + [
    (case, True) for case in packs() if "sinks" not in case.options
]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("case", "packed"), EVERY, ids=lambda x: getattr(x, "name", None))
def test_pieces_add_up(case, packed, backend):
    qkv, dout = tensors(case, packed=packed)
    options, _ = learning(case)
    out = whole(case, *qkv, options, packed=packed)
    right = [out, *torch.autograd.grad(out, qkv, dout)]
    for x, y in zip(together([7, 24, 31], case, backend, packed=packed), right, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-5), (x - y).abs().max()


bound = st.none() | st.integers(-20, 20)


@settings(max_examples=60, deadline=None)
@given(bound, bound, st.lists(st.integers(1, TOKENS - 1), max_size=4, unique=True).map(sorted), st.booleans())
def test_pieces_of_any_band_add_up(left, right, cuts, packed):
    case = Case("band", Mask(left, right))
    qkv, dout = tensors(case, packed=packed)
    out = whole(case, *qkv, {}, packed=packed)
    expected = [out, *torch.autograd.grad(out, qkv, dout)]
    for x, y in zip(together(cuts, case, "torch", packed=packed), expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-5), (x - y).abs().max()


BANDS = [
    Case("full", FULL),
    Case("causal", CAUSAL, kv_heads=2),
    Case("window", sliding(90)),
    Case("far", Mask(200, -70)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("backend", ["triton", "triton:generic"])
@pytest.mark.parametrize("case", BANDS, ids=lambda x: x.name)
def test_pieces_add_up_on_a_gpu(case, backend, channels, packed):
    torch.manual_seed(0)
    batch, tokens = () if packed else (2,), 1024
    shapes = [(*batch, tokens, heads, channels) for heads in (4, case.kv_heads, case.kv_heads)]
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    dout, cu = (
        torch.randn_like(qkv[0]),
        torch.tensor((0, 300, 300, 900, 1024), dtype=torch.int32, device="cuda"),
    )
    wide = [x.double().requires_grad_() for x in qkv]
    packing = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    out = (varlen_attention if packed else attention)(*wide, mask=case.mask, backend="torch", **packing)
    right = [out, *torch.autograd.grad(out, wide, dout.double())]
    call = Call(qkv[0], case.mask, packing=Packing(cu, cu) if packed else None)
    for x, y in zip(pieced([256, 640], qkv, dout, call, backend), right, strict=True):
        assert (x - y).abs().max() <= 2e-2 * y.abs().max(), (x - y).abs().max()
