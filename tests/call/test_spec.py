"""The spec of a call: what may decide about its backend is in it, and no length."""

import pytest
import torch

from attnlib import CAUSAL, FULL, attention, attention_with_lse, explain, mask_mod, sliding, varlen_attention


def spec_of(batch: int = 2, s: int = 5, t: int = 5, *, function=attention, grad: bool = False, **options):
    q, k = torch.randn(batch, s, 4, 8, requires_grad=grad), torch.randn(batch, t, 2, 8)
    return explain(function, q, k, k, **{"mask": CAUSAL} | options).spec


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 17, 17), (2, 1, 40), (2, 0, 0)])
def test_calls_of_any_batch_and_length_have_one_spec(sizes):
    """So that nothing is chosen or compiled again as a sequence grows."""
    assert spec_of(*sizes) == spec_of()
    assert hash(spec_of(*sizes)) == hash(spec_of())


def test_packed_calls_of_any_offsets_have_one_spec():
    def packed(*lengths):
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        q, k = torch.randn(sum(lengths), 4, 8), torch.randn(sum(lengths), 2, 8)
        sections = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return explain(varlen_attention, q, k, k, mask=CAUSAL, **sections).spec

    assert packed(3, 4) == packed(9) == packed(1, 0, 6) != spec_of()


def shown(t: int):
    return mask_mod(lambda b, h, i, j, x: x[j], torch.ones(t, dtype=torch.bool))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("mask", {"mask": FULL}),
        ("mask", {"mask": sliding(3)}),
        ("score", {"softcap": 3.0}),
        ("score", {"alibi_slopes": torch.ones(4)}),
        ("score", {"sinks": torch.zeros(4)}),
        ("bounds", {"key_starts": torch.zeros(2, dtype=torch.int32)}),
        ("dropout", {"dropout_p": 0.5}),
        ("grad", {"grad": True}),
        ("lse", {"function": attention_with_lse}),
        ("functions", {"mask": CAUSAL & shown(5)}),
    ],
)
def test_what_may_decide_is_in_it(field, options):
    """And nothing else differs for it."""
    plain, other = spec_of()._asdict(), spec_of(**options)._asdict()
    assert {name for name in plain if plain[name] != other[name]} == {field}


def test_functions_of_other_tensors_have_one_spec():
    """Their numbers and sizes are the call's; their dtypes and ranks may need another kernel."""
    assert spec_of(mask=shown(5)) == spec_of(mask=shown(9))
    assert spec_of(mask=shown(5)) != spec_of(mask=mask_mod(lambda b, h, i, j, x: x[j] > 0, torch.ones(5)))


def test_it_names_tensors_whose_channels_are_not_contiguous():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 8, 2).transpose(2, 3)
    assert explain(attention, q, k, q[:, :, :2], mask=CAUSAL).spec.strided == ("k",)
    assert (
        explain(attention, q.transpose(1, 2).contiguous().transpose(1, 2), q, q, mask=CAUSAL).spec.strided
        == ()
    )
