"""Running a call: documents run as packed sequences where nothing else depends on where they lie."""

import torch

from attnlib import (
    CAUSAL,
    Mask,
    masks,
    scores,
    sliding,
)
from attnlib.call.call import Call, Dropout, Origin, Score, checked
from attnlib.dispatch.run import packed_by_documents

B, S, T, H = 2, 9, 14, 4


def test_documents_run_packed_where_nothing_else_depends_on_places():
    mask, q = CAUSAL & masks.documents_of(torch.tensor([0, 5, 20]), 20), torch.randn(1, 20, 4, 8)

    def packed(q=q, k=None, mask=mask, **options):
        k = q if k is None else k
        return packed_by_documents(checked(Call(q, mask, Score(), k, k)._replace(**options)))

    call = packed()
    assert call.q.shape == (20, 4, 8)
    assert call.mask == CAUSAL
    assert call.packing.cu_seqlens_q.tolist() == [0, 5, 20, 20]
    assert packed(mask=sliding(3) & mask).mask == sliding(3)
    for others in (
        {"mask": masks.chunked(4) & mask},
        {"mask": mask | sliding(3)},
        {"mask": ~mask},
        {"mask": Mask(None, 0, 3) & masks.documents_of(torch.tensor([0, 5, 20]), 20)},
        {"q": q[:, 3:], "k": q},
        {"score": Score(alibi_slopes=torch.rand(4))},
        {"score": Score(function=scores.distance_bias(torch.randn(4, 9)))},
        {"dropout": Dropout(0.5)},
        {"key_starts": torch.zeros(1, dtype=torch.int32)},
        {"origin": Origin(head=1)},
    ):
        assert packed(**others) is None, others
