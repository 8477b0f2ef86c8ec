"""Calls over trees: what they refuse, what is changed once, and chunks of them."""

import pytest
import torch
from tree_cases import EXAMPLE

from attnlib import (
    CAUSAL,
    KVCache,
    KVLayout,
    attention,
    cached_attention,
    masks,
    scores,
    sliding,
    varlen_attention,
)
from attnlib.call.call import Call, Origin, Packing
from attnlib.call.trees import over_tree
from attnlib.dispatch.run import attend
from attnlib.packing import tree
from attnlib.scores import Score

MADE = tree(EXAMPLE)
T = len(MADE.tokens)
TREE = masks.until(MADE.ends, MADE.positions)
Q = torch.randn(1, T, 4, 8)


def test_dropout_is_refused():
    attention(Q, Q, Q, mask=TREE, dropout_p=0.0)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: expected 0 with a tree .* got 0.5"):
        attention(Q, Q, Q, mask=TREE & sliding(3), dropout_p=0.5)


def test_a_cache_is_refused():
    cache = KVCache.paged([KVLayout.grouped(4, 8)], pages=8, page_size=8, max_sequences=2)
    cache.admit(1)
    with cache.step(T) as (kv,):
        view = kv.append(Q, Q)
        with pytest.raises(NotImplementedError, match=r"^mask: expected no tree .*cache\.fork"):
            cached_attention(Q, view, mask=TREE)


@pytest.mark.parametrize("ends", [MADE.ends, MADE.ends[None]])
def test_ends_of_fewer_tokens_are_refused(ends):
    longer = torch.randn(1, T + 1, 4, 8)
    with pytest.raises(ValueError, match=r"^mask: expected a tensor \[.*t>=19\] as the call has them, got"):
        attention(longer, longer, longer, mask=masks.until(ends))
    cu = torch.tensor([0, T, T + 1], dtype=torch.int32)
    if ends.dim() == 1:
        with pytest.raises(ValueError, match=r"^mask: expected ends \[t=19\] .* got \(18,\)"):
            varlen_attention(*(longer[0],) * 3, cu_seqlens_q=cu, cu_seqlens_k=cu, mask=masks.until(ends))


def test_calls_change_once():
    """So that a call can be split, and its chunks validated again."""
    plain = Call(Q, CAUSAL, Score(alibi_slopes=torch.ones(4)), Q, Q)
    assert over_tree(plain) is plain
    cu = torch.tensor([0, T], dtype=torch.int32)
    packed = Call(Q[0], TREE, plain.score, Q[0], Q[0], packing=Packing(cu, cu))
    for call in (plain._replace(mask=TREE), packed):
        once = over_tree(call)
        assert once.score.alibi_slopes is None
        again = over_tree(once)
        assert again.mask.program == once.mask.program
        assert again.score.function.program == once.score.function.program
        assert len(again.mask.tensors) == len(once.mask.tensors)


def test_rows_alone_change_nothing():
    score = Score(function=scores.bias_tensor(torch.zeros(1, 1, T, T)))
    call = Call(Q, masks.until(MADE.ends), score, Q, Q)
    assert over_tree(call).score is score


def test_a_chunk_of_heads_reads_its_own_slopes():
    """Origins count heads and sequences of a larger call, whose chunk has slopes of its own."""
    q, slopes = torch.randn(3, T, 4, 8), torch.rand(3, 4)
    mask = masks.until(MADE.ends, MADE.positions)
    whole = attention(q, q, q, mask=mask, alibi_slopes=slopes)
    own = q[1:, :, 2:]
    score = Score(alibi_slopes=slopes[1:, 2:])
    out, _ = attend(Call(own, mask, score, own, own, origin=Origin(head=2, sequence=1)))
    torch.testing.assert_close(out, whole[1:, :, 2:])


def test_calls_over_trees_compile():
    def run(q, ends, positions, slopes):
        mask = masks.until(ends, positions) & sliding(3)
        return attention(q, q, q, mask=mask, alibi_slopes=slopes)

    given = Q, MADE.ends[None], MADE.positions[None], torch.rand(4)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), run(*given))
