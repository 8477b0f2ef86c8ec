"""A dense model becomes a sparse one, which learns its choice and decodes over pages."""

import re

import pytest
import sparse_lm
import torch
from small_models import SMALL
from torch import nn

from attnlib import Indexer, Rope

TINY = ["--steps", "3", "--warm-up", "2", "--sparse", "2", "--length", "32", "--windows", "2"]
TINY += ["--new-tokens", "4"]
SELECT = Indexer(heads=2, head_dim=8, top=8, rope=Rope(8))
ROWS = ("dense", "window", "sparse, new index branches", "sparse, warmed up", "sparse, trained")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return sparse_lm.make_model(SMALL, SELECT)


@pytest.fixture
def tokens():
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))


def test_it_prints_every_model_and_writes_the_picture(small_preset, text_file, tmp_path, capsys):
    sparse_lm.main([*TINY, "--text", str(text_file), "--out", str(tmp_path)])
    text = capsys.readouterr().out
    for name in (*ROWS, "dense, trained as long", "window, trained as long"):
        [found] = re.findall(rf"^{name} +([\d.]+) +([+-][\d.]+) +([\d.]+)$", text, re.MULTILINE)
        assert 0 < float(found[2]) <= 1
        assert (float(found[2]) == 1) == name.startswith("dense")
    assert re.search(r"logits over pages and of the whole text differ by at most \de-\d+ ", text)
    assert (tmp_path / "sparse_lm.png").read_bytes().startswith(b"\x89PNG")


def test_the_window_is_the_first_keys_and_the_last_ones():
    chosen = sparse_lm.window(8)(nn.Identity(), torch.randn(2, 32, 4))
    expected = [{j for j in range(i + 1) if j < 2 or j > i - 6} for i in range(32)]
    for row in chosen.indices[:, :, 0]:
        lists = [[j for j in keys if j >= 0] for keys in row.tolist()]
        assert [set(keys) for keys in lists] == expected
        assert all(len(set(keys)) == len(keys) for keys in lists)


def test_dense_is_the_models_own_forward(tokens):
    plain = sparse_lm.make_model(SMALL)
    torch.testing.assert_close(sparse_lm.run(plain, tokens, sparse_lm.dense)[0], plain(tokens))


def test_chosen_keys_are_those_of_the_models_own_forward(model, tokens):
    logits, calls = sparse_lm.run(model, tokens, sparse_lm.by_index)
    torch.testing.assert_close(logits, model(tokens))
    assert all(chosen.indices.shape == (2, 33, 1, 8) for _, _, chosen in calls)


def test_only_index_branches_learn_from_warm_up(model, tokens):
    branches = nn.ModuleList(block.attention.indexer for block in model.blocks)
    model.requires_grad_(False)
    branches.requires_grad_(True)
    sparse_lm.loss_of(model, sparse_lm.dense)(tokens, 0).backward()
    assert all(x.grad.abs().max() > 0 for x in branches.parameters() if x.dim() > 1)
    own = {id(x) for x in branches.parameters()}
    assert all(x.grad is None for x in model.parameters() if id(x) not in own)


def test_recall_is_the_dense_probability_of_the_chosen_keys(model, tokens):
    found = sparse_lm.measure(model, tokens, sparse_lm.by_index, 8).recall
    shares = []
    with torch.no_grad():
        for layer, x, chosen in sparse_lm.run(model, tokens[:, :-1], sparse_lm.by_index)[1]:
            rows = torch.arange(32)
            p = layer.weights(x, selected=sparse_lm.ALL, over="none", rows=rows).mean(1)
            shares.append(p[:, 8:].gather(2, chosen.indices[:, 8:, 0].long()).sum(-1).mean())
    assert found == pytest.approx(torch.stack(shares).mean().item(), rel=1e-5)


def test_wrong_logits_over_pages_are_an_error(small_preset, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_lm, "decode", lambda model, text, prompt, steps: (text, 0.5))
    with pytest.raises(SystemExit, match=r"logits over pages: expected .* got 5.0e-01"):
        sparse_lm.main([*TINY, "--text", str(text_file), "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--batch", "0"], "--batch: expected at least 1, got 0"),
        (["--length", "24", "--new-tokens", "16"], "--length: expected at least 8, and twice the new tokens"),
    ],
)
def test_what_cannot_be_is_a_usage_error(arguments, why, capsys):
    with pytest.raises(SystemExit) as ended:
        sparse_lm.main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
