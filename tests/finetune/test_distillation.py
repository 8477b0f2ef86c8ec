"""What distillation asks of a student: its definition, who learns from it, and that layers learn apart."""

import pytest
import torch
from family_models import make
from torch import nn

from attnlib.finetune.distillation import Speaker, differences, layerwise, text_bits
from attnlib.finetune.folders import attention_layers

TOKENS = torch.arange(60).reshape(3, 20) * 11 % 50


class Attention(nn.Linear):
    """Of one token alone, which is enough here; gives out a tuple, as models of transformers do."""

    def forward(self, x, *, mask):
        return super().forward(x), mask


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y, mask = self.attention(x, mask="untouched")
        assert mask == "untouched"
        x = x + y
        return x + self.mlp(x).relu()


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(50, 16), Block(), Block(), Block(), nn.Linear(16, 50))

    @property
    def attention(self):
        return [block.attention for block in self.children() if isinstance(block, Block)]


@pytest.mark.parametrize(("kind", "count"), [("lfm2", 2), ("qwen3_vl", 2), ("gpt2", 2)])
def test_attention_is_that_of_the_text_alone(kind, count):
    """A hybrid has layers without, and a vision encoder may have as many layers as the text."""
    found = attention_layers(make(kind))
    assert len(found) == count
    assert not any("Vision" in type(layer).__name__ for layer in found)
    assert all(type(layer).__name__.endswith("Attention") for layer in found)


@pytest.fixture
def pair():
    """A student and a teacher, equal but for their attention layers."""
    student, teacher = Model(), Model()
    student.load_state_dict(teacher.state_dict())
    for layer in student.attention:
        layer.reset_parameters()
    with Speaker(student, student.attention, student) as s, Speaker(teacher, teacher.attention, teacher) as t:
        yield s, t


def test_an_identical_student_has_nothing_to_learn_from_its_teacher(pair):
    _, teacher = pair
    kl, attention, text = differences(teacher, teacher, TOKENS)
    assert kl.item() == pytest.approx(0, abs=1e-6)
    assert attention.item() == 0
    assert text > 0
    assert layerwise(teacher, teacher, TOKENS) == 0


def test_losses_are_those_of_the_definition(pair):
    student, teacher = pair
    kl, attention, text = lost = differences(student, teacher, TOKENS)
    p, q = (model(TOKENS[:, :-1]).double().softmax(-1) for model in (teacher, student))
    said = q.gather(-1, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(kl.double(), (p * (p / q).log2()).sum(-1).mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(text.double(), -said.log2().mean(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        text_bits(student(TOKENS[:, :-1]), TOKENS).double(), -said.log2(), rtol=1e-4, atol=1e-6
    )
    (_, ys), (_, zs) = (model.listen(TOKENS[:, :-1]) for model in (teacher, student))
    errors = [
        ((y[b] - z[b]).norm() / y[b].norm()) ** 2 for y, z in zip(ys, zs, strict=True) for b in range(3)
    ]
    torch.testing.assert_close(attention, sum(errors) / len(errors))
    torch.testing.assert_close(lost.loss(0.25, "text"), text + 0.75 * (kl + attention))  # the teacher fades
    torch.testing.assert_close(lost.loss(0.25, "teacher"), kl + 0.75 * attention)  # its attention fades
    assert lost.loss(1, "teacher") == kl


@pytest.mark.parametrize("loss", [lambda *x: differences(*x).loss(0.5, "text"), layerwise])
def test_the_loss_of_a_batch_is_the_mean_of_its_parts(pair, loss):
    parts = [loss(*pair, row) for row in TOKENS.split(1)]
    torch.testing.assert_close(loss(*pair, TOKENS), sum(parts) / 3)


def test_gradients_reach_the_student_alone(pair):
    student, teacher = pair
    differences(student, teacher, TOKENS).loss(0.5, "text").backward()
    assert all(x.grad is None for x in teacher.model.parameters())
    assert all(x.grad is not None and x.grad.any() for x in student.model.parameters())


def test_layer_by_layer_each_attention_layer_learns_from_the_teachers_inputs(pair):
    """Its gradient is that of the layer alone, on what the teacher's layer reads; nothing else has one."""
    student, teacher = pair
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in teacher._attention
    ]
    layerwise(student, teacher, TOKENS).backward()
    for hook in hooks:
        hook.remove()
    attention = {x for layer in student.model.attention for x in layer.parameters()}
    assert all((x.grad is not None) == (x in attention) for x in student.model.parameters())
    for ours, theirs, x in zip(student.model.attention, teacher.model.attention, inputs, strict=True):
        weight = ours.weight.detach().clone().requires_grad_()
        y, z = (
            nn.functional.linear(x, *w).flatten(1)
            for w in ((theirs.weight, theirs.bias), (weight, ours.bias))
        )
        ((y - z).square().sum(1) / y.square().sum(1)).mean().div(3).backward()
        torch.testing.assert_close(ours.weight.grad, weight.grad)


def test_nobody_listens_outside_of_the_block(pair):
    student, _ = pair
    before = student(TOKENS)
    given = [torch.zeros(3, 20, 16)] * 3
    forced, heard = student.listen(TOKENS, given)
    assert len(heard) == 3
    assert not forced.equal(before)
    assert student(TOKENS).equal(before)
    student.__exit__()
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in student.model.attention)


def test_a_silent_layer_of_the_teacher_has_a_finite_error(pair):
    student, teacher = pair
    with torch.no_grad():
        for layer in teacher.model.attention:
            layer.weight.zero_(), layer.bias.zero_()
    assert layerwise(student, teacher, TOKENS).isfinite()
    assert layerwise(teacher, teacher, TOKENS) == 0
