"""Students: what of them learns, from whom they are made; plain SVD is the whitened one's poorer sister."""

import pytest
import torch
import variants
from finetune_gqa import speaker
from students import IDENTITY, seen_by_layers, student, ways
from variants import Preset

from attnlib.finetune.distillation import differences

PRESET = Preset(32, 2, 8, 8, 2, 20, 8, 16, 2, 0, 1e-2)
TOKENS = torch.arange(60).reshape(3, 20) * 11 % 256


@pytest.fixture
def original():
    model = variants.make_model("mha", PRESET).eval()
    torch.nn.init.normal_(model.embed.weight)
    return model


@pytest.fixture
def seen(original):
    return seen_by_layers(original, [TOKENS])


@pytest.mark.parametrize("name", ways(PRESET))
def test_a_student_has_something_to_learn_and_all_of_it_does(original, seen, name):
    model = student(original, ways(PRESET)[name], seen)
    with speaker(model) as learner, speaker(original) as teacher:
        lost = differences(learner, teacher, TOKENS)
        lost.loss(0.5, "text").backward()
    assert lost.kl > 1e-5
    assert lost.attention > 1e-4
    assert all(parameter.grad is None for parameter in original.parameters())
    for name, parameter in model.named_parameters():
        trains = not name.endswith(IDENTITY)
        assert (parameter.grad is not None) == trains, name
        assert not trains or parameter.grad.any(), name


def test_calibrations_are_of_what_the_layers_read(original, seen):
    inputs = []
    hook = original.blocks[1].attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    original(TOKENS)
    hook.remove()
    assert [calibration.tokens for calibration in seen] == [60, 60]
    y = torch.nn.functional.pad(inputs[0].detach().double().flatten(0, 1), (0, 1), value=1)
    torch.testing.assert_close(seen[1].moment, y.T @ y / 60)


def test_a_student_shares_nothing_with_the_original(original, seen):
    before = original(TOKENS)
    model = student(original, ways(PRESET)["GQA, regroup + align"], seen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(original(TOKENS), before, rtol=0, atol=0)
    assert [layout.heads for layout in model.kv_layouts()] == [2, 2]


def test_plain_svd_keeps_other_parts_of_the_same_latent(original, seen):
    """At full rank both are the same function; below, the whitened one is nearer to the layer on what it
    sees.
    """
    layer, [calibration, _] = original.blocks[0].attention, seen
    x = original.blocks[0].attention_norm(original.embed(TOKENS)).detach()
    whole = ways(PRESET._replace(kv_lora_rank=64 + 56))
    exact, other = (whole[name](layer, calibration)(x) for name in ("MLA, whitened", "MLA, plain SVD"))
    torch.testing.assert_close(other, exact, rtol=1e-3, atol=1e-4)
    plain, whitened = (ways(PRESET)[name](layer, calibration) for name in ("MLA, plain SVD", "MLA, whitened"))
    assert plain.rope == whitened.rope
    assert plain.kv_layout == whitened.kv_layout
    assert (whitened(x) - exact).norm() < (plain(x) - exact).norm()
