"""The example that shows attention draws what transformers' eager attention computes."""

import look
import pytest
import torch
from variants import PRESETS, VARIANTS, make_model, save

from tests.examples.test_load_hf import folder_of

TEXT = "A cat sat on the mat."


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_are_those_of_eager_attention(family, tmp_path):
    theirs = folder_of(family, tmp_path)
    theirs.set_attn_implementation("eager")
    model, tokens, names = look.load(tmp_path, TEXT, "cpu")
    assert "".join(names) == TEXT
    looks = look.look(model, tokens)
    for shown, expected in zip(looks, theirs(tokens[None], output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(shown.weights, expected[0].detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(shown.mass, expected[0].detach().sum(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_prints_a_line_for_each_head_and_draws_each_layer(variant, tmp_path, capsys):
    torch.manual_seed(0)
    save(make_model(variant, PRESETS["tiny"]), variant, PRESETS["tiny"], tmp_path / "model.safetensors")
    look.main([str(tmp_path / "model.safetensors"), TEXT, "--layers", "0", "2", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:9]] == [[str(n), str(h)] for n in (0, 2) for h in range(4)]
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["layer_0.png", "layer_2.png"]


def test_the_first_token_of_a_head_that_sees_nothing_else():
    eye = torch.zeros(1, 5, 5)
    eye[:, :, 0] = 1
    [_, line] = look.table([look.Look(eye, eye.sum(1), torch.ones(1, 5))], [0]).splitlines()
    assert line.split() == ["0", "0", "1.00", "100%", "2.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.safetensors", TEXT], "look.py: "),
        (["model.safetensors", ""], "text: expected some characters"),
    ],
)
def test_what_cannot_be_shown_is_an_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(make_model("gqa", PRESETS["tiny"]), "gqa", PRESETS["tiny"], tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match=message):
        look.main(arguments)


def test_a_layer_that_does_not_exist_is_a_usage_error(tmp_path, capsys):
    save(make_model("gqa", PRESETS["tiny"]), "gqa", PRESETS["tiny"], tmp_path / "model.safetensors")
    with pytest.raises(SystemExit) as ended:
        look.main([str(tmp_path / "model.safetensors"), TEXT, "--layers", "7"])
    assert ended.value.code == 2
    assert "--layers: expected 0 to 2, got 7" in capsys.readouterr().err
