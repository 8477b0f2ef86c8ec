"""GRPO learns the same from trees as from copies, at a lower cost."""

import argparse

import grpo_tree
import pytest
import torch
from variants import PRESETS, VARIANTS, make_model

SMALL = ["--steps", "2", "--prompts", "2", "--answers", "3", "--prompt-tokens", "20", "--new-tokens", "5"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_prints_what_trees_save_and_writes_the_picture(variant, tmp_path, capsys):
    grpo_tree.main([*SMALL, "--variant", variant, "--device", "cpu", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    [tokens] = [line.split() for line in text.splitlines() if line.startswith("tokens")]
    assert int(tokens[1]) <= 2 * (20 + 3 * 5)
    assert int(tokens[2]) == 2 * 3 * (20 + 5 - 1)
    assert "losses differ by at most" in text
    assert (tmp_path / "grpo_tree.png").read_bytes().startswith(b"\x89PNG")


def test_log_probabilities_and_their_gradients_are_those_of_copies():
    torch.manual_seed(0)
    model = make_model("gqa", PRESETS["tiny"]).double()
    prompts = torch.randint(256, (2, 1, 9)).expand(2, 4, 9).flatten(0, 1)
    tokens = torch.cat((prompts, torch.randint(2, (8, 6))), 1)  # answers share beginnings, too
    found = [way(model, tokens, 9) for way in (grpo_tree.log_probs_of_tree, grpo_tree.log_probs_of_copies)]
    assert found[0][1] < found[1][1]
    weights = torch.randn(8, 6, dtype=torch.float64)
    results = [
        [x.detach(), *torch.autograd.grad((x * weights).sum(), model.parameters())]
        for x in (found[0][0], found[1][0])
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)  # log_softmax is fp32


def test_advantages_are_normalized_within_a_prompt():
    torch.manual_seed(0)
    options = argparse.Namespace(answers=4, new_tokens=8)
    model = make_model("mqa", PRESETS["tiny"])
    batch = grpo_tree.sample(model, torch.randint(256, (2, 7)), options, torch.Generator().manual_seed(0))
    assert batch.tokens.shape == (8, 15)
    rewards = grpo_tree.lower_case(batch.tokens[:, 7:]).view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch.advantages, expected.flatten())


def test_losses_that_differ_are_an_error(tmp_path, monkeypatch):
    other = grpo_tree.log_probs_of_copies

    def wrong(model, tokens, prompt):
        found, rows = other(model, tokens.flip(0), prompt)
        return found, rows

    monkeypatch.setattr(grpo_tree, "log_probs_of_copies", wrong)
    with pytest.raises(SystemExit, match="expected equal losses"):
        grpo_tree.main([*SMALL, "--device", "cpu", "--out", str(tmp_path)])


def test_too_few_answers_are_a_usage_error(capsys):
    with pytest.raises(SystemExit) as ended:
        grpo_tree.main(["--answers", "1"])
    assert ended.value.code == 2
    assert "--answers: expected at least 2" in capsys.readouterr().err
