"""Pieces of a call, merged, are the call; and what they find of gradients adds up to its own, on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_sequences import Case, cases, learning, packs, tensors, whole
from torch import Tensor

from attnlib import Mask, merge_states
from attnlib.call import Call, Dropout, Packing, Score
from attnlib.parallel.pieces import pieces_of, whole_of
from attnlib.parallel.sharding import Range
from attnlib.running import attend, gradients

TOKENS = 48


def call_of(case: Case, options: dict, q: Tensor, *, packed: bool) -> Call:
    score = Score(*(options.get("score" if name == "function" else name) for name in Score._fields))
    dropout = Dropout(options.get("dropout_p", 0.0), options.get("dropout_seed"))
    cu = torch.tensor((0, 11, 11, 30, 43), dtype=torch.int32)
    packing = Packing(cu, cu) if packed else None
    return whole_of(
        Call(
            q, case.mask, score, key_starts=options.get("key_starts"), key_ends=options.get("key_ends"),
            packing=packing, dropout=dropout,
        )
    )  # fmt: skip


def together(cuts: list[int], case: Case, backend: str, *, packed: bool) -> list[Tensor]:
    """The output, and the gradients of q, k and v, by pieces that begin and end at these tokens."""
    (q, k, v), dout = tensors(case, packed=packed)
    q, k, v = (x.detach() for x in (q, k, v))
    options, _ = learning(case)
    call, dim = call_of(case, options, q, packed=packed), q.dim() - 3
    ranges = [Range(a, b) for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
    state = torch.zeros_like(dout), q.new_full(q.shape[:-1], -torch.inf).mT.contiguous()
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
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
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
