"""Students: what distillation asks of them and who learns from it; plain SVD is the whitened one's poorer sister."""

import pytest
import torch
import variants
from distillation import attention_outputs, differences
from students import IDENTITY, seen_by_layers, student, unfreeze, ways
from variants import Preset

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


def test_an_identical_student_has_nothing_to_learn_from_its_teacher(original):
    kl, attention, text = differences(original, original, TOKENS)
    assert kl.item() == pytest.approx(0, abs=1e-6)
    assert attention.item() == 0
    assert text > 0


@pytest.mark.parametrize("name", ways(PRESET))
def test_another_student_has(original, seen, name):
    model = student(original, ways(PRESET)[name], seen)
    kl, attention, _ = differences(model, original, TOKENS)
    assert kl > 1e-5
    assert attention > 1e-4


def test_divergence_is_that_of_the_definition(original, seen):
    model = student(original, ways(PRESET)["GQA, mean-pool"], seen)
    p, q = (m(TOKENS[:, :-1]).double().softmax(-1) for m in (original, model))
    kl, attention, text = lost = differences(model, original, TOKENS)
    torch.testing.assert_close(kl.double(), (p * (p / q).log2()).sum(-1).mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(text.double(), -q.gather(-1, TOKENS[:, 1:, None]).log2().mean(), rtol=1e-4, atol=1e-6)
    with attention_outputs(original) as ys, attention_outputs(model) as zs:
        original(TOKENS[:, :-1]), model(TOKENS[:, :-1])
    errors = [((y - z).norm() / y.norm()) ** 2 for y, z in zip(ys, zs, strict=True)]
    torch.testing.assert_close(attention, sum(errors) / 2)
    torch.testing.assert_close(lost.loss(0.25), text + 0.75 * (kl + attention))  # the teacher fades, the text stays


@pytest.mark.parametrize("everything", [True, False])
def test_gradients_reach_the_student_and_of_it_what_trains(original, seen, everything):
    model = student(original, ways(PRESET)["MLA, as DeepSeek"], seen)
    unfreeze(model, everything=everything)
    differences(model, original, TOKENS).loss(0.5).backward()
    assert all(parameter.grad is None for parameter in original.parameters())
    for name, parameter in model.named_parameters():
        trains = (everything or ".attention." in name) and not name.endswith(IDENTITY)
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
    """At full rank both are the same function; below, the whitened one is nearer to the layer on what it sees."""
    layer, [calibration, _] = original.blocks[0].attention, seen
    x = original.blocks[0].attention_norm(original.embed(TOKENS)).detach()
    whole = ways(PRESET._replace(kv_lora_rank=64 + 56))
    exact, other = (whole[name](layer, calibration)(x) for name in ("MLA, whitened", "MLA, plain SVD"))
    torch.testing.assert_close(other, exact, rtol=1e-3, atol=1e-4)
    plain, whitened = (ways(PRESET)[name](layer, calibration) for name in ("MLA, plain SVD", "MLA, whitened"))
    assert plain.rope == whitened.rope
    assert plain.kv_layout == whitened.kv_layout
    assert (whitened(x) - exact).norm() < (plain(x) - exact).norm()
