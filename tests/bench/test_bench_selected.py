"""The tables of selected keys: lists that are causal, and rows that are compared with the torch backend."""

import torch
from bench_helpers import place

from attnlib import KVLayout
from attnlib.bench import selected, tables
from attnlib.bench.stored import Decoding

LATENTS = selected.SelectedCase("latents", 24, 40, 4, 1, 1, 8, latent=True, dtype=torch.float32)
BLOCKS = selected.SelectedCase("blocks", 48, 64, 8, 2, 16, 3, alike=4, dim=16, dtype=torch.float32)
STEP = selected.SelectedStep(Decoding("step", 2, 4, 128, KVLayout.grouped(2, 16, dtype=torch.float32)), 16, 3)


def test_early_queries_choose_what_there_is():
    lists = BLOCKS.lists("cpu")
    newest = (16 + torch.arange(48) // 4 * 4) // 16
    assert lists.shape == (1, 48, 2, 3)
    assert (lists <= newest[:, None, None]).all()
    assert torch.equal((lists >= 0).sum(-1)[0, :, 0], (newest + 1).clamp(max=3))
    assert torch.equal(lists[:, ::4], lists[:, 3::4])


def test_rows_are_timed_if_they_are_right(monkeypatch):
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "selected"]
    here = place()._replace(backend="reference")
    found = [row for _, row in selected.rows(here, [table], (LATENTS, BLOCKS))]
    assert [row.name for row in found] == [
        f"{name}, {what}" for name in ("latents", "blocks") for what in ("forward", "backward")
    ]
    assert all(isinstance(row.cells[name], float) for row in found for name in ("ours", "dense"))

    wrong = selected.of_last_queries
    monkeypatch.setattr(
        selected, "of_last_queries", lambda run: [x + (len(run.dout[0]) > 16) for x in wrong(run)]
    )
    (forward, _) = [row for _, row in selected.rows(here, [table], (LATENTS,))]
    assert not isinstance(forward.cells["ours"], float)


def test_a_step_over_selected_keys():
    [table] = [entry.table for entry in tables.GPU if entry.table.name == "selected-decode"]
    here = place()._replace(backend="reference")
    [(_, row)] = selected.steps(here, [table], (STEP,))
    assert row.name == "step"
    assert isinstance(row.cells["ours"], float)
