"""Whole calls and their pieces, which an origin places: the pieces compute what the whole would."""

import pytest
import torch
from torch import Tensor

from attnlib import CAUSAL, FULL, Mask, merge_states, sliding
from attnlib.call.call import Call, Dropout, Origin, Packing, Score
from attnlib.dispatch.run import attend

MASKS = (FULL, CAUSAL, sliding(4), Mask(3, 2), Mask(None, -1, prefix=6), CAUSAL.shift(2))
OPTIONS = {
    "plain": {},
    "alibi and softcap": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.7])},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 0.0, 2.0])},
    "dropout": {"p": 0.4, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.7])},
}
ALL = [
    pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS),
    pytest.mark.parametrize("mask", MASKS, ids=str),
]
SIZES = pytest.mark.parametrize(("s", "t"), [(9, 13), (13, 13), (15, 11)])


def cases(test):
    """The test, for every mask and every set of options."""
    for mark in ALL:
        test = mark(test)
    return test


def make_call(s: int, t: int, mask: Mask, options: dict) -> Call:
    """A dense call. Under dropout V is an identity, so that the output shows which weights are kept."""
    options = dict(options)
    p = options.pop("p", 0.0)
    v = torch.eye(t)[None, :, None].expand(2, t, 2, t).contiguous() if p else torch.randn(2, t, 2, t)
    dropout = Dropout(p, torch.tensor([-987654321987])) if p else Dropout()
    tensors = {"q": torch.randn(2, s, 4, 8), "k": torch.randn(2, t, 2, 8), "v": v}
    return Call(mask=mask, score=Score(**options), dropout=dropout, lse=True, **tensors)


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], whole: tuple[Tensor, Tensor]) -> None:
    """Assert that two states merge to the whole, and that dropout dropped the same."""
    out, lse = merge_states(*first, *second)
    torch.testing.assert_close((out, lse), whole)
    assert torch.equal(out == 0, whole[0] == 0)


def check_keys(call: Call, name: str, *, as_tensor: bool, bounds: bool) -> None:
    """Two pieces of the keys, with all queries."""
    b, t, cut = call.q.shape[0], call.k.shape[1], 6
    starts, ends = torch.tensor([2, 7], dtype=torch.int32), torch.tensor([t, t - 2], dtype=torch.int32)
    if bounds:
        call = call._replace(key_starts=starts, key_ends=ends)
    states = []
    for k0, k1 in ((0, cut), (cut, t)):
        where = (t - (k1 - k0), k0)
        if as_tensor:
            where = (torch.full((b,), x, dtype=torch.int32) for x in where)
        piece = call._replace(k=call.k[:, k0:k1], v=call.v[:, k0:k1], origin=Origin(*where))
        if bounds:
            piece = piece._replace(key_starts=starts - k0, key_ends=ends - k0)
        states.append(
            attend(piece._replace(score=call.score if k0 == 0 else call.score._replace(sinks=None)), name)
        )
    merged(*states, attend(call, name))


def check_packed_keys(call: Call, name: str) -> None:
    """Two pieces of the keys of each packed sequence, of 5 and the rest of the queries, cut at its own
    place.
    """
    (q, k, v), lengths, cuts = (x[0] for x in (call.q, call.k, call.v)), (4, call.k.shape[1] - 4), (3, 1)
    rows, whole = offsets(5, q.shape[0] - 5), offsets(*lengths)
    call = call._replace(q=q, k=k, v=v, packing=Packing(rows, whole))
    states = []
    for bounds in (((0, cuts[0]), (0, cuts[1])), ((cuts[0], lengths[0]), (cuts[1], lengths[1]))):
        at = torch.cat([torch.arange(a, b) + n for (a, b), n in zip(bounds, whole.tolist(), strict=False)])
        own = [b - a for a, b in bounds]
        query = torch.tensor([t - mine for t, mine in zip(lengths, own, strict=True)], dtype=torch.int32)
        origin = Origin(query, torch.tensor([a for a, _ in bounds], dtype=torch.int32))
        score = call.score if not states else call.score._replace(sinks=None)
        packing = Packing(rows, offsets(*own))
        states.append(
            attend(call._replace(k=k[at], v=v[at], packing=packing, origin=origin, score=score), name)
        )
    merged(*states, attend(call, name))


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check_gradients(call: Call, name: str) -> None:
    """Pieces of the queries, heads and sequences, and their gradients, which add up to the whole's."""
    b, s, h, _ = call.q.shape
    everything = slice(None)
    first, last = slice(2), slice(2, 4)
    pieces = {  # of queries, of keys, and where the piece begins: its queries are the last ones to itself
        "query": [
            ((everything, slice(4)), (everything,), Origin(query=4 - s)),
            ((everything, slice(4, s)), (everything,), Origin()),
        ],
        "head": [
            ((everything, everything, first), (everything, everything, slice(1)), Origin()),
            ((everything, everything, last), (everything, everything, slice(1, 2)), Origin(head=2)),
        ],
        "sequence": [((slice(n, n + 1),), (slice(n, n + 1),), Origin(sequence=n)) for n in range(b)],
    }
    leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves
    dout = torch.randn(b, s, h, v.shape[-1])
    out, lse = attend(call._replace(q=q, k=k, v=v), name)
    whole = torch.autograd.grad((out * dout).sum(), leaves)
    for what, cut in pieces.items():
        found = torch.zeros_like(out), torch.zeros_like(lse)
        total = 0
        for rows, keys, origin in cut:
            heads = rows[2] if what == "head" else everything
            score = call.score._replace(
                **{
                    n: x[heads]
                    for n in ("alibi_slopes", "sinks")
                    if (x := getattr(call.score, n)) is not None
                }
            )
            mine = attend(call._replace(q=q[rows], k=k[keys], v=v[keys], score=score, origin=origin), name)
            total = total + (mine[0] * dout[rows]).sum()
            found[0][rows] = mine[0].detach()
            found[1].transpose(1, 2)[rows] = mine[1].detach().transpose(1, 2)
        torch.testing.assert_close(found, (out.detach(), lse.detach()))
        assert torch.equal(found[0] == 0, out == 0)
        torch.testing.assert_close(torch.autograd.grad(total, leaves), whole)
